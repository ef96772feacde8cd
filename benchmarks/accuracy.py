"""Predicted against measured: iterations of different plans on emulated clusters, and what the predictions are worth.

    python -m benchmarks.accuracy
    python -m benchmarks.accuracy --clusters emulated:4x1@200Mbit/s --models emulated-rnnlm emulated-dlrm --random 3

For every cluster and model: the classical strategies, what ``soap-search`` finds, and random ones, each run by ``soap-run --emulate``.
Needs root, as emulation does. Models are profiled before (``--profile`` seconds for each model and cluster; 0: with what is known already).
Printed are the error of each prediction, the median and the 95th percentile of each model's, Kendall's tau between predicted and measured
order, and whether the found plan is the measured best.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import NamedTuple

from benchmarks.end_to_end import machine
from benchmarks.models import EMULATED_MODELS, export_model
from soap import api
from soap.cli.options import not_negative, positive
from soap.graph import OperatorGraph
from soap.strategies import CLASSICAL, random_config
from soap.strategy import Strategy
from soap.topology import Topology

CLUSTERS = ("emulated:4x1@200Mbit/s", "emulated:4x1@1Gbit/s", "emulated:2x2@200Mbit/s")
MODELS = tuple(EMULATED_MODELS)
FOUND = "found"
SLOWEST_OVER_BEST = 8.0
"""Random strategies of more than so many times the found one's predicted time are drawn again: they only cost time."""


Test = Callable[[Strategy], bool]


class Plan(NamedTuple):
    """A strategy of a model on a cluster, nanoseconds per iteration as predicted and measured, and how far the measured steps spread."""

    cluster: str
    model: str
    strategy: str
    predicted_ns: int
    measured_ns: int
    spread: float

    @property
    def error(self) -> float:
        """Of the prediction, relative to what was measured."""
        return self.predicted_ns / self.measured_ns - 1


def tau(pairs: Sequence[tuple[float, float]]) -> float:
    """Kendall's tau-a: agreeing less disagreeing pairs of pairs, divided by all; ties count as neither."""
    signs = [((a[0] > b[0]) - (a[0] < b[0])) * ((a[1] > b[1]) - (a[1] < b[1])) for a, b in combinations(pairs, 2)]
    return sum(signs) / max(1, len(signs))


def run(*command: str) -> str:
    """A command of ours, as users start it; what it printed. Ends with its message if it fails."""
    done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"accuracy: {' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def strategies_of(model: Path, cluster: str, folder: Path, count: int, budget: int, seed: int) -> dict[str, Path]:
    """Strategy files: the found one, classical ones that differ, and random ones."""
    topology, loaded = api.load_cluster(cluster), api.load(model, plan_only=True)
    found = folder / f"{FOUND}.json"
    run("soap.cli.search", str(model), "--cluster", cluster, "--budget", str(budget), "--seed", str(seed), "-o", str(found))
    graph = loaded.graph
    simulator = api.simulator_for(graph, topology)
    strategies = {FOUND: api.load_strategy(found, graph, topology)}
    for name in CLASSICAL:
        chosen = api.classical(name, graph, topology)
        if chosen not in strategies.values() and simulator.overflow_bytes(chosen) == 0:
            strategies[name] = chosen
    limit_ns = SLOWEST_OVER_BEST * simulator.makespan_ns(strategies[FOUND])
    draw, known = random.Random(seed), list(strategies.values())
    for number in range(1, count + 1):
        strategies[f"random {number}"] = _varied(draw, known, graph, topology, lambda own: simulator.makespan_ns(own) <= limit_ns)
    for name, strategy in strategies.items():
        if name != FOUND:
            api.save_strategy(folder / f"{name}.json", strategy, loaded, topology)
    return {name: folder / f"{name}.json" for name in strategies}


