"""RedSync's clusters, simulated: what compressing gradients gains over all-reducing them, and where a step's time goes.

    python -m benchmarks.redsync --results results.json --write docs/results/redsync.md
    python -m benchmarks.redsync --nets alexnet --devices 2 4

Fang, Fu, Yang and Hsieh, "RedSync: Reducing Synchronization Bandwidth for Distributed Deep Learning Training System", JPDC 2019. Costs are
estimates (data sheets of the presets ``piz-daint-N`` and ``muradin``); nothing is fitted to the paper. Each device has as many samples as
there. All parameters that the policy compresses are compressed at a thousandth, also where that does not pay. Each cell is kept in
``--results`` as soon as it is known, and the same command goes on with what is missing.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from unittest.mock import patch

import soap
from benchmarks import redsync_page
from benchmarks.pages import give
from benchmarks.redsync_cells import METHODS, NAIVE, RADIX_PASSES, Cell, read, write
from benchmarks.redsync_equations import Gradient
from soap import api
from soap.cli.options import positive
from soap.errors import SoapError
from soap.files import check_writable
from soap.model.graph import OperatorGraph
from soap.plan.compression.rgc import SparseLayout
from soap.plan.compression.seam import Effort, Work
from soap.plan.compression.training import PLAIN, PlannedTraining
from soap.plan.syncs.compressed import CompressedSum
from soap.search.lossy import lossy_starts, lossy_syncs
from soap.simulator.simulate import Simulation
from soap.simulator.tasks import TaskKind
from soap.strategy.compression import Compression, Rgc
from soap.strategy.config import Strategy

DEVICES = (1, 2, 4, 8, 16, 32, 64, 128)
"""Of Piz Daint, one in a host."""
MORE: dict[str, tuple[int, ...]] = {"lstm_ptb": (256, 512)}
"""Further ones, to see where methods change sides."""
SAMPLES = {"alexnet": 64, "vgg16": 32, "resnet50": 32, "lstm_ptb": 5}
"""Of a device."""
CLIPPED = ("lstm_ptb",)
"""Whose gradients ranks clip: selection waits for the whole backward pass."""
@cache
def graph_of(net: str, batch: int) -> OperatorGraph:
    """The operators of a net for this global batch, on the meta device."""
    return soap.load(f"zoo:{net}@{batch}", plan_only=True, batch_norm="local").graph


def cell(net: str, cluster: str, devices: int) -> Cell:
    """Simulate a net by data parallelism, and with all that each method's policy compresses."""
    topology = soap.load_cluster(f"{cluster}-{devices}" if cluster == "piz-daint" else cluster)
    graph = graph_of(net, SAMPLES[net] * devices)
    usual, training = api.classical("data_parallel", graph, topology), PlannedTraining(clips=net in CLIPPED)

    def run(strategy: Strategy, training: PlannedTraining) -> Simulation:
        return api.simulator_for(graph, topology, optimizer_states=0, costs="estimate", training=training).run(strategy)

    found = {"dense": run(usual, PLAIN)}
    with alone_too():
        for name, method in METHODS.items():
            found[name] = run(compressing(graph, usual, method), training)
        for name, passes in NAIVE.items():
            with radix_select(passes()):
                found[name] = run(compressing(graph, usual, Rgc(selection="exact")), training)
    return Cell(net, cluster, devices, {name: own.makespan_ns for name, own in found.items()}, shares(found["RGC"]))


def compressing(graph: OperatorGraph, usual: Strategy, method: Compression) -> Strategy:
    """Data parallelism in which a method compresses all that its policy names."""
    return lossy_starts(graph, usual, [method]).popitem()[1]


@contextmanager
def alone_too() -> Iterator[None]:
    """A device that is alone compresses as well, as in the paper; SOAP leaves what goes nowhere as it is."""
    with patch.object(CompressedSum, "serves_region", lambda self, readers, peers, sync: True):
        yield


@contextmanager
def radix_select(passes: float) -> Iterator[None]:
    """Selections cost so many passes over all elements, beside adding the gradient to the residual and taking magnitudes."""
    usual = SparseLayout.effort

    def effort(self: SparseLayout, compression: Compression, work: Work, *, on_host: bool) -> Effort:
        if work != "select":
            return usual(self, compression, work, on_host=on_host)
        return Effort(round((5 + passes) * self.whole_bytes), 3 * self.capacity, RADIX_PASSES)

    with patch.object(SparseLayout, "effort", effort):
        yield


def shares(simulation: Simulation) -> tuple[float, float, float, float]:
    """Parts of a step: of the first device's time selecting, restoring and updating; and of its links' time for what is compressed. They
    may overlap with the backward pass."""
    spent = dict.fromkeys(("select", "send", "restore", "update"), 0)
    for task in simulation.tasks.tasks:
        word = task.name.partition(" ")[0]
        if task.kind is TaskKind.COMPRESS and task.resources == (0,):
            spent["restore" if word == "restore" else "select"] += task.duration_ns
        elif task.kind is TaskKind.SYNC and word in ("sync", "spread") and task.flows:
            spent["send"] += task.duration_ns
        elif task.kind is TaskKind.UPDATE and task.resources == (0,):
            spent["update"] += task.duration_ns
    select, send, restore, update = (round(own / simulation.makespan_ns, 4) for own in spent.values())
    return select, send, restore, update


def gradients_of(net: str, method: Compression) -> list[Gradient]:
    """What a method's policy compresses of a net, for the equations."""
    graph, found = graph_of(net, SAMPLES[net]), []
    for name, ways in lossy_syncs(graph, [method]).items():
        tensor, how = graph.tensors[name], ways[0].compression
        assert how is not None
        found.append(Gradient(tensor.shape, tensor.itemsize, how))
    return found


def run_all(wanted: Sequence[tuple[str, str, int]], cells: list[Cell], results: Path | None) -> None:
    """Simulate what is missing, and keep each at once."""
    there = {own.key for own in cells}
    for key in (key for key in wanted if key not in there):
        begin = time.perf_counter()
        cells.append(cell(*key))
        if results is not None:
            write(results, cells)
        print(*key, f"in {time.perf_counter() - begin:.1f} s", file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="redsync", description="RedSync's clusters, simulated.")
    parser.add_argument("--nets", nargs="+", choices=list(SAMPLES), default=list(SAMPLES))
    parser.add_argument("--devices", nargs="+", type=positive, metavar="N", help=f"default: {', '.join(map(str, DEVICES))}; some nets more")
    parser.add_argument("--results", type=Path, metavar="FILE", help="keeps each cell; what is in it is not simulated again")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the page there (default: print it)")
    args = parser.parse_args(argv)
    try:
        cells = [] if args.results is None else read(args.results)
        for path in (args.results, args.write):
            if path is not None:
                check_writable(path)
        wanted = [(net, "piz-daint", count) for net in args.nets for count in args.devices or (*DEVICES, *MORE.get(net, ()))]
        run_all([*wanted, *((net, "muradin", 8) for net in args.nets)], cells, args.results)
    except SoapError as error:
        parser.error(str(error))
    give(redsync_page.page(cells, {net: {name: gradients_of(net, own) for name, own in METHODS.items()} for net in args.nets}), args.write)
    return 0


if __name__ == "__main__":
    sys.exit(main())
