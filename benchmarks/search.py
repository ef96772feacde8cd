"""What does the search find for the nets and clusters of FlexFlow's paper, how soon, and how far from ideal can it be?

    python -m benchmarks.search
    python -m benchmarks.search --nets nmt --clusters k80-16x4 --budget 40000
    python -m benchmarks.search --informed 3

Estimated costs (data sheets), 64 samples per device as in the paper (AlexNet 256), or half as many, until data parallelism fits into
memory. "best start": the quickest other start that fits. "bytes" cross links, per iteration. "99% after": when the best strategy so far had
99% of the gain over the best start. "full / delta": the time to lower and simulate a strategy from the ground up, over that of a delta
simulation in a random walk. "at best": the lower bound of ``soap.search.oracles.bounds``, where it can be worked out quickly.

With ``--informed``, compiled chains from data parallelism: blind ones take candidates as they are drawn, informed ones weigh them by rough
costs (``soap.search.compiled.moves``). The last column says when an informed one was as good as the blind one of the same seed in the end.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.end_to_end import machine
from benchmarks.simulator import load_net, measure
from soap import api
from soap.cli.options import positive
from soap.cluster.topology import Topology
from soap.model.graph import OperatorGraph
from soap.search.compiled.runner import CompiledChain, CompiledSpace
from soap.search.metropolis import DEFAULT_BETA
from soap.search.options import SearchOptions
from soap.search.space import build_space
from soap.search.starts import BASELINE, Start, reference_strategies, starting_strategies
from soap.search.tempering import FOCUS
from soap.simulator.shared import Shared
from soap.units import format_bytes

NETS = ("alexnet", "inception_v3", "resnet101", "rnntc", "rnnlm", "nmt")
CLUSTERS = ("p100-4x4", "k80-16x4")
SAMPLES = {"alexnet": 256}
MEASURED = 1000
"""Proposals of the walk that is timed."""

PAPER = {
    ("nmt", "k80-16x4"): "1.7-2.4x, bytes 65.8 / 24.2 / 12.1 GB",
    ("resnet101", "p100-4x4"): "about 1x",
    ("resnet101", "k80-16x4"): "about 1x",
}
"""What the paper says of single cells; of all together: 1.3 to 3.3 times data parallelism's and the experts' throughput."""


def load_fitting(net: str, topology: Topology, folder: Path) -> tuple[int, OperatorGraph]:
    """Samples per device with which data parallelism fits, and the net's operators."""
    samples = SAMPLES.get(net, 64)
    while True:
        graph = load_net(net, samples * topology.device_count, folder)
        simulator = api.simulator_for(graph, topology)
        if simulator.overflow_bytes(api.classical(BASELINE, graph, topology)) == 0:
            return samples, graph
        samples //= 2


def full_over_delta(graph: OperatorGraph, topology: Topology) -> float:
    """Seconds to lower and simulate data parallelism from the ground up, over seconds per proposal of a Metropolis walk that begins there,
    in all dimensions, with the bound (``benchmarks.simulator``)."""
    rates = measure(graph, topology, "allreduce", "soap", MEASURED)
    return rates.bounded * (rates.lower_seconds + rates.play_seconds)


