"""What a search under draws of the costs costs, and what it changes on clusters that are not at hand.

    python -m benchmarks.draws
    python -m benchmarks.draws --rates nmt gpt --plans nmt --write docs/results/draws.md

*Rates*: proposals of a chain from data parallelism per second, with and without draws, in turns on one core. *Risks*: what a search finds
by each way to make one cost of several draws, judged under 256 others; means over some seeds. *Plans*: for each model and cluster what the
most likely costs alone would take, in how many of 64 draws that beats data parallelism, and what is kept.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from statistics import mean, median

from benchmarks.oracles.drawn_cost import cost_ns
from benchmarks.pages import give
from soap import api
from soap.api.deciding import draws_for, timed
from soap.cli import profile
from soap.search.chains import search
from soap.search.compiled.runner import CompiledChain, CompiledSpace
from soap.search.metropolis import DEFAULT_BETA
from soap.search.options import DEFAULT_DRAWS, SearchOptions
from soap.search.space import build_space
from soap.search.starts import BASELINE, reference_strategies, starting_strategies
from soap.search.tempering import FOCUS
from soap.simulator.drawn_times import drawn_times
from soap.simulator.draws import Draws, Risk
from soap.simulator.incremental import IncrementalSimulator
from soap.simulator.shared import Shared
from soap.simulator.simulate import Simulator
from soap.strategy.config import Strategy

MODELS = ("alexnet", "resnet50", "rnntc", "rnnlm", "nmt", "gpt", "dlrm", "lm")
CLUSTERS = ("p100-4x4", "h200-8x8")
JUDGES = 256


def rates_line(model: str, cluster: str, proposals: int, turns: int) -> tuple[str, float]:
    """One line of the first table, and its ratio."""
    simulator = _simulator(model, cluster)
    graph, topology = simulator.graph, simulator.topology
    starts = starting_strategies(graph, topology, None, None, 0)
    space = build_space(graph, topology.device_count, references=reference_strategies(graph, topology, starts.values()))
    kinds = {None: CompiledSpace(space, Shared(space.graph, topology, simulator.costs))}
    kinds[DEFAULT_DRAWS] = CompiledSpace(space, Shared(space.graph, topology, simulator.costs), draws=draws_for(simulator, DEFAULT_DRAWS))
    ratios, passed = list[float](), 0.0
    for turn in range(turns):
        rate = {}
        for count, compiled in kinds.items():
            chain = CompiledChain(compiled, starts[BASELINE], seed=turn, proposals=2 * proposals)
            chain.run(proposals, beta=DEFAULT_BETA, focus=FOCUS)  # variants are made, tables are filled
            begin = time.perf_counter()
            chain.run(2 * proposals, beta=DEFAULT_BETA, focus=FOCUS)
            rate[count] = (chain.proposals - proposals) / (time.perf_counter() - begin)
            log = list(chain.log(proposals))
            passed = sum(entry.cost_ns is not None for entry in log) / len(log)
        ratios.append(rate[DEFAULT_DRAWS] / rate[None])
    ratio = median(ratios)
    return f"| {model} | {cluster} | {rate[None]:,.0f} | {rate[DEFAULT_DRAWS]:,.0f} | {ratio:.2f} | {passed:.0%} |", ratio


def risk_lines(model: str, cluster: str, budget: int, seeds: int) -> list[str]:
    """Lines of the second table, a line each way."""
    simulator = _simulator(model, cluster)
    judges = draws_for(simulator, JUDGES, seed="judges")
    ways: dict[str, tuple[int, Risk] | None] = {"most likely costs": None}
    ways |= {f"{count} draws, {risk.value}": (count, risk) for count in (8, 16) for risk in Risk}
    lines = []
    for name, how in ways.items():
        usual, means, tails = list[float](), list[float](), list[float]()
        for seed in range(seeds):
            draws = None if how is None else Draws(judges.spreads, how[0], seed, how[1])
            options = SearchOptions(budget=budget, seed=seed)
            found = search(simulator.graph, simulator.topology, IncrementalSimulator(simulator, draws), options)
            (times,) = drawn_times(simulator, [found.strategy], judges)
            usual.append(times.usual_ns / 1e6)
            means.append(cost_ns(times.times_ns, Risk.MEAN) / 1e6)
            tails.append(cost_ns(times.times_ns, Risk.TAIL) / 1e6)
        lines.append(f"| {model} | {cluster} | {name} | {mean(usual):.3f} | {mean(means):.3f} | {mean(tails):.3f} |")
    return lines


def plans_line(model: str, cluster: str, budget: int) -> tuple[str, float]:
    """One line of the third table, and the win rate of the plain search's plan."""
    simulator = _simulator(model, cluster)
    graph, topology = simulator.graph, simulator.topology
    plain = api.find(graph, topology, SearchOptions(budget=budget, costs="estimate", risk=None, confidence=0.0))
    usual = api.classical(BASELINE, graph, topology)
    blind, other = timed(simulator, {"blind": plain.result.strategy, BASELINE: usual}, usual)
    begin = time.perf_counter()
    found = api.find(graph, topology, SearchOptions(budget=budget, costs="estimate"))
    kept, reference = found.decision.kept, found.decision.reference
    seconds = time.perf_counter() - begin
    wins = 1.0 if reference is None or kept is reference else kept.wins(reference)
    low, high = kept.quantiles_ns()
    cells = [
        model, cluster, f"{blind.usual_ns / 1e6:.2f} ms, {other.usual_ns / blind.usual_ns:.2f}x", f"{blind.wins(other):.0%}",
        f"{blind.unlike} of {len(graph.operators)}", kept.name, f"{kept.usual_ns / 1e6:.2f} ms ({low / 1e6:.2f} to {high / 1e6:.2f})",
        f"{wins:.0%}", f"{kept.unlike}", _decider(simulator, plain.result.strategy, usual), f"{seconds:.0f} s",
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |", blind.wins(other)


def _decider(simulator: Simulator, plan: Strategy, usual: Strategy) -> str:
    """What of the costs decides most between a plan and data parallelism, and its share of the variance of the gain."""
    if plan == usual:
        return "-"
    found = profile.find_deciding(simulator, plan, usual)
    first = max(found.matters, key=lambda matter: matter.share)
    what = profile.WORDS[first.thing.what].format(device=first.thing.device, kind=first.thing.kind)
    return f"{what} ({first.share:.0%})"


def document(args: argparse.Namespace) -> str:
    """All tables."""
    parts = [f"{HEAD}\n`{args.command}`, {datetime.now(UTC):%Y-%m-%d}.\n"]
    if args.rates:
        lines, ratios = zip(*(rates_line(model, cluster, args.proposals, 3) for cluster in CLUSTERS for model in args.rates), strict=True)
        parts.append(RATES + "\n".join(lines) + f"\n\nIn the median {median(ratios):.2f}, at least {min(ratios):.2f}.\n")
    if args.risks:
        parts.append(RISKS + "\n".join(line for model in args.risks for line in risk_lines(model, *RISKY, args.seeds)) + "\n")
    if args.plans:
        lines, wins = zip(*(plans_line(model, cluster, args.budget) for cluster in CLUSTERS for model in args.plans), strict=True)
        unsure = sum(share < 0.6 for share in wins)
        told = f"In {unsure} of {len(wins)} the plain search's plan wins in fewer than 60% of the draws."
        parts.append(PLANS + "\n".join(lines) + f"\n\n{told}\n")
    return "\n".join(parts)


RISKY = ("p100-4x4", 2000)
HEAD = """# Searching under draws of the costs

What `soap.simulator.draws` costs and changes. Costs are data sheets alone.
"""
RATES = f"""## What it costs

Proposals per second of one chain on one core, and the share of proposals for which the draws were played ({DEFAULT_DRAWS} of them).

| model | cluster | plain | with draws | ratio | played |
|---|---|---:|---:|---:|---:|
"""
RISKS = f"""## One cost of several draws

Found in equally many proposals, and judged under {JUDGES} other draws; ms, means over the seeds. "tail": halfway between the mean and the
mean of the worst quarter.

| model | cluster | searched by | most likely costs | mean | tail |
|---|---|---|---:|---:|---:|
"""
PLANS = """## Clusters that are not at hand

"Plain": what the most likely costs alone would take, over data parallelism; in how many draws it wins; how many operators it configures
unlike data parallelism. "Decides": what of the costs explains most of the variance of its gain, and how much.

| model | cluster | plain | wins | unlike | kept | kept, ms (80%) | wins | unlike | decides | search |
|---|---|---|---:|---:|---|---|---:|---:|---|---:|
"""


def _simulator(model: str, cluster: str) -> Simulator:
    spec = model if ":" in model else f"zoo:{model}"
    return api.simulator_for(api.load(spec, plan_only=True), cluster, costs="estimate")


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.draws", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rates", nargs="*", default=["nmt", "gpt", "resnet50", "rnnlm"], metavar="MODEL")
    parser.add_argument("--risks", nargs="*", default=["zoo:nmt:tiny", "zoo:gpt:tiny", "zoo:resnet50:tiny"], metavar="MODEL")
    parser.add_argument("--plans", nargs="*", default=list(MODELS), metavar="MODEL")
    parser.add_argument("--proposals", type=int, default=2000)
    parser.add_argument("--budget", type=int, default=2000)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--write", metavar="FILE", help="write the document instead of printing it")
    args = parser.parse_args(argv)
    args.command = " ".join(["python -m benchmarks.draws", *(sys.argv[1:] if argv is None else argv)])
    give(document(args), args.write)


if __name__ == "__main__":
    main()
