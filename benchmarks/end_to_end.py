"""Is what the simulator predicts what the processes of this machine need? Found strategies and the classical ones, predicted and measured.

    python -m benchmarks.end_to_end --devices 2

trains each model by each strategy that fits, in turn and several times over, and prints Markdown. Run it on an idle machine; ``--wait``
says for how long it may wait for one.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from itertools import chain
from pathlib import Path
from statistics import geometric_mean, median
from typing import TypeVar

import torch

import soap
from benchmarks.models import MODELS, export_model
from benchmarks.quiet import Watch, wait_until_quiet
from soap import api
from soap.cli.options import not_negative, positive
from soap.cli.training import Job, train
from soap.cli.updating import Updating
from soap.measure.this_machine import cpu_cores, cpu_model
from soap.runtime.comm.launch import launch
from soap.search.options import SearchOptions
from soap.simulator.reference import execution_order
from soap.simulator.simulate import Simulation, Simulator
from soap.strategy.classical import CLASSICAL
from soap.strategy.config import Strategy

BASELINE, FOUND = "data_parallel", "found"
DISTURBED = 0.08
"""Share of the cores that other programs may use while times are measured."""
T = TypeVar("T")


@dataclass(frozen=True)
class Result:
    """One strategy of one model. ``measured_ns``: the median of all rounds' steps. ``others``: share of the cores that others used then."""

    model: str
    strategy: str
    predicted_ns: int
    measured_ns: int
    fastest_ns: int
    others: float

    @property
    def ratio(self) -> float:
        """Measured over predicted time."""
        return self.measured_ns / self.predicted_ns


def benchmark(name: str, devices: int, args: argparse.Namespace, folder: Path) -> list[Result]:
    """Search for one model, then predict and measure all strategies of it."""
    path = export_model(name, folder)
    topology = soap.load_cluster(f"local:{devices}")
    outcome = api.find(path, topology, SearchOptions(budget=args.budget, seed=args.seed, optimizer_states=0))
    strategies = contenders(outcome.simulator, outcome.strategy)
    predicted = {strategy: outcome.simulator.run(value) for strategy, value in strategies.items()}
    rounds = [quietly(lambda: measured(path, outcome.simulator, strategies, predicted, args), args.wait) for _ in range(args.rounds)]
    times = {strategy: list(chain.from_iterable(one[strategy] for one, _ in rounds)) for strategy in strategies}
    others = max(share for _, share in rounds)
    return [Result(name, own, predicted[own].makespan_ns, int(median(times[own])), min(times[own]), others) for own in strategies]


def quietly(measure: Callable[[], T], wait_seconds: float) -> tuple[T, float]:
    """Measure again and again until other programs leave the machine alone, or time is up: the least disturbed result, and their share."""
    deadline = time.monotonic() + wait_seconds
    best: tuple[T, float] | None = None
    while best is None or (best[1] > DISTURBED and time.monotonic() < deadline):
        wait_until_quiet(DISTURBED, deadline)
        watch = Watch()
        result = measure()
        share = watch.others_share() or 0.0
        if best is None or share < best[1]:
            best = (result, share)
    return best


def contenders(simulator: Simulator, found: Strategy) -> dict[str, Strategy]:
    """The found strategy and the classical ones, without those that do not fit and those that say the same as an earlier one."""
    makers = {BASELINE: CLASSICAL[BASELINE], **CLASSICAL}  # the baseline first
    made = {name: make(simulator.graph, simulator.topology) for name, make in makers.items()}
    distinct: dict[str, Strategy] = {}
    for name, strategy in made.items():
        _, overflow_bytes = simulator.cost(strategy)
        if name == BASELINE or (overflow_bytes == 0 and strategy not in distinct.values()):
            distinct[name] = strategy
    return {**distinct, FOUND: found}


