"""Checks that need a GPU.

    python -m benchmarks.gpu                        # all that have no result yet, in order of importance
    python -m benchmarks.gpu --only kernels updates
    python -m benchmarks.gpu --list
    python -m benchmarks.gpu --tables               # results as Markdown

Each check runs in a process of its own and has at most so many seconds; its result is a JSON file in the folder. A check that has one is
not run again unless ``--again`` says so; one that failed is. ``--device cpu --tiny`` tries the checks without a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.gpu.checks import CHECKS, Setup
from benchmarks.gpu.tables import tables
from soap.files import write_text_atomically

FOLDER = Path("benchmarks/gpu/results")


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point. Exit code 1 if a check failed."""
    args = options().parse_args(argv)
    if args.list:
        print("\n".join(f"{name:32} {check.what}" for name, check in CHECKS.items()))
        return 0
    folder = Path(args.folder)
    if args.tables:
        print(tables([json.loads(path.read_text()) for path in sorted(folder.glob("*.json")) if not path.name.startswith("profile-")]))
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the check that runs, too
    folder.mkdir(parents=True, exist_ok=True)
    if args.inside:
        return _inside(args.inside, Setup(args.device, args.tiny, folder, Path(args.scratch)))
    with tempfile.TemporaryDirectory(prefix="soap-gpu-") as own:
        failed = [name for name in args.only or CHECKS if not _run(name, args, folder, args.scratch or own)]
    return 1 if failed else 0


def options() -> argparse.ArgumentParser:
    """The command's options."""
    parser = argparse.ArgumentParser(prog="gpu", description="Checks that need a GPU.")
    parser.add_argument("--only", nargs="+", choices=list(CHECKS), metavar="NAME", help="default: all")
    parser.add_argument("--again", action="store_true", help="also those that have a result")
    parser.add_argument("--list", action="store_true", help="say what there is")
    parser.add_argument("--tables", action="store_true", help="print the results as Markdown")
    parser.add_argument("--folder", default=str(FOLDER), help="of results (default %(default)s)")
    parser.add_argument("--scratch", help="folder of exported models (default: a temporary one)")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="default %(default)s")
    parser.add_argument("--tiny", action="store_true", help="a dry run with small sizes")
    parser.add_argument("--inside", choices=list(CHECKS), help=argparse.SUPPRESS)
    return parser


def _run(name: str, args: argparse.Namespace, folder: Path, scratch: str) -> bool:
    """Whether it has a result now. Every check has measurements of its own (``XDG_CACHE_HOME``)."""
    if (folder / f"{name}.json").exists() and not args.again:
        print(f"{name}: has a result", flush=True)
        return True
    check, start = CHECKS[name], time.monotonic()
    words = ["--inside", name, "--folder", str(folder), "--scratch", scratch, "--device", args.device, *(["--tiny"] if args.tiny else [])]
    with tempfile.TemporaryDirectory(prefix="soap-cache-") as cache:
        environment = {**os.environ, "XDG_CACHE_HOME": cache, **check.environment}
        process = subprocess.Popen([sys.executable, "-m", "benchmarks.gpu", *words], env=environment, start_new_session=True)
        try:
            code: int | str = process.wait(check.limit_s)
        except subprocess.TimeoutExpired:
            code = f"stopped after {check.limit_s} s"
        finally:
            _end(process)
    print(f"{name}: {time.monotonic() - start:.0f} s, {'done' if code == 0 else f'failed ({code})'}", flush=True)
    return code == 0


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the check with all ranks that it has started: they are a session of their own."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _inside(name: str, setup: Setup) -> int:
    start = time.monotonic()
    values = CHECKS[name].run(setup)
    result = {"check": name, "what": CHECKS[name].what, **_place(setup), "seconds": round(time.monotonic() - start, 1), "values": values}
    write_text_atomically(setup.folder / f"{name}.json", json.dumps(result, indent=1) + "\n")
    return 0


def _place(setup: Setup) -> dict[str, Any]:
    """What the figures belong to."""
    import torch

    found = torch.cuda.get_device_name() if setup.device == "cuda" else "cpu"
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda, "python": sys.version.split()[0]}
    return {"date": str(date.today()), "device": found, "tiny": setup.tiny, **versions}


if __name__ == "__main__":
    sys.exit(main())
