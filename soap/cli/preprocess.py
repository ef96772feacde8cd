"""``soap-preprocess``: recommender data made ready for training, as fast as this machine allows."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from soap import outputs
from soap.cli import reporting
from soap.cli.command import Parser, UsageError, entry_point, note
from soap.cli.options import add_json, not_negative, positive
from soap.cli.plain_text import aligned
from soap.errors import INTERRUPTED_EXIT_CODE
from soap.preprocessing import generate, local
from soap.preprocessing.engine import Options, Summary
from soap.preprocessing.manager import MODES, Limits
from soap.preprocessing.result import META
from soap.preprocessing.spec import PRESETS, load_spec
from soap.preprocessing.work import STEPS, Done
from soap.units import format_bytes


@dataclass
class _Step:
    name: str
    tasks: int
    size_bytes: int
    begin_s: float
    ends_s: list[float] = field(default_factory=list)


class Steps:
    """Takes down when each step began and each of its tasks ended, in seconds since this was made."""

    def __init__(self) -> None:
        self._origin_s = time.monotonic()
        self._steps: list[_Step] = []

    def begin(self, step: str, tasks: int, size_bytes: int) -> None:
        """A step begins."""
        self._steps.append(_Step(step, tasks, size_bytes, self._now_s()))

    def seen(self) -> None:
        """A task of the step has ended."""
        self._steps[-1].ends_s.append(self._now_s())

    def documents(self) -> list[dict[str, Any]]:
        """Plain values, step by step: ``name``, ``tasks``, ``bytes`` of input, ``begin_s``, ``ends_s``, ``seconds``."""
        return [
            {
                "name": step.name,
                "tasks": step.tasks,
                "bytes": step.size_bytes,
                "begin_s": step.begin_s,
                "ends_s": list(step.ends_s),
                "seconds": (step.ends_s[-1] if step.ends_s else step.begin_s) - step.begin_s,
            }
            for step in self._steps
        ]

    def _now_s(self) -> float:
        return time.monotonic() - self._origin_s


PROG = "soap-preprocess"
DEFAULT_ROWS = 100_000


def make_parser() -> Parser:
    """The command's options."""
    parser = Parser(
        PROG,
        "Index categories in order of first appearance, convert numbers, and write arrays for training, and Parquet. The result\n"
        "is the same, byte by byte, however much runs at once. Ctrl-C keeps what is done, and the same command goes on from there.",
        f"{PROG} criteo-kaggle day_0.tsv day_1.tsv.gz -o data",
    )
    names = ", ".join(PRESETS)
    parser.add_argument("spec", metavar="SPEC", nargs="?", help=f"what columns there are: a YAML file, or {names}")
    inputs = "TSV, TSV.gz or Parquet, in chronological order; a folder: its files by name"
    parser.add_argument("inputs", metavar="INPUT", nargs="*", help=inputs)
    parser.add_output(
        "-o", "--output", kind=outputs.FOLDER, metavar="OUT", required=True, help="a new or empty folder, or that of a run to go on with"
    )
    parser.add_argument("--on-error", choices=["stop", "skip"], default="stop", help="at lines that do not fit SPEC (default %(default)s)")
    mode = "how steps are parallelized, such as index=unit,convert=adaptive; steps: index, convert, write; " + ", ".join(MODES)
    parser.add_argument("--mode", metavar="STEP=MODE,…", type=modes, default={}, help=f"{mode} (default adaptive)")
    workers = "tasks at once at most, on each node (default: by cores, memory and load, while it runs)"
    nodes = "spread over all nodes of the Ray cluster there (auto: that of this machine), which share inputs and OUT"
    parser.add_argument("--ray", metavar="ADDRESS", help=nodes)
    parser.add_argument("--workers", metavar="N", type=positive, help=workers)
    parser.add_argument("--chunk-bytes", metavar="N", type=positive, help="of input at once, about (default: by memory, up to 32 MiB)")
    parser.add_argument("--no-parquet", action="store_true", help="write arrays for training alone")
    parser.add_argument("--compress", action="store_true", help="compress Parquet (zstd)")
    parser.add_argument("--plan", action="store_true", help="say what would be done, and do nothing")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    parser.add_argument("--generate", choices=generate.KINDS, help="write made-up data of this kind into OUT instead (no SPEC, no INPUT)")
    rows = f"with --generate: how many rows (default {DEFAULT_ROWS})"
    parser.add_argument("--rows", metavar="N", type=positive, help=rows)
    parser.add_argument("--files", metavar="N", type=positive, help="with --generate: in so many files (default 1)")
    most = "with --generate: distinct values of each column at most"
    parser.add_argument("--categories", metavar="N", type=positive, help=most)
    parser.add_argument("--seed", metavar="S", type=not_negative, help="with --generate (default 0)")
    reporting.add_report(parser, "the time of each step and the dictionaries")
    add_json(parser)
    return parser


def modes(text: str) -> dict[str, str]:
    """Parse ``index=unit,convert=adaptive``."""
    found = {}
    for part in text.split(","):
        step, _, mode = part.partition("=")
        if step not in STEPS or mode not in MODES:
            expected = f"STEP=MODE with STEP one of {', '.join(STEPS)} and MODE one of {', '.join(MODES)}"
            raise argparse.ArgumentTypeError(f"{part!r} is not allowed; expected {expected}")
        found[step] = mode
    return found