def _varied(draw: random.Random, known: Sequence[Strategy], graph: OperatorGraph, topology: Topology, fits: Test) -> Strategy:
    """One of the known strategies with up to a third of its operators configured at random, that is not too slow."""
    while True:
        chosen, names = draw.choice(known), [op.name for op in graph.operators]
        for name in draw.sample(names, draw.randint(1, max(1, len(names) // 3))):
            own = graph.operators[names.index(name)]
            chosen = chosen.with_operator(name, random_config(own, topology.device_count, draw, topology.device_count))
        if chosen not in known and fits(chosen):
            return chosen


def measured_plan(cluster: str, model: str, file: Path, name: str, strategy: Path, steps: int) -> Plan:
    """Run a strategy on the emulated cluster."""
    text = run("soap.cli.run", str(strategy), "--model", str(file), "--cluster", cluster, "--emulate", "--steps", str(steps), "--json")
    entry = json.loads(text)["strategies"]["strategy"]
    times = sorted(entry["steps_ns"])
    spread = (times[-1 - len(times) // 4] - times[len(times) // 4]) / entry["measured_ns"]
    return Plan(cluster, model, name, entry["predicted_ns"], entry["measured_ns"], spread)


def report(plans: Sequence[Plan]) -> list[str]:
    """One line per cluster and model: errors, order, and how far the found plan is from the measured best."""
    lines = [
        "| cluster | model | plans | median error | 95% within | Kendall's tau | found / best measured | data parallel / found, measured |",
        f"|{'---|' * 8}",
    ]
    for cluster, model in dict.fromkeys((plan.cluster, plan.model) for plan in plans):
        own = [plan for plan in plans if (plan.cluster, plan.model) == (cluster, model)]
        errors = sorted(abs(plan.error) for plan in own)
        order = tau([(plan.predicted_ns, plan.measured_ns) for plan in own])
        of = {plan.strategy: plan.measured_ns for plan in own}
        usual = of.get("data_parallel", of[FOUND])  # left out if it is what was found
        lines.append(
            f"| {cluster} | {model} | {len(own)} | {median(errors):.1%} | {errors[min(len(errors) - 1, int(0.95 * len(errors)))]:.1%} | "
            f"{order:.2f} | {of[FOUND] / min(of.values()):.3f} | {usual / of[FOUND]:.2f} |"
        )
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="accuracy", description="Predicted against measured iterations on emulated clusters.")
    parser.add_argument("--clusters", nargs="+", default=list(CLUSTERS), help="to emulate (default %(default)s)")
    parser.add_argument("--models", nargs="+", default=list(MODELS), help="of benchmarks.models (default %(default)s)")
    parser.add_argument("--random", type=not_negative, default=4, help="random strategies of each (default %(default)s)")
    parser.add_argument("--steps", type=positive, default=10, help="of each run, warm-up included (default %(default)s)")
    parser.add_argument("--budget", type=positive, default=2000, help="proposals of each search (default %(default)s)")
    parser.add_argument("--profile", type=not_negative, default=60, help="seconds to profile a model for a cluster (default %(default)s)")
    parser.add_argument("--seed", type=not_negative, default=0)
    args = parser.parse_args(argv)
    print(f"{machine()}\n\n| cluster | model | strategy | predicted, ms | measured, ms | error | spread |\n|{'---|' * 7}", flush=True)
    plans: list[Plan] = []
    with tempfile.TemporaryDirectory() as temporary:
        for model in args.models:
            file = export_model(model, Path(temporary))
            for cluster in args.clusters:
                if args.profile:
                    run("soap.cli.profile", str(file), "--cluster", cluster, "--budget", str(args.profile))
                folder = Path(tempfile.mkdtemp(dir=temporary))
                for name, strategy in strategies_of(file, cluster, folder, args.random, args.budget, args.seed).items():
                    plan = measured_plan(cluster, model, file, name, strategy, args.steps)
                    plans.append(plan)
                    print(
                        f"| {cluster} | {model} | {name} | {plan.predicted_ns / 1e6:.1f} | {plan.measured_ns / 1e6:.1f} | "
                        f"{plan.error:+.1%} | {plan.spread:.1%} |",
                        flush=True,
                    )
    print("\n" + "\n".join(report(plans)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
