"""Predicted against measured peak memory of each rank: small zoo models under data parallelism, Megatron, one device per layer, strategies
that save memory, and random ones.

    python -m benchmarks.memory [--ranks N] [--random K] [--optimizer adam] [MODEL …]
    python -m benchmarks.memory --ranks 4 emulated-rnnlm emulated-gpt    # models of benchmarks.accuracy

"predicted": the most that the simulated order holds at any time, with an allowance, as a ratio to what was measured: above 1 is on the
safe side. Measured: tensors that torch allocates from before the shards are made to the end of the third step, the model as it was loaded
not counted. "workspaces": how much higher the peak is with what kernels take for themselves within a call, which nobody predicts.
"""

from __future__ import annotations

import argparse
import gc
import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from statistics import median

import torch

from benchmarks.models import EMULATED_MODELS, export_model
from soap import api, zoo
from soap.cli.updating import states_of
from soap.cluster.presets import local_topology
from soap.cluster.topology import Topology
from soap.measure.iteration import PeakMemory, peak_memory
from soap.model.graph import OperatorGraph
from soap.plan.running.order import ExecutionOrder
from soap.runtime.comm.launch import launch
from soap.runtime.comm.world import close_world, open_world
from soap.runtime.trainer import Trainer
from soap.runtime.updates.optimizers import OPTIMIZERS
from soap.simulator.reference import execution_order
from soap.strategy.classical import random_strategy
from soap.strategy.config import Strategy
from soap.strategy.named import named
from soap.strategy.recomputation import recomputed, runs_of
from soap.strategy.sync import sync_choices

NAMES = ("data_parallel", "megatron", "model_parallel", "zero1", "fsdp", "recompute", "fsdp+recompute", "megatron+fsdp")
STEPS = 3
SAFE, CLOSE, USUALLY = 1.0, 1.15, 1.10
"""To reach: never under, and at most so much over; in 19 of 20 cases at most the last."""


@dataclass(frozen=True)
class Case:
    """One strategy of one model. ``predicted``: bytes by device."""

    model: str
    name: str
    strategy: Strategy
    order: ExecutionOrder
    predicted: tuple[int, ...]


def strategies(spec: str, graph: OperatorGraph, topology: Topology, randoms: int) -> dict[str, Strategy]:
    """The compared strategies by name; the random ones and the mixtures are functions of the model's name and their number."""
    found = {name: named(name, graph, topology) for name in NAMES}
    for i in range(randoms):
        found[f"random {i}"] = random_strategy(graph, topology, random.Random(f"{Path(spec).stem}/{i}"))
        found[f"mixture {i}"] = mixture(graph, topology, found[f"random {i}"], random.Random(f"{Path(spec).stem}/mixture {i}"))
    return found


def mixture(graph: OperatorGraph, topology: Topology, base: Strategy, rng: random.Random) -> Strategy:
    """A strategy whose parameters are each all-reduced, or owned in parts, with states or values alone. Half of all runs are recomputed."""
    choices = sync_choices(graph, topology, saving=True)
    synchronized = base.with_changes(parameters={name: rng.choice(own) for name, own in choices.items()})
    return recomputed(graph, synchronized, [name for run in runs_of(graph) if rng.random() < 0.5 for name in run])


def cases(spec: str, topology: Topology, randoms: int, optimizer: str) -> list[Case]:
    """All strategies of a model, with what is predicted for them."""
    graph = api.load(spec, plan_only=True).graph
    simulator = api.simulator_for(graph, topology, optimizer_states=states_of(optimizer))
    found = []
    for name, strategy in strategies(spec, graph, topology, randoms).items():
        run = simulator.run(strategy)
        order = execution_order(run.tasks, run.schedule)
        found.append(Case(spec, name, strategy, order, run.peak_bytes))
    return found


def measure(cases: Sequence[Case], topology: Topology, optimizer: str) -> list[PeakMemory]:
    """On every rank: its peak in each case."""
    world = open_world(topology.device_count, topology.devices[0].type.kind, "gloo")
    try:
        return [_peak(case, topology, optimizer) for case in cases]
    finally:
        close_world(world)


def _peak(case: Case, topology: Topology, optimizer: str) -> PeakMemory:
    model = api.load(case.model)
    gc.collect()
    with peak_memory(torch.device("cpu")) as peak:
        trainer = Trainer(
            model, (case.strategy, topology), case.order, optimizer=lambda tensors: OPTIMIZERS[optimizer](tensors, 0.01)
        )
        batch = [tensor.clone() for tensor in model.example_inputs]
        for _ in range(STEPS):
            trainer.step(*batch)
    trainer.close()
    return peak


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="memory", description="Predicted against measured peak memory of each rank.")
    parser.add_argument("models", metavar="MODEL", nargs="*", default=[f"zoo:{name}:tiny" for name in zoo.names()])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--random", type=int, default=3, help="random strategies per model, and as many mixtures")
    parser.add_argument("--optimizer", choices=list(OPTIMIZERS), default="adam")
    args = parser.parse_args(argv)
    topology = local_topology(args.ranks)
    with tempfile.TemporaryDirectory() as temporary:
        specs = [str(export_model(own, Path(temporary))) if own in EMULATED_MODELS else own for own in args.models]
        found = [case for spec in specs for case in cases(spec, topology, args.random, args.optimizer)]
        measured = launch(args.ranks, measure, (found, topology, args.optimizer))
    print("| model | strategy | measured, KiB | predicted / measured | workspaces |\n|---|---|---|---|---|")
    ratios = []
    for number, case in enumerate(found):
        found_peaks = [measured[rank][number] for rank in range(args.ranks)]
        peaks = [max(1, peak.bytes) for peak in found_peaks]
        works = " ".join(f"+{peak.with_workspaces_bytes / most - 1:.0%}" for peak, most in zip(found_peaks, peaks, strict=True))
        own = [predicted / peak for predicted, peak in zip(case.predicted, peaks, strict=True)]
        shown = " ".join(f"{value:.2f}" for value in own)
        measured_kib = " ".join(f"{peak / 1024:.0f}" for peak in peaks)
        print(f"| {Path(case.model).stem} | {case.name} | {measured_kib} | {shown} | {works} |")
        ratios += own
    safe, close, usual = (sum(SAFE <= ratio <= most for ratio in ratios) for most in (inf, CLOSE, USUALLY))
    print(
        f"\nmedian {median(ratios):.2f}, from {min(ratios):.2f} to {max(ratios):.2f}; never under in {safe} of {len(ratios)}, "
        f"at most {CLOSE - 1:.0%} over in {close}, at most {USUALLY - 1:.0%} in {usual}"
    )


if __name__ == "__main__":
    main()
