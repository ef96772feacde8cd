"""Models with sparse parameters on emulated clusters: what a search finds beside one way of synchronizing for all parameters.

    python -m benchmarks.sparse
    python -m benchmarks.sparse --models lm1b:emulation --profile 0

Per model: the found strategy (``soap-search --verify``: the fastest of those predicted to be), data parallelism with all-reduced (dense)
gradients, with gathered rows of sparse ones, with all parameters on servers, and with sparse ones alone on servers, as ``soap-run
--emulate`` runs them, in turns; equal ones once. Data parallelism of ours takes what DistributedDataParallel does (benchmarks.runtime).
Needs root. Data are the zoo's own batches, drawn by Zipf's law. For a model without sparse parameters the search may put dense ones on
servers, which it otherwise is not asked to.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from functools import partial

from benchmarks.accuracy import READING, measure, profiled, refined
from benchmarks.accuracy_report import FOUND, Plan
from benchmarks.end_to_end import machine
from soap import api
from soap.cli.options import not_negative, positive
from soap.cli.updating import states_of
from soap.cli.verification import verify
from soap.search.options import SearchOptions
from soap.strategy.classical import SYNCHRONIZED
from soap.strategy.config import Strategy
from soap.strategy.sync import usual_server

CLUSTER = "emulated:4x1@200Mbit/s"
MODELS = ("lm1b:emulation", "dlrm:emulation")
OPTIMIZER = "sgd"
VERIFIED = 3
"""What ``soap-search --verify`` takes."""
BASELINES = ("data_parallel", *SYNCHRONIZED)


def different(found: Strategy, others: Mapping[str, Strategy]) -> tuple[dict[str, Strategy], dict[str, str]]:
    """The found strategy and those that differ from each other, by name; and for each of these all names that it has."""
    strategies, names = {FOUND: found}, {FOUND: FOUND}
    for name, strategy in others.items():
        first = next((known for known, own in strategies.items() if own == strategy), None)
        if first is None:
            strategies[name], names[name] = strategy, name
        else:
            names[first] += f" = {name}"
    return strategies, names


def table(plans: Sequence[Plan], names: Mapping[str, str]) -> list[str]:
    """A line for each strategy of a model. ``names``: all those of each."""
    lines = []
    of = {plan.strategy: plan for plan in plans}
    for plan in plans:
        lines.append(
            f"| {plan.model} | {names[plan.strategy]} | {plan.predicted_ns / 1e6:.1f} | {plan.measured_ns / 1e6:.1f} | {plan.error:+.1%} | "
            f"{plan.apart:.1%} | {plan.measured_ns / of[FOUND].measured_ns:.2f} |"
        )
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="sparse", description="Sparse models on an emulated cluster.")
    parser.add_argument("--cluster", default=CLUSTER, help="default %(default)s")
    parser.add_argument("--models", nargs="+", default=list(MODELS), help="of the zoo (default %(default)s)")
    parser.add_argument("--steps", type=positive, default=8, help="of each strategy in a round, warm-up included (default %(default)s)")
    parser.add_argument("--rounds", type=positive, default=2, help="default %(default)s")
    parser.add_argument("--budget", type=positive, default=2000, help="proposals of each search (default %(default)s)")
    parser.add_argument("--profile", type=not_negative, default=60, help="seconds to profile a model (default %(default)s)")
    args = parser.parse_args(argv)
    print(
        f"{machine()}\n\n| model | strategy | predicted, ms | measured, ms | error | rounds apart | measured / found |\n|{'---|' * 7}",
        flush=True,
    )
    for model in args.models:
        spec = f"zoo:{model}"
        graph, topology = api.load(spec, plan_only=True).graph, api.load_cluster(args.cluster)
        if args.profile:
            profiled(spec, args.cluster, args.profile)
        states, syncs = states_of(OPTIMIZER), () if graph.sparse else (usual_server(topology),)
        options = SearchOptions(budget=args.budget, syncs=syncs, optimizer_states=states)
        outcome = refined(spec, args.cluster, args.profile, partial(api.find, graph, topology, options))
        found = verify(outcome, VERIFIED, spec, READING, seed=0, data=spec, optimizer=OPTIMIZER).strategy
        strategies, names = different(found, {name: api.classical(name, graph, topology) for name in BASELINES})
        plans = measure(
            outcome.simulator, args.cluster, model, spec, strategies, args.steps, args.rounds, optimizer=OPTIMIZER, data=spec
        )
        print("\n".join(table(plans, names)), flush=True)
        used = {f"{sync.contract.word}:{sync.partitions}" for sync in found.parameters.values()}
        shares = ", ".join(f"{name} {access.alpha:.3f}" for name, access in list(graph.sparse.items())[:4])
        print(f"\n{model}: found {', '.join(sorted(used)) or 'all-reduces alone'}; alpha {shares}\n", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