def execute(args: argparse.Namespace) -> int:
    """Generate, plan or preprocess."""
    if args.generate:
        return _generate(args)
    for option in ("rows", "files", "categories", "seed"):
        if getattr(args, option) is not None:
            raise UsageError(f"--{option} without --generate; expected both")
    if args.spec is None or not args.inputs:
        raise UsageError(f"expected SPEC and at least one INPUT, such as: {PROG} criteo-kaggle day_0.tsv -o data")
    if args.report and args.plan:
        raise UsageError("--report with --plan, which does nothing that could be shown; expected one of them")
    reporting.check(args.report)
    spec, out = load_spec(args.spec), Path(args.output)
    if args.plan:
        if args.ray is not None:
            raise UsageError("--plan says what this machine would do; leave --ray out")
        codec = "zstd" if args.compress else "none"
        options = Options(args.on_error, args.mode, args.chunk_bytes, args.workers, not args.no_parquet, codec)
        found = local.plan(spec, args.inputs, out, options)
        print(_json(found) if args.json else plan_text(found))
        return 0
    steps = Steps()
    try:
        with closing(Bars(args.quiet, steps)) as bars:
            summary = local.preprocess(
                spec, args.inputs, out, on_error=args.on_error, modes=args.mode, chunk_bytes=args.chunk_bytes, workers=args.workers,
                parquet=not args.no_parquet, compress=args.compress, ray=args.ray, begun=bars.begin, seen=bars.seen,
            )  # fmt: skip
    except KeyboardInterrupt:
        note(PROG, f"interrupted: what is done is kept in {out / '.work'}, and the same command goes on from there")
        return INTERRUPTED_EXIT_CODE
    if args.report:
        reporting.write_preprocessing(args.report, {"output": str(out), **asdict(summary), "steps": steps.documents()})
    print(_json({"output": str(out), **asdict(summary)}) if args.json else text(out, summary))
    if args.report and not args.json:
        print(f"wrote {args.report}")
    return 0


def _generate(args: argparse.Namespace) -> int:
    if args.spec is not None:
        raise UsageError(f"--generate takes no SPEC and no INPUT, but there is {args.spec!r}")
    rows, files = args.rows or DEFAULT_ROWS, args.files or 1
    with tqdm(total=rows, desc="generating", unit="row", unit_scale=True, disable=True if args.quiet else None, leave=False) as bar:
        wrote: Callable[[int], Any] = bar.update
        generate.generate(Path(args.output), rows, files=files, seed=args.seed or 0, categories=args.categories, wrote=wrote)
    found = {"output": args.output, "rows": rows, "files": files}
    print(_json(found) if args.json else f"wrote {rows} rows to {args.output} ({files} file{'s' if files > 1 else ''})")
    return 0


class Bars:
    """A progress bar for each step, in bytes, with rows per second, X and Y. ``steps``: takes down when tasks end."""

    def __init__(self, hidden: bool, steps: Steps | None = None) -> None:
        self._hidden, self._steps = hidden, steps or Steps()
        self._bar: tqdm[Any] | None = None
        self._rows = 0

    def begin(self, step: str, tasks: int, size: int) -> None:
        """A step begins."""
        self.close()
        self._steps.begin(step, tasks, size)
        self._rows = 0
        hidden = True if self._hidden else None
        self._bar = tqdm(total=size, desc=step, unit="B", unit_scale=True, disable=hidden, leave=False)

    def seen(self, done: Done | None, limits: Limits) -> None:
        """A task has ended, or limits have changed."""
        if self._bar is None:
            return
        if done is not None:
            self._steps.seen()
            self._rows += done.rows
            self._bar.update(done.task.size)
        elapsed = self._bar.format_dict["elapsed"]
        rate = f"{self._rows / elapsed:,.0f} rows/s, " if self._rows and elapsed else ""
        self._bar.set_postfix_str(f"{rate}X={limits.units} Y={limits.chunks}", refresh=done is None)

    def close(self) -> None:
        """The last step has ended."""
        if self._bar is not None:
            self._bar.close()


def _json(found: Mapping[str, Any]) -> str:
    from soap.cli.plan_summary import dump  # what searches report, which takes longer to import than all else here

    return dump(found)


def text(out: Path, summary: Summary) -> str:
    """The summary for people."""
    if not summary.tasks:
        return f"{out} is complete already: {summary.rows} rows"
    largest = sorted(summary.dictionaries.items(), key=lambda pair: -pair[1])[:3]
    facts = [f"wrote {summary.rows} rows to {out} ({META} says what is where)"]
    if largest:
        facts.append("largest dictionaries: " + ", ".join(f"{name} {rows}" for name, rows in largest))
    if summary.skipped:
        facts.append(f"left out {summary.skipped} lines that do not fit SPEC")
    if summary.kept:
        facts.append(f"{summary.kept} of {summary.tasks} tasks had been done before")
    return "\n".join(facts)


def plan_text(found: Mapping[str, Any]) -> str:
    """The plan as tables."""
    units = [("unit", "kind", "size", "chunks")]
    units += [(unit["name"], unit["kind"], format_bytes(unit["size_bytes"]), str(unit["chunks"])) for unit in found["units"]]
    steps = [("step", "mode", "units (X)", "chunks of each (Y)", "tasks", "memory of a task", "because of")]
    for step, own in found["steps"].items():
        counts = (str(own["units"]), str(own["chunks"]), str(own["tasks"]))
        steps.append((step, own["mode"], *counts, format_bytes(own["task_bytes"]), own["because_of"]))
    room = (
        f"{found['cores']:g} cores, {format_bytes(found['available_bytes'])} of memory, {format_bytes(found['disk_bytes'])} of disk "
        f"(about {format_bytes(found['disk_needed_bytes'])} needed), chunks of {format_bytes(found['chunk_bytes'])}"
    )
    return "\n\n".join([aligned(units), aligned(steps), room])


main = entry_point(make_parser, execute)

if __name__ == "__main__":
    sys.exit(main())
