"""What each rank of a large cluster computes before its first step: seconds and memory of one rank among N.

    python -m benchmarks.startup
    python -m benchmarks.startup --ranks 8 64 --model zoo:gpt:tiny -o docs/results/startup.md

A rank of N, in a process of its own, makes its trainer among N - 1 others that are not there: torch's fake process group takes part for
them, and what ranks tell each other is what this one says. Real: the plan of data parallelism with tensor parallelism inside each host of
eight, the program, groups, the rank's tiles and parameters. Not real: whatever travels. The strategy and the order come from outside, as
``soap-run`` and ``soap.get_runner`` hand them over. Seconds are processor time of one thread.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist

import soap
from benchmarks.end_to_end import machine
from benchmarks.pages import give
from benchmarks.scale import cluster
from soap.cli.options import positive
from soap.plan.planning import build_plan
from soap.runtime.comm.redistribute import Communicator
from soap.runtime.program.program import compile_program
from soap.runtime.trainer import Trainer
from soap.strategy.classical import hybrid
from soap.units import format_bytes

RANKS = (8, 64, 512)
PER_HOST = 8


class Figures(NamedTuple):
    """Of one rank. ``tensor``: devices over which layers are split. ``own``: tiles of the rank;
    ``groups``: process groups that it has made. Seconds: ``plan`` to make the plan, ``program`` to order its actions, ``trainer`` to make
    the trainer with both of these in it. ``peak_bytes``: resident, more than before."""

    ranks: int
    tensor: int
    tiles: int
    own: int
    groups: int
    plan_seconds: float
    program_seconds: float
    trainer_seconds: float
    peak_bytes: int


@contextmanager
def alone_among(rank: int, count: int) -> Iterator[None]:
    """A world of so many ranks of which only this one is there."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=count)
    before = Communicator.gather
    Communicator.gather = lambda self, value: [value] * self.world_size  # type: ignore[method-assign]
    try:
        yield
    finally:
        Communicator.gather = before  # type: ignore[method-assign]
        dist.destroy_process_group()


def measured(spec: str, count: int, tensor: int) -> Figures:
    """Start one rank in the middle, with two samples for each copy of the model."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    model = soap.load(f"{spec}@{2 * count // tensor}")
    topology = cluster(count)
    strategy = hybrid(model.graph, topology, tensor=tensor)
    rank = count // 2
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with alone_among(rank, count):
        begun = time.process_time()
        plan = build_plan(model.graph, strategy, topology)
        planned = time.process_time()
        compile_program(plan)
        compiled = time.process_time()
        del plan
        trainer = Trainer(model, (strategy, topology), device_kind="cpu")
        made = time.process_time()
        own = sum(tile.device == rank for tile in trainer.plan.tiles)
        groups = sum(group is not None for group in trainer.comm.groups.values())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds = planned - begun, compiled - planned, made - compiled
    return Figures(count, tensor, len(trainer.plan.tiles), own, groups, *seconds, 1024 * (peak - before))


def table(rows: list[Figures]) -> str:
    """The figures as Markdown."""
    names = ("ranks", "tensor", "tiles", "own", "groups", "plan, s", "program, s", "trainer, s", "peak")
    lines = [f"| {' | '.join(names)} |", "|--:" * len(names) + "|"]
    for row in rows:
        seconds = " | ".join(f"{own:.2f}" for own in (row.plan_seconds, row.program_seconds, row.trainer_seconds))
        counts = " | ".join(f"{own:,}" for own in (row.ranks, row.tensor, row.tiles, row.own, row.groups))
        lines.append(f"| {counts} | {seconds} | {format_bytes(row.peak_bytes)} |")
    return "\n".join(lines)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="What one rank of many computes before its first step.")
    parser.add_argument("--model", default="zoo:gpt")
    parser.add_argument("--ranks", type=positive, nargs="+", default=RANKS)
    parser.add_argument("--tensor", type=positive, nargs="+", default=(1, PER_HOST))
    parser.add_argument("-o", metavar="FILE", help="write the page into this file")
    args = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    rows = []
    for tensor in args.tensor:
        for count in args.ranks:
            with context.Pool(1) as pool:  # peak memory is a process's
                rows.append(pool.apply(measured, (args.model, count, tensor)))
            print(rows[-1], flush=True)
    give(f"{machine()}\n\n{table(rows)}\n", args.o)


if __name__ == "__main__":
    main()
