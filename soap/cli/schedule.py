"""``soap-schedule``: what each stage of a pipeline does when, how long stages are idle, and how many micro-batches are in flight."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from math import gcd
from typing import Any

from soap import outputs
from soap.cli import plan_summary
from soap.cli.command import Parser, UsageError, entry_point
from soap.cli.options import add_json, not_negative, positive
from soap.cli.plain_text import aligned
from soap.errors import ScheduleError
from soap.schedules import csv_file
from soap.schedules.named import SCHEDULES, NamedSchedule, form, parse
from soap.schedules.play import Played, awaiting_weights, equal, in_flight, play
from soap.schedules.table import IDLE, Table, grid

PROG = "soap-schedule"
WIDTH = 140
"""Of the grid; longer ones are continued below."""
MOST_CELLS, MOST_STAGES = 4000, 32
"""Of a grid that is printed."""
GOING_ON = "-"
"""In the grid, an action that takes longer than one cell."""


def make_parser() -> Parser:
    """The command's options."""
    parser = Parser(
        PROG,
        "Print a pipeline's schedule: which stage (a group of devices) computes which chunk of the model for which micro-batch, and when.\n"
        "2F0 is the forward pass of chunk 2 for micro-batch 0, B a backward pass, I and W its two parts, for inputs and for weights.",
        f"{PROG} 1f1b --stages 4 --microbatches 8",
    )
    names = "; ".join(f"{form(schedule)}: {schedule.summary}" for schedule in SCHEDULES)
    parser.add_argument("schedule", metavar="SCHEDULE", nargs="?", type=schedule_name, help=names)
    parser.add_argument("--stages", metavar="S", type=positive, help="groups of devices")
    parser.add_argument("--microbatches", metavar="M", type=positive, help="parts of a step")
    text = "check this CSV file, as torch.distributed.pipelining writes them, and print it, instead of SCHEDULE"
    parser.add_argument("--check", metavar="FILE", help=text)
    text = "what F, I and W take, in any unit; B takes as long as I and W (default 1,1,1)"
    parser.add_argument("--times", metavar="F,I,W", type=times, default=(1, 1, 1), help=text)
    text = "what a message between two stages takes, in the same unit (default %(default)s)"
    parser.add_argument("--message", metavar="T", type=not_negative, default=0, help=text)
    parser.add_output("--csv", kind=outputs.TABLE, help="write the table for torch.distributed.pipelining")
    add_json(parser)
    return parser


def schedule_name(text: str) -> NamedSchedule:
    """Parse ``interleaved:2``."""
    try:
        return parse(text)
    except ScheduleError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def times(text: str) -> tuple[int, int, int]:
    """Parse ``1,1,1``."""
    parts = text.split(",")
    if len(parts) != 3:
        raise argparse.ArgumentTypeError(f"{text[:100]!r} is not allowed; expected F,I,W, such as 2,2,1")
    forward, inputs, weights = map(not_negative, parts)
    return forward, inputs, weights


def execute(args: argparse.Namespace) -> int:
    """Make or read the table, play it, report, write."""
    table = _table(args)
    forward, inputs, weights = args.times
    durations = equal(table.chunk_count, forward_ns=forward, input_ns=inputs, weight_ns=weights, message_ns=args.message)
    played = play(table, durations)
    if args.csv is not None:
        csv_file.dump(args.csv, table)
    name = str(args.schedule) if args.check is None else args.check
    print(plan_summary.dump(document(name, played)) if args.json else text(name, played))
    return 0


def _table(args: argparse.Namespace) -> Table:
    if args.check is not None:
        if args.schedule is not None or args.stages is not None or args.microbatches is not None:
            raise UsageError("--check FILE has stages and micro-batches of its own; leave out SCHEDULE, --stages and --microbatches")
        return csv_file.load(args.check)
    if args.schedule is None:
        raise UsageError(f"expected SCHEDULE or --check FILE, such as: {PROG} 1f1b --stages 4 --microbatches 8")
    for option in ("stages", "microbatches"):
        if getattr(args, option) is None:
            raise UsageError(f"{args.schedule} without --{option}; expected {PROG} {args.schedule} --stages S --microbatches M")
    schedule: NamedSchedule = args.schedule
    return schedule.table(args.stages, args.microbatches)


def document(name: str, played: Played) -> dict[str, Any]:
    """The played table as plain JSON values. The keys are part of the command's interface; times are in the unit of ``--times``."""
    table = played.table
    return {
        "schedule": name,
        "stages": len(table.stages),
        "chunks": table.chunk_count,
        "microbatches": table.microbatch_count,
        "placement": list(table.placement),
        "makespan": played.makespan_ns,
        "bubble": float(played.bubble),
        "busy": list(played.busy_ns),
        "idle": list(played.idle_ns),
        "in_flight": list(in_flight(table)),
        "awaiting_weights": list(awaiting_weights(table)),
        "actions": [
            [{"action": str(a), "start": start, "end": end} for a, start, end in zip(*row, strict=True)]
            for row in zip(table.stages, played.starts_ns, played.ends_ns, strict=True)
        ],
    }


def text(name: str, played: Played) -> str:
    """The played table for people: the grid, then a line for each stage."""
    table, found = played.table, document(name, played)
    counts = f"{found['stages']} stages, {found['chunks']} chunks, {found['microbatches']} micro-batches"
    idle = f"a step takes {found['makespan']}, stages are idle for {found['bubble']:.1%} of it"
    return "\n\n".join([f"{name}: {counts}\n{idle}", _grid(played), _stages(found, parted=any(found["awaiting_weights"]), table=table)])


def _stages(found: Mapping[str, Any], *, parted: bool, table: Table) -> str:
    chunks = [", ".join(str(chunk) for chunk, home in enumerate(table.placement) if home == stage) for stage in range(len(table.stages))]
    rows: list[Sequence[str]] = [("", "chunks", "busy", "idle", "in flight", *(["awaiting weights"] if parted else []))]
    keys = ("busy", "idle", "in_flight", *(["awaiting_weights"] if parted else []))
    for stage, own in enumerate(chunks):
        shown = own if len(own) <= 24 else f"{own[:21]}..."
        rows.append((f"stage {stage}", shown, *(str(found[key][stage]) for key in keys)))
    return aligned(rows)


def _grid(played: Played) -> str:
    """A column for each unit of time; blocks of columns below each other if there are many."""
    table = played.table
    unit = gcd(*(end for ends in played.ends_ns for end in ends), *(start for starts in played.starts_ns for start in starts))
    columns = played.makespan_ns // unit if unit else 0
    if not columns or columns * len(table.stages) > MOST_CELLS or len(table.stages) > MOST_STAGES:
        why = "too large to print" if columns else "empty, as nothing takes time"
        return f"the grid is {why}; --csv writes the table, --json prints it"
    rows = [[IDLE] * columns for _ in table.stages]
    for row, actions, starts, ends in zip(rows, table.stages, played.starts_ns, played.ends_ns, strict=True):
        for action, start, end in zip(actions, starts, ends, strict=True):
            if end > start:  # what takes no time has no column
                first, length = start // unit, (end - start) // unit
                row[first : first + length] = [str(action), *[GOING_ON] * (length - 1)]
    cell_width = max(len(cell) for row in rows for cell in row)
    blocks = -(-columns // max(1, (WIDTH - len("stage 00")) // (cell_width + 1)))
    at_once = -(-columns // blocks)
    return "\n\n".join(grid([row[start : start + at_once] for row in rows]) for start in range(0, columns, at_once))


main = entry_point(make_parser, execute)

if __name__ == "__main__":
    sys.exit(main())