def informed_line(net: str, cluster: str, graph: OperatorGraph, topology: Topology, budget: int, seeds: int) -> str:
    """One line of the second table: a chain from data parallelism whose moves ignore rough costs, and one whose moves weigh by them."""
    costs = api.simulator_for(graph, topology).costs
    starts = starting_strategies(graph, topology, None, None, 0)
    space = build_space(graph, topology.device_count, references=reference_strategies(graph, topology, starts.values()))
    compiled = CompiledSpace(space, Shared(space.graph, topology, costs))
    cells, blind = [net, cluster], list[int]()
    for focus in (0.0, FOCUS):
        bests, seconds, goals = [], [], []
        for seed in range(seeds):
            chain = CompiledChain(compiled, starts[BASELINE], seed=seed, proposals=budget)
            begin, goal = time.perf_counter(), ""
            for step in range(1, 101):
                chain.run(budget * step // 100, beta=DEFAULT_BETA, focus=focus)
                if focus and not goal and chain.best_ns <= blind[seed]:
                    goal = f"{chain.proposals:,} / {time.perf_counter() - begin:.1f} s"
            bests.append(chain.best_ns)
            seconds.append(time.perf_counter() - begin)
            goals.append(goal or "not")
        if not focus:
            blind = bests
        cells += [", ".join(f"{best / 1e6:.1f}" for best in bests), f"{sum(seconds) / seeds:.1f} s"]
    return f"| {' | '.join([*cells, ', '.join(goals)])} |"


INFORMED = ("net", "cluster", "blind, ms", "time", "informed, ms", "time", "the blind one's best after (proposals / time)")


def line(net: str, cluster: str, samples: int, graph: OperatorGraph, topology: Topology, budget: int, seed: int) -> str:
    """One line of the table."""
    begin = time.perf_counter()
    marks: list[tuple[float, int]] = []

    def improved(cost_ns: int) -> None:
        marks.append((time.perf_counter() - begin, cost_ns))

    outcome = api.find(graph, topology, SearchOptions(budget=budget, seed=seed), improved=improved)
    seconds = time.perf_counter() - begin
    result = outcome.result
    experts = [start for start in result.starts if start.name != BASELINE]
    best_start = min(experts, key=lambda start: (not start.fits, start.cost_ns))
    baseline = next(start for start in result.starts if start.name == BASELINE)
    able = [start.cost_ns for start in (baseline, best_start) if start.fits]
    first_ns = min(able, default=0)  # nothing to gain over where nothing fits
    goal_ns = first_ns - 0.99 * (first_ns - result.cost_ns)
    reached = next((f"{at:.1f} s" for at, cost_ns in marks if cost_ns <= goal_ns), "at once") if able else ""
    simulator = outcome.simulator
    moved = [simulator.run(s).bytes_moved for s in (api.classical(BASELINE, graph, topology), best_start.strategy, outcome.strategy)]
    bound = outcome.bound
    ratio = full_over_delta(graph, topology)
    cells = [
        net, len(graph.operators), cluster, samples, _cost(baseline), f"{_cost(best_start)} {best_start.name}",
        f"{result.cost_ns / 1e6:.1f}", f"{outcome.speedup:.2f}", f"{first_ns / result.cost_ns:.2f}" if able else "",
        " / ".join(format_bytes(size) for size in moved), result.evaluations, f"{seconds:.0f} s", reached, f"{ratio:.1f}",
        "" if bound is None else f"{bound.bound_ns / 1e6:.1f}", "yes" if result.locally_optimal else "", PAPER.get((net, cluster), ""),
    ]  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |"


def _cost(start: Start) -> str:
    return f"{start.cost_ns / 1e6:.1f}" + ("" if start.fits else " (lacks memory)")


COLUMNS = (
    "net", "operators", "cluster", "per device", "data parallel, ms", "best start, ms", "found, ms", "speed-up", "over the best start",
    "bytes: data parallel / best start / found", "evaluations", "search", "99% after", "full / delta", "at best, ms", "locally optimal",
    "paper",
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="search", description="What the search finds for the nets and clusters of FlexFlow's paper.")
    parser.add_argument("--nets", nargs="+", choices=NETS, default=list(NETS))
    parser.add_argument("--clusters", nargs="+", choices=CLUSTERS, default=list(CLUSTERS))
    parser.add_argument("--budget", type=positive, default=20_000, help="proposals (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--informed", metavar="SEEDS", type=positive, help="instead: what weighing candidates gains, for so many seeds")
    args = parser.parse_args(argv)
    columns = INFORMED if args.informed else COLUMNS
    print(f"{machine()}\n\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}", flush=True)
    api.find("zoo:rnnlm:tiny", "local:2", SearchOptions(budget=500))  # compiles the simulator and the chain, where that has not been done
    with tempfile.TemporaryDirectory() as folder:
        for cluster in args.clusters:
            topology = api.load_cluster(cluster)
            for net in args.nets:
                samples, graph = load_fitting(net, topology, Path(folder))
                if args.informed:
                    print(informed_line(net, cluster, graph, topology, args.budget, args.informed), flush=True)
                else:
                    print(line(net, cluster, samples, graph, topology, args.budget, args.seed), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
