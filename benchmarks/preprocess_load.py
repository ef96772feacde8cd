"""``python -m benchmarks.preprocess_load``: what the resource manager does while other programs take memory and cores from it.

Runs in a control group with little memory (version 1; root). After some seconds another program in the same group takes most of its memory,
and later two programs take the cores. Prints when they begin and end, and the manager's decisions. Results: docs/results/preprocess.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from soap.preprocessing.generate import generate

GROUPS = Path("/sys/fs/cgroup/memory")
LIMIT_BYTES, HOG_BYTES = 1_300_000_000, 900_000_000
HOG = "import sys, time; own = b'1' * int(sys.argv[1]); print('ready', flush=True); time.sleep(600)"
BURN = "while True: pass"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=4_000_000)
    parser.add_argument("--times", type=int, default=8, help="how often the files are read, as files of their own")
    parser.add_argument("--pause", type=float, default=8.0, help="seconds between the beginning and the end of a load")
    parser.add_argument("--folder", type=Path)
    args = parser.parse_args()
    group = GROUPS / f"soap-benchmark-{os.getpid()}"
    group.mkdir()
    try:
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            (group / "memory.limit_in_bytes").write_text(str(LIMIT_BYTES))
            generate(Path(folder) / "raw", args.rows, files=2, wrote=lambda count: None)
            show(*watch(group, Path(folder), args.times, args.pause))
    finally:
        time.sleep(1)
        group.rmdir()


def inside(group: Path, *command: str) -> subprocess.Popen[str]:
    words = ["sh", "-c", 'echo $$ > "$0/cgroup.procs"; exec "$@"', str(group), *command]
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True)


def watch(group: Path, folder: Path, times: int, pause_s: float) -> tuple[list[tuple[float, str]], list[dict[str, object]]]:
    """Events, and the manager's decisions."""
    files = [str(path) for path in sorted((folder / "raw").iterdir())] * times
    argv = ["-m", "soap.cli.preprocess", "criteo-kaggle", *files, "-o", str(folder / "out"), "--no-parquet", "--quiet"]
    run = inside(group, sys.executable, *argv)
    events = [(time.time(), "the run begins")]
    time.sleep(pause_s)
    hog = inside(group, sys.executable, "-c", HOG, str(HOG_BYTES))
    assert hog.stdout is not None
    hog.stdout.readline()
    events.append((time.time(), f"another program holds {HOG_BYTES / 1e6:.0f} MB"))
    time.sleep(pause_s)
    hog.kill()
    hog.wait()
    events.append((time.time(), "it ends"))
    time.sleep(pause_s)
    burning = [subprocess.Popen([sys.executable, "-c", BURN]) for _ in range(2)]
    events.append((time.time(), "two programs take a core each"))
    time.sleep(pause_s)
    for one in burning:
        one.kill()
        one.wait()
    events.append((time.time(), "they end"))
    code = run.wait()
    events.append((time.time(), f"the run ends with exit code {code}"))
    lines = (folder / "out" / "decisions.jsonl").read_text(encoding="utf-8").splitlines()
    return events, [json.loads(line) for line in lines]


def show(events: list[tuple[float, str]], decisions: list[dict[str, object]]) -> None:
    begin = events[0][0]
    lines = [(at, f"**{what}**") for at, what in events]
    for own in decisions:
        if "units" in own:
            text = "{step}: X={units} Y={chunks}, {tasks} at once, because of {because_of}; others {others_busy_cores} cores".format(**own)
            lines.append((float(str(own["at_s"])), f"{text}, {int(str(own['available_bytes'])) // 10**6} MB left"))
        else:
            lines.append((float(str(own["at_s"])), str(own)))
    for at, text in sorted(lines):
        print(f"{at - begin:6.1f} s  {text}")


if __name__ == "__main__":
    main()
