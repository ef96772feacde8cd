"""Predicted against measured: iterations of different plans on emulated clusters, and what the predictions are worth.

    python -m benchmarks.accuracy
    python -m benchmarks.accuracy --clusters emulated:4x1@200Mbit/s --models emulated-rnnlm emulated-dlrm --profile 0

For every cluster and model: what a search finds, the classical strategies, and random ones, ``--least`` in all, run as ``soap-run
--emulate`` runs them. Needs root, as emulation does. Models are profiled before (``soap-profile`` for ``--profile`` seconds per model and
cluster, and the cluster's links; 0: with what is known already), and what a search finds is measured and searched again; with ``--verify``
the best few are run, and the quickest is what was found, as by ``soap-search --verify``.

A round measures the computations again, and what messages and sums take within steps, predicts every strategy from them, and runs every
strategy once: a virtual machine's cores are quicker in some minutes than in others, for one kind of computation more than for another,
and go on behind a wait more slowly; what is predicted is to be what is measured then. Predicted is the median of the rounds' predictions,
measured that of the rounds, of each its median step: emulated devices' time is even (``reference_work``), so what is left of noise adds
and takes. Printed are the error of each prediction, how far a strategy's rounds and its predictions are apart, the median and the 95th
percentile of each model's errors, Kendall's tau between predicted and measured order, and whether the found plan is the measured best.
"""

from __future__ import annotations

import argparse
import io
import random
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from statistics import median

from benchmarks.accuracy_report import FOUND, HEAD, USUAL, Plan, in_rounds, line_of, report
from benchmarks.end_to_end import machine
from benchmarks.models import EMULATED_MODELS, export_model
from benchmarks.turns import in_turns, turns_of
from soap import api
from soap.cli import profile
from soap.cli.options import Reading, not_negative, part_of_the_box, positive
from soap.cli.run import start
from soap.cli.training import Job
from soap.cli.updating import Updating, states_of
from soap.cli.verification import verify
from soap.cluster.topology import Topology
from soap.emulation.hosts import host_limits
from soap.measure.this_machine import cpu_cores
from soap.model.graph import OperatorGraph
from soap.search.options import SearchOptions
from soap.simulator.simulate import Simulator
from soap.strategy.classical import CLASSICAL, random_config
from soap.strategy.config import Strategy

CLUSTERS = ("emulated:4x1@200Mbit/s", "emulated:4x1@1Gbit/s", "emulated:2x2@200Mbit/s")
MODELS = tuple(EMULATED_MODELS)
OPTIMIZER = "adam"
"""Whose updates searches count."""
READING: Reading = {"batch_dims": None, "autocast": None, "batch_norm": "global"}
REFINEMENTS = 4
"""How often what was found is measured and searched again, at most."""
EARLY_STEPS = 2
"""Of those timed that do not count: a new trainer still asks the system for memory in the steps behind its warm-up."""
SLOWEST_OVER_BEST = 4.0
"""Random strategies of more than so many times the found one's predicted time are drawn again: they only cost time."""


Test = Callable[[Strategy], bool]


def strategies_of(simulator: Simulator, found: Strategy, seed: int, least: int) -> dict[str, Strategy]:
    """The found one, the classical ones that differ and fit, and random ones, so many in all or more."""
    graph, topology = simulator.graph, simulator.topology
    strategies = {FOUND: found}
    for name in CLASSICAL:
        chosen = api.classical(name, graph, topology)
        if chosen not in strategies.values() and simulator.overflow_bytes(chosen) == 0:
            strategies[name] = chosen
    limit_ns = SLOWEST_OVER_BEST * simulator.makespan_ns(found)
    strategies = {name: own for name, own in strategies.items() if name == USUAL or simulator.makespan_ns(own) <= limit_ns}
    draw, known = random.Random(seed), list(strategies.values())
    while len(strategies) < least:
        chosen = _varied(draw, known, graph, topology, lambda own: simulator.makespan_ns(own) <= limit_ns)
        if chosen not in strategies.values():
            strategies[f"random {len(strategies) - len(known) + 1}"] = chosen
    return strategies


