"""How large may a cluster be? A GPT of 96 layers (width 12,288) in data, tensor and pipeline parallelism on thousands of devices: one
simulation, folded (``soap.simulator.folding``) and, where that is feasible, of every device.

    python -m benchmarks.scale
    python -m benchmarks.scale --layers 24 --devices 256

Hosts of eight H200 on a switch. 2,048 samples per iteration. Each line is a process of its own, which tells its peak resident memory.
Seconds are processor time of one thread. The first lowering asks the cost model for every kind of tile and finds its room; the time to
lower is that of the next one.
"""

from __future__ import annotations

import argparse
import multiprocessing
import pickle
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch

import soap
from benchmarks.end_to_end import machine
from soap import api
from soap.cli.options import positive
from soap.cluster.topology import Topology
from soap.cluster.yaml_file import parse_cluster
from soap.model.graph import OperatorGraph
from soap.plan.copies import LEFT
from soap.profiles.roofline import RooflineCosts
from soap.simulator.engine import Engine
from soap.simulator.folded import FoldedSimulation
from soap.simulator.folding import fold
from soap.simulator.lowering import lower
from soap.simulator.reference import simulate
from soap.simulator.shared import Shared
from soap.strategy.classical import hybrid
from soap.zoo.gpt import GPT, GPTConfig

T = TypeVar("T")

SAMPLES = 2048
PER_HOST = 8
SHAPES = ((8, 1), (8, 8))
"""(tensor, pipeline): devices over which a layer is split, and stages."""
WHOLE = 1024
"""Up to so many devices all of them are simulated as well."""


class Case(NamedTuple):
    """A line of the table."""

    devices: int
    tensor: int
    pipeline: int
    folded: bool


class Figures(NamedTuple):
    """What was found. ``tasks``: of all devices; ``played``: those that were simulated."""

    tasks: int
    played: int
    fold_seconds: float
    first_seconds: float
    lower_seconds: float
    play_seconds: float
    peak_bytes: int
    makespan_ns: int


def load_graph(layers: int, folder: Path) -> OperatorGraph:
    """The model's operators."""
    path = folder / "gpt.pt2"
    with torch.device("meta"):
        text = torch.zeros(SAMPLES, 2048, dtype=torch.int64)
        module = GPT(GPTConfig(vocabulary=51_200, context=2048, width=12_288, heads=96, layers=layers, dropout=0.0))
    soap.export(module, (text, text), path=path)
    return api.load(str(path), plan_only=True).graph


def cluster(devices: int) -> Topology:
    """Hosts of eight H200: NVLink switches inside, 400 Gbit/s per host outside."""
    return parse_cluster(
        f"""name: h200-{devices // PER_HOST}x{PER_HOST}
hosts:
  - name: node
    count: {devices // PER_HOST}
    devices: {{type: h200, count: {PER_HOST}}}
    cpu_cores: 96
    memory: 2 TB
    links: {{intra: {{kind: switch, bandwidth: 450 GB/s, latency: 2 us}}}}
network: {{bandwidth: 400 Gbit/s, latency: 5 us}}
"""
    )


def measure(case: Case, path: Path) -> Figures:
    """One line, in this process."""
    graph = pickle.loads(path.read_bytes())
    topology = cluster(case.devices)
    strategy = hybrid(graph, topology, tensor=case.tensor, pipeline=case.pipeline)
    costs = RooflineCosts(topology)
    if not case.folded:
        engine = Engine(Shared(graph, topology, costs))
        first = _seconds(lambda: engine.load(strategy))[1]
        engine.play()
        lower_seconds = _seconds(lambda: engine.load(strategy))[1]
        makespan_ns, play_seconds = _seconds(engine.play)
        peak, tasks = _peak_bytes(), len(engine.taken())
        return Figures(tasks, tasks, 0.0, first, lower_seconds, play_seconds, peak, makespan_ns)
    folding, fold_seconds = _seconds(lambda: fold(graph, topology, strategy))
    if isinstance(folding, str):
        raise ValueError(f"not folded: {folding}")
    engine = Engine(Shared(folding.copies.graph, folding.topology, costs, communication=folding.communication))
    first = _seconds(lambda: engine.load(folding.copies.strategy))[1]
    engine.play()
    lower_seconds = _seconds(lambda: engine.load(folding.copies.strategy))[1]
    makespan_ns, play_seconds = _seconds(engine.play)
    peak = _peak_bytes()
    small = lower(folding.plan, folding.topology, costs, folding.communication)
    outcome = FoldedSimulation(folding, small, simulate(small), costs.optimizer_states)
    assert outcome.makespan_ns == makespan_ns
    return Figures(outcome.task_count, len(small.tasks), fold_seconds, first, lower_seconds, play_seconds, peak, makespan_ns)


def _seconds(work: Callable[[], T]) -> tuple[T, float]:
    begin = time.process_time()
    return work(), time.process_time() - begin


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


COLUMNS = (
    "devices", "data x tensor x pipeline", "simulated", "tasks", "played", "s to fold", "s first lowering", "s to lower", "s to play",
    "peak memory, MiB", "iteration",
)  # fmt: skip


def line(case: Case, found: Figures) -> str:
    """One line of the table."""
    shape = f"{case.devices // case.tensor // case.pipeline} x {case.tensor} x {case.pipeline}"
    cells = [
        f"{case.devices:,}", shape, "two copies" if case.folded else "all devices", f"{found.tasks:,}", f"{found.played:,}",
        f"{found.fold_seconds:.2f}" if case.folded else "", f"{found.first_seconds:.2f}", f"{found.lower_seconds:.3f}",
        f"{found.play_seconds:.3f}", f"{found.peak_bytes / 2**20:,.0f}", f"{found.makespan_ns / 1e9:.6f} s",
    ]  # fmt: skip
    return "| " + " | ".join(cells) + " |"


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="scale", description="One simulation on thousands of devices.")
    parser.add_argument("--devices", nargs="+", type=positive, default=[1024, 4096, 16384], help=f"multiples of {PER_HOST}")
    parser.add_argument("--layers", type=positive, default=96)
    args = parser.parse_args(argv)
    cases = [
        Case(devices, tensor, pipeline, folded)
        for devices in args.devices
        for tensor, pipeline in SHAPES
        for folded in (True, False)
        if devices % (tensor * pipeline) == 0 and devices // (tensor * pipeline) > LEFT and (folded or devices <= WHOLE)
    ]
    print(f"{machine()}\n\n| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "graph"
        path.write_bytes(pickle.dumps(load_graph(args.layers, Path(folder))))
        for case in cases:
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print(line(case, pool.apply(measure, (case, path))), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
