"""A wheel with machine code, made of the wheel for all platforms: what this Python and this numba compile of it for most processors.

    python -m release.platform_wheel dist/soap_search-0.2.0-py3-none-any.whl -o dist

It is for this Python and this platform, and its name says so. Everything is compiled in a fresh process from the wheel's own files, which
takes two minutes of a core.
"""

from __future__ import annotations

import argparse
import base64
import csv
import hashlib
import io
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from soap.errors import SoapError
from soap.files import write_bytes_atomically
from soap.simulator.compiled.shipped import FOLDER
from soap.simulator.compiled.shipping import ENVIRONMENT

PURE = "py3-none-any"
PLACE = f"soap/{FOLDER.name}"
LONGEST_S = 1800


def platform_tag() -> str:
    """This Python and this platform, as names of wheels have them."""
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    return f"{python}-{python}-{re.sub('[-.]', '_', sysconfig.get_platform())}"


def make(pure: Path, out: Path) -> Path:
    """Write the wheel with machine code to a folder. SoapError if ``pure`` is no wheel for all platforms, or not all can be compiled."""
    if not pure.name.endswith(f"-{PURE}.whl") or not zipfile.is_zipfile(pure):
        raise SoapError(f"{pure} is no wheel for all platforms; expected a file soap_search-VERSION-{PURE}.whl")
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(pure) as archive:
        source, shipped = Path(folder, "source"), Path(folder, "shipped")
        archive.extractall(source)
        compile_into(shipped, source, Path(folder, "kept"))
        files = {name: archive.read(name) for name in archive.namelist()}
        files |= {f"{PLACE}/{path.name}": path.read_bytes() for path in sorted(shipped.iterdir())}
    made = out / pure.name.replace(PURE, platform_tag())
    write_bytes_atomically(made, wheel(files))
    return made


def compile_into(folder: Path, source: Path, kept: Path) -> None:
    """Compile the package that lies in ``source`` in a fresh process. ``kept``: an empty folder. SoapError with what it printed last if it
    fails."""
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(source), "NUMBA_CACHE_DIR": str(kept), "XDG_CACHE_HOME": str(kept)}
    command = [sys.executable, "-m", "soap.api.every_function", str(folder)]
    done = subprocess.run(command, cwd=source, env=environment, capture_output=True, text=True, timeout=LONGEST_S)
    if done.returncode:
        raise SoapError(f"the package of the wheel cannot be compiled: {done.stderr[-2000:]}")


def wheel(files: dict[str, bytes]) -> bytes:
    """The archive of these files, of which those about the wheel say that it is for this platform, and what it holds."""
    (about,) = (name for name in files if name.endswith(".dist-info/WHEEL"))
    record = about.replace("/WHEEL", "/RECORD")
    text = files[about].decode().replace("Root-Is-Purelib: true", "Root-Is-Purelib: false")
    text = text.replace(f"Tag: {PURE}", f"Tag: {platform_tag()}")
    files = {name: data for name, data in files.items() if name != record} | {about: text.encode()}
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in [*files.items(), (record, _record(files, record).encode())]:
            archive.writestr(_entry(name), data, zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


def _entry(name: str) -> zipfile.ZipInfo:
    """A file that all may read, of no date: equal files make equal wheels."""
    info = zipfile.ZipInfo(name)
    info.external_attr = 0o644 << 16
    return info


def _record(files: dict[str, bytes], record: str) -> str:
    """The list of all files with their hashes."""
    lines = io.StringIO()
    csv.writer(lines, lineterminator="\n").writerows([*_hashes(files), (record, "", "")])
    return lines.getvalue()


def _hashes(files: dict[str, bytes]) -> Iterator[tuple[str, str, int]]:
    for name, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        yield name, f"sha256={digest}", len(data)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m release.platform_wheel", description=__doc__)
    parser.add_argument("wheel", metavar="WHEEL", type=Path, help="of this package, for all platforms")
    parser.add_argument("-o", "--output", metavar="FOLDER", type=Path, default=Path("dist"), help="where it goes (default %(default)s)")
    args = parser.parse_args(argv)
    try:
        print(make(args.wheel, args.output))
    except SoapError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
