"""A newcomer's first minutes: a new environment, the wheel installed into it, and the first commands, as docs/first_minutes.md shows them.

    make wheel && python -m benchmarks.first_minutes dist/*.whl -o docs/first_minutes.md

Commands run one after the other in an empty folder with an empty home, so nothing is compiled or measured before. The page has what they
print and how long they take; how much of the machine other programs used meanwhile stands beside. Expected: each command ends with 0.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.pages import give
from benchmarks.quiet import Watch, used_seconds
from soap.errors import SoapError

ROOT = Path(__file__).parent.parent
WIDEST = 140
"""Characters of a line of output on the page."""
MOST_LINES = 44
LIMIT_S = 1800
SAMPLED_S = 0.1
"""How often it is looked up how much processor time a command's processes have used. What the parent of a process that has ended did not
ask for is known only while that parent lives."""


@dataclass(frozen=True)
class Step:
    """A command with a sentence about it."""

    about: str
    command: str


QUICK = "--cluster p100-4x4 --profile 0 --verify 0"
STEPS = (
    Step("A new environment.", "python3 -m venv .venv"),
    Step(
        "The package, with what draws reports, in the versions that its tests run with.",
        "pip install -q -c constraints.txt './{wheel}[report]'",
    ),
    Step("The first search, for 16 GPUs that are not here.", f"soap-search zoo:gpt:tiny {QUICK}"),
    Step("The same again: what was read of the model is kept.", f"soap-search zoo:gpt:tiny {QUICK}"),
    Step("A page to look at.", "soap-report zoo:gpt:tiny --cluster p100-4x4 --strategy strategy.json -o report.html"),
    Step(
        "For this machine: it and the model are measured, and the best plans are run in turns, each for up to a minute.",
        "soap-search zoo:rnnlm:tiny -o here.json",
    ),
    Step("Train with what was found, and compare with one process.", "soap-run here.json --model zoo:rnnlm:tiny --steps 20 --check"),
)


@dataclass(frozen=True)
class Outcome:
    """What a command printed, the seconds that it took, and the processor seconds of all its processes."""

    step: Step
    lines: tuple[str, ...]
    seconds: float
    processor_seconds: float


def run(step: Step, wheel: Path, folder: Path, home: Path) -> Outcome:
    """Run a command as a person would at a shell. SoapError if it fails."""
    kept = {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "SSL_", "REQUESTS_", "LANG", "LC_"))}
    places = [str(folder / ".venv" / "bin"), str(Path(sys.base_prefix) / "bin"), "/usr/bin", "/bin"]
    environment = {**kept, "PATH": os.pathsep.join(places), "HOME": str(home)}
    command, begin = step.command.format(wheel=wheel), time.perf_counter()
    with tempfile.TemporaryFile("w+", encoding="utf-8") as printed:
        running = subprocess.Popen(command, shell=True, cwd=folder, env=environment, stdout=printed, stderr=subprocess.STDOUT)
        used, seconds = _watched(running, begin + LIMIT_S)
        printed.seek(0)
        text = printed.read()
    if running.returncode:
        raise SoapError(f"{command!r} ended with {running.returncode}: {text[-2000:]}")
    return Outcome(step, tuple(text.replace(str(folder), ".").replace(str(home), "~").splitlines()), seconds, used)


def _watched(running: subprocess.Popen[bytes], latest: float) -> tuple[float, float]:
    """(processor seconds of a process and of all that it starts, seconds) until it ends. ``latest``: when it is killed."""
    began, before, most = time.perf_counter(), used_seconds(), 0.0
    while running.poll() is None:
        if time.perf_counter() > latest:
            running.kill()
        most = max(most, used_seconds() - before)
        time.sleep(SAMPLED_S)
    seconds = time.perf_counter() - began
    return max(most, used_seconds() - before), seconds


def shown(outcome: Outcome, wheel: Path) -> list[str]:
    """A command's part of the page."""
    command = outcome.step.command.format(wheel=wheel.name)
    lines = [line.rstrip() if len(line) <= WIDEST else line[: WIDEST - 1].rstrip() + "…" for line in outcome.lines]
    if len(lines) > MOST_LINES:
        lines = [*lines[: MOST_LINES - 2], "...", lines[-1]]
    took = [f"{own:.0f} s" if own >= 10 else f"{own:.1f} s" for own in (outcome.seconds, outcome.processor_seconds)]
    return [outcome.step.about, "", "```text", f"$ {command}", *lines, "```", "", f"({took[0]}; {took[1]} of a core)", ""]


def page(outcomes: Sequence[Outcome], wheel: Path, others: float | None) -> str:
    """The page."""
    memory = re.search(r"MemTotal:\s+(\d+)", Path("/proc/meminfo").read_text(encoding="ascii"))
    machine = f"{os.cpu_count()} cores, {int(memory[1]) / 2**20:.0f} GiB" if memory else f"{os.cpu_count()} cores"
    crowd = "" if others is None else f" Other programs used {others:.0%} of the cores meanwhile."
    head = [
        "# The first minutes",
        "",
        "What a newcomer sees, from an empty environment on; `python -m benchmarks.first_minutes` ran these commands and wrote this page.",
        f"{datetime.now(UTC):%Y-%m-%d}, {machine}, no GPU, Python {sys.version.split()[0]}.{crowd}",
        "",
    ]
    total = sum(own.seconds for own in outcomes)
    tail = [f"All of it took {total / 60:.0f} minutes. Where to go on: the table at the end of the [README](../README.md).", ""]
    return "\n".join([*head, *(line for own in outcomes for line in shown(own, wheel)), *tail])


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.first_minutes", description=__doc__)
    parser.add_argument("wheel", metavar="WHEEL", type=Path, help="of this package")
    parser.add_argument("-o", "--output", metavar="FILE", help="where the page goes (default: standard output)")
    args = parser.parse_args(argv)
    outcomes: list[Outcome] = []
    watch = Watch()
    with tempfile.TemporaryDirectory() as parent:
        folder, home = Path(parent) / "work", Path(parent) / "home"
        folder.mkdir()
        home.mkdir()
        for path in (args.wheel, ROOT / "constraints.txt"):
            shutil.copy(path, folder)
        for step in STEPS:
            outcomes.append(run(step, Path(args.wheel.name), folder, home))
            print(f"{outcomes[-1].seconds:8.1f} s  {step.command}", file=sys.stderr, flush=True)
            if args.output:
                give(page(outcomes, args.wheel, watch.others_share()), args.output)  # so that it is there up to what fails
    if not args.output:
        give(page(outcomes, args.wheel, watch.others_share()), None)
    return 0


if __name__ == "__main__":
    sys.exit(main())