def measured(
    path: Path, simulator: Simulator, strategies: Mapping[str, Strategy], predicted: Mapping[str, Simulation], args: argparse.Namespace
) -> Mapping[str, Sequence[int]]:
    """Times of the steps of all strategies, in nanoseconds, one strategy after the other in the same processes."""
    orders = {name: execution_order(simulation.tasks, simulation.schedule) for name, simulation in predicted.items()}
    job = Job(
        model=str(path),
        reading={"batch_dims": None, "batch_norm": "global", "autocast": None},
        topology=simulator.topology,
        strategies={name: (strategy, orders[name]) for name, strategy in strategies.items()},
        steps=args.steps,
        seed=args.seed,
        optimizer=Updating(("sgd",), 0.01),
    )
    outcome = launch(simulator.topology.device_count, train, (job,))[0]
    return {name: times.times_ns for name, times in outcome.measured.items()}


def table(results: Sequence[Result]) -> str:
    """Markdown: one line per strategy, the baseline of its model first. "Others": share of the cores that other programs used."""
    lines = [
        "| model | strategy | predicted | measured | fastest step | measured / predicted | predicted gain | measured gain | others |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for own in results:
        usual = next(other for other in results if other.model == own.model and other.strategy == BASELINE)
        gains = f"{usual.predicted_ns / own.predicted_ns:.2f} | {usual.measured_ns / own.measured_ns:.2f}"
        times = " | ".join(f"{value / 1e6:.1f} ms" for value in (own.predicted_ns, own.measured_ns, own.fastest_ns))
        lines.append(f"| {own.model} | {own.strategy} | {times} | {own.ratio:.2f} | {gains} | {own.others:.0%} |")
    return "\n".join(lines)


def conclusion(results: Sequence[Result]) -> str:
    """How well the predictions put strategies into order, and how far they are off."""
    pairs = list(_pairs(results))
    right = sum((a.predicted_ns < b.predicted_ns) == (a.measured_ns < b.measured_ns) for a, b in pairs)
    usual = {own.model: own for own in results if own.strategy == BASELINE}
    gains = [usual[own.model].measured_ns / own.measured_ns for own in results if own.strategy == FOUND]
    ratios = [own.ratio for own in results]
    return (
        f"Found over data parallelism, measured: {geometric_mean(gains):.2f} times as fast on (geometric) average, "
        f"from {min(gains):.2f} to {max(gains):.2f}. Measured / predicted: median {median(ratios):.2f}, from {min(ratios):.2f} to "
        f"{max(ratios):.2f}. Of {len(pairs)} pairs of strategies of one model whose predictions differ by more than 10%, {right} are "
        "measured in the predicted order."
    )


def _pairs(results: Sequence[Result]) -> Iterator[tuple[Result, Result]]:
    for i, a in enumerate(results):
        for b in results[i + 1 :]:
            low, high = sorted((a.predicted_ns, b.predicted_ns))
            if a.model == b.model and high > 1.1 * low:
                yield a, b


def machine() -> str:
    """What the numbers belong to."""
    load = f", load average {os.getloadavg()[0]:.1f} at the start" if hasattr(os, "getloadavg") else ""
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    return f"{date.today()}: {cpu_model()}, {cpu_cores()} cores, {platform.system()}, {versions}{load}"


def options() -> argparse.ArgumentParser:
    """The benchmark's options."""
    parser = argparse.ArgumentParser(prog="end_to_end", description="Predicted and measured time per iteration on this machine.")
    parser.add_argument("--devices", type=positive, nargs="+", default=[2], help="numbers of processes (default 2)")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS), help="default: all")
    parser.add_argument("--budget", type=positive, default=300, help="of each search (default %(default)s)")
    parser.add_argument("--steps", type=positive, default=10, help="per strategy and round, with two to warm up (default %(default)s)")
    parser.add_argument("--rounds", type=positive, default=2, help="over all strategies (default %(default)s)")
    parser.add_argument("--wait", type=not_negative, default=0, help="seconds to wait for an idle machine, per round (default %(default)s)")
    parser.add_argument("--seed", type=not_negative, default=0, help="of search and data (default %(default)s)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    args = options().parse_args(argv)
    print(machine(), flush=True)
    for devices in args.devices:
        results: list[Result] = []
        with tempfile.TemporaryDirectory() as folder:
            for name in args.models:
                print(f"local:{devices} {name}", file=sys.stderr, flush=True)
                results += benchmark(name, devices, args, Path(folder))
        print(f"\n## {devices} processes\n\n{table(results)}\n\n{conclusion(results)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
