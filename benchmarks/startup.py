"""What each rank of a large cluster computes before its first step: seconds and memory of one rank among N, and of rank 0.

    python -m benchmarks.startup
    python -m benchmarks.startup --ranks 8 64 --model zoo:gpt:tiny --parameters fsdp -o docs/results/startup.md

A rank of N, in a process of its own, makes its trainer among N - 1 others that are not there: torch's fake process group takes part for
them, and what ranks tell each other is what this one says. Real: the strategy of data parallelism with tensor parallelism inside each host
of eight, by each method of keeping parameters, the plan and the program, which rank 0 makes in one process and hands to the other in a
file, groups, the rank's tiles and parameters. Not real: whatever travels otherwise. Seconds are processor time of one thread.
"""

from __future__ import annotations

import argparse
import multiprocessing
import pickle
import resource
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

import soap
from benchmarks.end_to_end import machine
from benchmarks.pages import give
from benchmarks.scale import cluster
from soap.cli.options import positive
from soap.runtime.comm.redistribute import Communicator
from soap.runtime.trainer import Trainer
from soap.strategy.classical import hybrid
from soap.strategy.config import SyncConfig
from soap.strategy.sync import SHARDED, SHARDED_STATE, synchronized
from soap.units import format_bytes

RANKS = (8, 64, 512)
PER_HOST = 8


METHODS: dict[str, SyncConfig | None] = {"all_reduce": None, "zero1": SHARDED_STATE, "fsdp": SHARDED}
"""Name -> how parameters are kept; None: on each device."""


class Case(NamedTuple):
    """``tensor``: devices over which layers are split. ``parameters``: of ``METHODS``."""

    ranks: int
    tensor: int
    parameters: str


class Figures(NamedTuple):
    """Of one rank. ``tiles``: of the plan of all ranks; ``known``: those that the rank knows, its own and what it receives from.
    ``groups``: process groups that it has made. ``handed_bytes``: what it alone was handed, ``alike_bytes``: what all were handed alike.
    ``seconds``: to make the trainer. ``peak_bytes``: resident, more than before."""

    case: Case
    rank: int
    tiles: int
    known: int
    groups: int
    handed_bytes: int
    alike_bytes: int
    seconds: float
    peak_bytes: int


@contextmanager
def alone_among(rank: int, count: int, file: Path, told: int) -> Iterator[None]:
    """A world of so many ranks of which only this one is there. Rank 0 writes what it hands to rank ``told`` into the file, where that one
    reads it."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def hand_out(self: Communicator, make: Callable[[], Iterable[bytes]]) -> tuple[bytes, bytes]:
        if self.rank == 0:
            alike, *every = make()
            file.write_bytes(pickle.dumps((alike, every[told])))
            return alike, every[0]
        alike, own = pickle.loads(file.read_bytes())  # written above
        return alike, own

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=count)
    before = Communicator.gather, Communicator.hand_out
    Communicator.gather = lambda self, value: [value] * self.world_size  # type: ignore[method-assign]
    Communicator.hand_out = hand_out  # type: ignore[method-assign]
    try:
        yield
    finally:
        Communicator.gather, Communicator.hand_out = before  # type: ignore[method-assign]
        dist.destroy_process_group()


def measured(spec: str, case: Case, rank: int, file: Path) -> Figures:
    """Start one rank, with two samples for each copy of the model; rank 0 first."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    count = case.ranks
    model = soap.load(f"{spec}@{2 * count // case.tensor}")
    topology = cluster(count)
    strategy = hybrid(model.graph, topology, tensor=case.tensor)
    method = METHODS[case.parameters]
    if method is not None:
        strategy = strategy.with_changes(parameters=synchronized(model.graph, method, sparse=False))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with alone_among(rank, count, file, count // 2):
        begun = time.process_time()
        trainer = Trainer(model, (strategy, topology), device_kind="cpu")
        seconds = time.process_time() - begun
        groups = len([group for group in trainer.comm.groups.values() if group is not None])
        whole, (alike, own) = len(trainer.sizes.of().all_tiles), pickle.loads(file.read_bytes())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    known = len(trainer.plan.tiles)
    return Figures(case, rank, whole, known, groups, len(own), len(alike), seconds, 1024 * (peak - before))


def table(rows: list[Figures]) -> str:
    """The figures as Markdown: of rank 0 and of another rank beside each other."""
    names = ("parameters", "ranks", "tensor", "tiles", "known", "groups", "handed", "to all", "s", "peak", "rank 0, s", "rank 0, peak")
    lines = [f"| {' | '.join(names)} |", "|---" + "|--:" * (len(names) - 1) + "|"]
    for first, row in zip(rows[::2], rows[1::2], strict=True):
        counts = [f"{own:,}" for own in (row.case.ranks, row.case.tensor, first.tiles, row.known, row.groups)]
        own = [format_bytes(row.handed_bytes), format_bytes(row.alike_bytes), f"{row.seconds:.2f}", format_bytes(row.peak_bytes)]
        lines.append(f"| {' | '.join([row.case.parameters, *counts, *own, f'{first.seconds:.2f}', format_bytes(first.peak_bytes)])} |")
    return "\n".join(lines)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="What one rank of many computes before its first step.")
    parser.add_argument("--model", default="zoo:gpt")
    parser.add_argument("--ranks", type=positive, nargs="+", default=RANKS)
    parser.add_argument("--tensor", type=positive, nargs="+", default=(1, PER_HOST))
    parser.add_argument("--parameters", choices=METHODS, nargs="+", default=("all_reduce",))
    parser.add_argument("-o", metavar="FILE", help="write the page into this file")
    args = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for case in (Case(*own) for own in product(args.ranks, args.tensor, args.parameters)):
            for rank in (0, case.ranks // 2):
                with context.Pool(1) as pool:  # peak memory is a process's
                    rows.append(pool.apply(measured, (args.model, case, rank, Path(folder) / "handed")))
                print(rows[-1], flush=True)
    give(f"{machine()}\n\n{table(rows)}\n", args.o)


if __name__ == "__main__":
    main()
