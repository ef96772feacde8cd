"""``make demo``: a PyTorch model from export to training on several processes of this machine, in three commands that anyone can type.

    python -m examples.demo

Each command is printed before it runs. What they write, and a summary, is left in ``demo-output/``. The exit code is that of the first
command that fails; the last one fails if loss, gradients or updated parameters are not those of one process (``--check``).
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.language_model import VOCABULARY, WIDTH
from examples.summary import summary, verdict
from soap.cli.options import positive
from soap.cli.run import text
from soap.errors import INTERRUPTED_EXIT_CODE, SoapError
from soap.files import write_text_atomically
from soap.measure.this_machine import cpu_cores, cpu_model

RESULTS = ("model.pt2", "strategy.json", "timeline.json", "run.json", "summary.md")
COMMANDS = {"soap-search": "soap.cli.search", "soap-run": "soap.cli.run"}


@dataclass(frozen=True)
class Step:
    """One command to type. ``output``: the file that its standard output goes to; it is shown if there is none."""

    purpose: str
    words: Sequence[str]
    output: Path | None = None

    @property
    def line(self) -> str:
        """The command as one types it."""
        return shlex.join(self.words) + (f" > {shlex.quote(str(self.output))}" if self.output else "")

    def run(self) -> int:
        """Print the command, run it, and answer with its exit code."""
        print(f"\n# {self.purpose}\n$ {self.line}\n", flush=True)
        if self.output is None:
            return subprocess.run(self.words).returncode
        with self.output.open("w", encoding="utf-8") as stream:
            return subprocess.run(self.words, stdout=stream).returncode


def steps(args: argparse.Namespace) -> list[Step]:
    """The demo's commands; ``run.json`` is what the last one measured."""
    model, strategy, timeline = (str(args.output / name) for name in ("model.pt2", "strategy.json", "timeline.json"))
    sizes = [*changed("--vocabulary", args.vocabulary, VOCABULARY), *changed("--width", args.width, WIDTH)]
    export = [shown(sys.executable), "-m", "examples.language_model", model, *sizes]
    quick = ["--budget", str(args.budget), "--profile", "0", "--verify", "0"]  # nothing is measured or run: its gain is clear enough
    search = [*program("soap-search"), model, "--cluster", f"local:{args.processes}", *quick, "-o", strategy]
    training = ["--data", "examples.language_model:batches", "--optimizer", "adam", "--lr", "0.002", "--steps", str(args.steps)]
    looked_at = ["--check", "--compare-data-parallel", "--timeline", timeline, "--json"]
    run = [*program("soap-run"), strategy, "--model", model, *training, *looked_at]
    return [
        Step("Export a language model with a large vocabulary, as a user would write it (examples/language_model.py).", export),
        Step("Search: which way of spreading it over the processes of this machine has the shortest predicted iteration?", search),
        Step("Train with it, compare with one process and with data parallelism, and measure.", run, args.output / "run.json"),
    ]


def changed(option: str, value: int, default: int) -> list[str]:
    """An option, if it has another value than by default."""
    return [] if value == default else [option, str(value)]


def program(name: str) -> list[str]:
    """How to call one of the commands: by the script that its installation put beside this Python, or else as a module."""
    script = Path(sys.executable).with_name(name)
    return [shown(script)] if script.exists() else [shown(sys.executable), "-m", COMMANDS[name]]


def shown(path: str | Path) -> str:
    """A path as one would type it here: relative if it lies below."""
    path = Path(path)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def demonstrate(args: argparse.Namespace) -> int:
    """All steps up to the first that fails, then what they have shown."""
    args.output.mkdir(parents=True, exist_ok=True)
    for name in RESULTS:
        (args.output / name).unlink(missing_ok=True)  # nobody should take an earlier run's results for this one's
    todo, before = steps(args), machine()
    code = next((code for step in todo if (code := step.run())), 0)
    report = read_report(args.output / "run.json")
    if report is not None:
        write_text_atomically(args.output / "summary.md", summary(report, before, [step.line for step in todo]))
        print(f"{text(report)}\n\n{verdict(report)}\n")
        print(f"{args.output} holds {', '.join(sorted(path.name for path in args.output.iterdir()))}")
        print("timeline.json opens in https://ui.perfetto.dev: one iteration, predicted and measured side by side")
    if code:
        print(f"demo: the last command ended with exit code {code}", file=sys.stderr)
    return code


def machine() -> str:
    """What this machine is, and how busy: measured times say little without it."""
    busy = f", load average {os.getloadavg()[0]:.1f} before the demo" if hasattr(os, "getloadavg") else ""
    return f"{cpu_model()}, {cpu_cores()} cores{busy}"


def read_report(path: Path) -> dict[str, Any] | None:
    """What ``soap-run`` measured; None if it did not come so far."""
    content = path.read_text(encoding="utf-8") if path.exists() else ""
    return json.loads(content) if content else None


def options() -> argparse.ArgumentParser:
    """The demo's options; without any it takes one to two minutes on two cores."""
    parser = argparse.ArgumentParser(prog="demo", description="Export, search, train and check on this machine.")
    parser.add_argument("--processes", type=positive, default=4, help="to train on (default %(default)s)")
    parser.add_argument("--budget", type=positive, default=300, help="strategies that the search tries (default %(default)s)")
    parser.add_argument("--steps", type=positive, default=20, help="training steps (default %(default)s)")
    parser.add_argument("--vocabulary", type=positive, default=VOCABULARY, help="of the model (default %(default)s)")
    parser.add_argument("--width", type=positive, default=WIDTH, help="of the model's layers (default %(default)s)")
    parser.add_argument("--output", type=Path, default=Path("demo-output"), help="folder for the results (default %(default)s)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    args = options().parse_args(argv)
    try:
        return demonstrate(args)
    except (SoapError, OSError) as error:
        print(f"demo: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED_EXIT_CODE


if __name__ == "__main__":
    sys.exit(main())
