"""The wheel with machine code: what it holds and says of itself, and that a search from it compiles nothing."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from release.platform_wheel import PLACE, main, make, platform_tag, wheel
from soap.errors import SoapError
from soap.simulator.compiled import shipped

ROOT = Path(__file__).parent.parent
ABOUT = "soap_search-0.2.0.dist-info"
FILES = {
    "soap/__init__.py": b'"""A package."""\n',
    f"{PLACE}/index.json": b"{}",
    f"{ABOUT}/WHEEL": b"Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n\n",
    f"{ABOUT}/RECORD": b"of before",
}


def test_it_says_what_it_is_for_and_lists_what_it_holds() -> None:
    archive = zipfile.ZipFile(io.BytesIO(wheel(FILES)))
    assert re.fullmatch(r"cp3\d+-cp3\d+-\w+", platform_tag())
    assert archive.read(f"{ABOUT}/WHEEL").decode().splitlines()[2:4] == ["Root-Is-Purelib: false", f"Tag: {platform_tag()}"]
    rows = list(csv.reader(io.StringIO(archive.read(f"{ABOUT}/RECORD").decode())))
    assert [row[0] for row in rows] == archive.namelist() and sorted(archive.namelist()) == sorted(FILES)
    for name, digest, size in rows[:-1]:
        data = archive.read(name)
        own = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
        assert (digest, int(size)) == (f"sha256={own}", len(data))
    assert rows[-1] == [f"{ABOUT}/RECORD", "", ""]
    assert wheel(FILES) == wheel(FILES)


def test_it_is_made_of_a_wheel_for_all_platforms(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "soap_search-0.2.0-cp311-cp311-linux_x86_64.whl"
    other.write_bytes(wheel(FILES))
    broken = tmp_path / "soap_search-0.2.0-py3-none-any.whl"
    broken.write_bytes(b"no archive")
    for path in (other, broken, tmp_path / "none-py3-none-any.whl"):
        with pytest.raises(SoapError, match=r"is no wheel for all platforms; expected a file soap_search-VERSION-py3-none-any\.whl"):
            make(path, tmp_path / "out")
        assert main([str(path), "-o", str(tmp_path / "out")]) == 1
        assert capsys.readouterr().err.count("\n") == 1
    assert not (tmp_path / "out").exists()


SEARCH = """
import sys
sys.path.insert(0, sys.argv[1])
from numba.core import event
compiled = []
class Listener(event.Listener):
    def on_start(self, event): compiled.append(event.data["dispatcher"].py_func.__qualname__)
    def on_end(self, event): pass
event.register("numba:compile", Listener())
import json, soap
from soap.simulator.compiled.jit import is_compiled
from soap.api.every_function import missing
found = soap.find("zoo:rnnlm:tiny", "p100-4x4", soap.SearchOptions(budget=1000))
print(json.dumps([soap.__file__, missing(), compiled, found.time_ns]))
"""


@pytest.mark.long
@pytest.mark.timeout(1800)  # it took 880 s where ten processes shared two cores
@pytest.mark.skipif(not shipped._is_like(shipped.PROCESSOR, shipped.FEATURES), reason="this processor is of another kind")
def test_a_search_from_it_compiles_nothing(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    files = "soap simulator search profiles pyproject.toml README.md LICENSE MANIFEST.in CHANGELOG.md CITATION.cff constraints.txt"
    subprocess.run(f"tar --exclude=__pycache__ -cf - {files} | tar -xf - -C {source}", shell=True, cwd=ROOT, check=True)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(source)]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    (pure,) = tmp_path.glob("*.whl")
    made = make(pure, tmp_path)
    assert made.name.endswith(f"-{platform_tag()}.whl")
    outcomes = []
    for own in (made, pure):
        site, kept = tmp_path / f"site of {own.name}", tmp_path / f"kept by {own.name}"
        zipfile.ZipFile(own).extractall(site)
        environment = {**os.environ, "NUMBA_CACHE_DIR": str(kept)}
        command = [sys.executable, "-I", "-c", SEARCH, str(site)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        file, missing, compiled, time_ns = json.loads(done.stdout)
        assert file == str(site / "soap" / "__init__.py")
        assert bool(missing) == (own is pure)
        assert ("advance" in compiled) == (own is pure)
        if own is made:
            assert list(kept.rglob("*.nbc")) == []
        outcomes.append(time_ns)
    assert outcomes[0] == outcomes[1]