def _varied(draw: random.Random, known: Sequence[Strategy], graph: OperatorGraph, topology: Topology, fits: Test) -> Strategy:
    """One of the known strategies with up to a third of its operators configured at random, that is not too slow."""
    while True:
        chosen, names = draw.choice(known), [op.name for op in graph.operators]
        for name in draw.sample(names, draw.randint(1, max(1, len(names) // 3))):
            own = graph.operators[names.index(name)]
            chosen = chosen.with_operator(name, random_config(own, topology.device_count, draw, topology.device_count))
        if chosen not in known and fits(chosen):
            return chosen


def measure(
    simulator: Simulator,
    cluster: str,
    model: str,
    file: Path | str,
    strategies: Mapping[str, Strategy],
    steps: int,
    rounds: int,
    optimizer: str = OPTIMIZER,
    data: str | None = None,
    scale: float = 1.0,
) -> list[Plan]:
    """Run all strategies on the emulated cluster, in the same processes, one after the other, and all of them again.

    ``scale``: of rates and CPU time, as ``soap-run --emulate-scale``. Measured times are the cluster's; the box takes 1 / scale times as
    long.
    """
    simulations = {name: simulator.run(strategy) for name, strategy in strategies.items()}
    job = Job(
        model=str(file),
        reading=READING,
        topology=simulator.topology,
        strategies=in_turns(strategies, simulations, rounds),
        steps=steps,
        seed=0,
        optimizer=Updating((optimizer,)).timed(),
        data=data,
        emulated=True,
    )
    outcome = start(job, host_limits(simulator.topology, scale, cpu_cores()))
    assert outcome is not None  # not under torchrun
    plans = []
    for name, simulation in simulations.items():
        times = [median(own.times_ns[EARLY_STEPS:] or own.times_ns) * scale for own in turns_of(outcome.measured, name)]
        plans.append(Plan(cluster, model, name, simulation.makespan_ns, int(median(times)), tuple(times)))
    return plans


def refined(file: Path | str, cluster: str, seconds: int, find: Callable[[], api.SearchOutcome]) -> api.SearchOutcome:
    """What a search finds that has measured what it finds, for so long in all: estimates that are too low make no plan look good."""
    found, budget = find(), seconds // REFINEMENTS
    for _ in range(REFINEMENTS if budget else 0):
        profile_found(found, file, cluster, budget)
        before, found = found, find()
        if found.strategy == before.strategy:
            break
    return found


def profile_found(found: api.SearchOutcome, file: Path | str, cluster: str, seconds: int, *more: str) -> None:
    """Measure for so long, with the computations of what was found among the first."""
    with tempfile.TemporaryDirectory() as temporary:
        path = str(Path(temporary) / "found.json")
        found.save(path)
        soap_profile([str(file), "--cluster", cluster, "--strategy", path, "--budget", str(seconds), *more])


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="accuracy", description="Predicted against measured iterations on emulated clusters.")
    parser.add_argument("--clusters", nargs="+", default=list(CLUSTERS), help="to emulate (default %(default)s)")
    parser.add_argument("--models", nargs="+", default=list(MODELS), help="of benchmarks.models (default %(default)s)")
    parser.add_argument("--least", type=positive, default=9, help="strategies of each, random ones included (default %(default)s)")
    parser.add_argument("--steps", type=positive, default=10, help="of each strategy in a round, warm-up included (default %(default)s)")
    parser.add_argument("--rounds", type=positive, default=3, help="default %(default)s")
    parser.add_argument("--budget", type=positive, default=2000, help="proposals of each search (default %(default)s)")
    parser.add_argument("--profile", type=not_negative, default=120, help="seconds to profile a model for a cluster (default %(default)s)")
    parser.add_argument("--scale", type=part_of_the_box, default=1.0, help="of rates and CPU time: for clusters too fast for this box")
    parser.add_argument("--verify", type=not_negative, default=0, help="run so many of the best ones found before, as soap-search --verify")
    parser.add_argument("--seed", type=not_negative, default=0)
    args = parser.parse_args(argv)
    print(f"{machine()}\n\n| {' | '.join(HEAD)} |\n|{'---|' * len(HEAD)}", flush=True)
    plans: list[Plan] = []
    with tempfile.TemporaryDirectory() as temporary:
        for model in args.models:
            file = export_model(model, Path(temporary))
            graph = api.load(file, plan_only=True).graph
            for cluster in args.clusters:
                plans += compared(cluster, model, file, graph, args)
    print("\n" + "\n".join(report(plans)))
    return 0


def compared(cluster: str, model: str, file: Path | str, graph: OperatorGraph, args: argparse.Namespace) -> list[Plan]:
    """The plans of a model on a cluster, printed. ``graph``: the model's."""
    if args.profile:
        profiled(file, cluster, args.profile, args.scale)
    topology = api.load_cluster(cluster)
    options = SearchOptions(budget=args.budget, seed=args.seed)
    outcome = refined(file, cluster, args.profile, partial(api.find, graph, topology, options))
    if args.verify:
        outcome = verify(outcome, args.verify, str(file), READING, args.seed, optimizer=OPTIMIZER, scale=args.scale)
    simulator = api.simulator_for(graph, topology, optimizer_states=states_of(OPTIMIZER))
    strategies = strategies_of(simulator, outcome.strategy, args.seed, args.least)
    rounds = []
    for _ in range(args.rounds):
        if args.profile:
            profile_found(outcome, file, cluster, args.profile, "--again")
            soap_profile(["links", *emulated(cluster, args.scale), "--within-steps", "--again"])
            simulator = api.simulator_for(graph, topology, optimizer_states=states_of(OPTIMIZER))
        rounds.append(measure(simulator, cluster, model, file, strategies, args.steps, 1, scale=args.scale))
    plans = in_rounds(rounds)
    for plan in plans:
        print(line_of(plan), flush=True)
    return plans


def profiled(file: Path | str, cluster: str, seconds: int, scale: float = 1.0) -> None:
    """Computations, and links of the cluster emulated at this scale."""
    soap_profile([str(file), "--cluster", cluster, "--budget", str(seconds)])
    soap_profile(["links", *emulated(cluster, scale)])


def emulated(cluster: str, scale: float) -> list[str]:
    """Options of ``soap-profile links``."""
    return ["--cluster", cluster, "--emulate", "--emulate-scale", str(scale)]


def soap_profile(words: list[str]) -> None:
    """Measure, as a user would; what it says is not shown."""
    with redirect_stdout(io.StringIO()):
        if profile.main(words):
            sys.exit("soap-profile failed")


if __name__ == "__main__":
    sys.exit(main())
