"""Does the search find the best of all strategies of small nets, and are its results for the zoo locally optimal?

    python -m benchmarks.optimality
    python -m benchmarks.optimality --seeds 20 --nets gpt:tiny nmt:tiny --devices 4

Small nets: the optimum of all structured strategies by branch and bound, and with how many seeds the search finds it. The zoo: whether any
operator alone does better with another structured configuration, as a check says that shares no code with the search.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from benchmarks.end_to_end import machine
from benchmarks.oracles.exhaustive import best_neighbour, branch_and_bound, strategy_count
from benchmarks.small_nets import lenet, rnnlm
from soap import api, zoo
from soap.cli.options import positive
from soap.cluster.topology import Topology
from soap.cluster.yaml_file import parse_cluster
from soap.model.graph import OperatorGraph
from soap.search.chains import search
from soap.search.dynamic import dynamic_strategy
from soap.search.options import SearchOptions
from soap.search.rough_costs import RoughCosts
from soap.search.space import build_space
from soap.simulator.incremental import IncrementalSimulator
from soap.strategy.config import SyncConfig


class Small(NamedTuple):
    """A net, devices, proposals of each search."""

    net: Callable[[], OperatorGraph]
    devices: int
    budget: int


SMALL = (
    Small(lenet, 2, 2000),
    Small(lenet, 3, 20_000),
    Small(lenet, 4, 20_000),
    Small(rnnlm, 2, 20_000),
    Small(rnnlm, 3, 20_000),
    Small(rnnlm, 4, 20_000),
)


APART = 1_000_000
"""Seed of the search that branch and bound begins with; no other has it."""
REDUCED = (SyncConfig(),)
"""Gradients are summed by all-reduces alone: branch and bound knows nothing else."""


def small_cluster(devices: int) -> Topology:
    """One host, or of four devices two: of P100 with links of 1 GB/s inside."""
    hosts = 2 if devices == 4 else 1
    return parse_cluster(
        f"""name: small-{devices}
hosts:
  - name: host
    count: {hosts}
    devices: {{type: p100, count: {devices // hosts}}}
    cpu_cores: 4
    memory: 16 GB
    links:
      intra: {{kind: full, bandwidth: 1 GB/s, latency: 10 us}}
      host: {{bandwidth: 1 GB/s, latency: 10 us}}
network: {{bandwidth: 1 Gbit/s, latency: 10 us}}
"""
    )


class Found(NamedTuple):
    """The optimum in ns, strategies that it is the best of, simulations and seconds for it, and what the search found, seed by seed."""

    optimum_ns: int
    strategies: int
    simulations: int
    seconds: float
    costs_ns: list[int]

    @property
    def count(self) -> int:
        """How often the search found the optimum, or something better: it may place tiles in other ways, too."""
        return sum(cost_ns <= self.optimum_ns for cost_ns in self.costs_ns)


def find(small: Small, seeds: int) -> Found:
    """The optimum, and so many searches."""
    graph, topology = small.net(), small_cluster(small.devices)
    simulator = api.simulator_for(graph, topology)
    evaluator, space = IncrementalSimulator(simulator), build_space(graph, small.devices)
    dynamic = dynamic_strategy(space, RoughCosts(simulator.shared))
    further = {"dynamic": lambda: dynamic}
    # Much can be left out from the beginning beside a good strategy. That none is better is still shown without a look at how it was found.
    first = search(graph, topology, evaluator, SearchOptions(budget=small.budget, seed=APART, syncs=REDUCED), further_starts=further)
    begin = time.perf_counter()
    optimum = branch_and_bound(space, topology, simulator.costs, evaluator, incumbent=first.strategy)
    seconds = time.perf_counter() - begin
    assert optimum.cost_ns == simulator.makespan_ns(optimum.strategy)
    costs = [
        search(graph, topology, evaluator, SearchOptions(budget=small.budget, seed=seed, syncs=REDUCED), further_starts=further).cost_ns
        for seed in range(seeds)
    ]
    return Found(optimum.cost_ns, strategy_count(space), optimum.evaluations, seconds, costs)


def locally_optimal(net: str, topology: Topology, budget: int = 100) -> tuple[bool, int]:
    """Whether the search's result is locally optimal, as it says itself and as ``best_neighbour`` does; and how many were compared."""
    simulator = api.simulator_for(f"zoo:{net}", topology)
    evaluator = IncrementalSimulator(simulator)
    result = search(simulator.graph, topology, evaluator, SearchOptions(budget=budget), polish_up_to=10_000_000)
    space = build_space(simulator.graph, topology.device_count)
    assert result.cost_ns == simulator.makespan_ns(result.strategy) and simulator.overflow_bytes(result.strategy) == 0
    return result.locally_optimal and best_neighbour(evaluator, space, result.strategy) is None, result.polished


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="optimality", description="Global optima of small nets, local optimality for the zoo.")
    parser.add_argument("--seeds", type=positive, default=100, help="searches of each small net (default %(default)s)")
    parser.add_argument("--nets", nargs="*", default=[f"{name}:tiny" for name in zoo.names()], help="of the zoo")
    parser.add_argument("--devices", nargs="+", type=positive, default=[4, 8], help="4: two hosts of two; 8: h200-8")
    args = parser.parse_args(argv)
    columns = "| net | devices | strategies | optimum, ms | simulations | shown in, s | budget | found | s |"
    print(f"{machine()}\n\n{columns}\n|{'---|' * 9}", flush=True)
    for small in SMALL:
        begin = time.perf_counter()
        found = find(small, args.seeds)
        print(
            f"| {small.net().name} | {small.devices} | {found.strategies:.1e} | {found.optimum_ns / 1e6:.3f} | {found.simulations} | "
            f"{found.seconds:.1f} | {small.budget} | {found.count} of {args.seeds} | {time.perf_counter() - begin:.0f} |",
            flush=True,
        )
    print(f"\n| net | devices | compared | locally optimal | seconds |\n|{'---|' * 5}")
    for net in args.nets:
        for devices in args.devices:
            begin = time.perf_counter()
            yes, compared = locally_optimal(net, small_cluster(4) if devices == 4 else api.load_cluster("h200-8"))
            print(f"| {net} | {devices} | {compared:,} | {'yes' if yes else 'no'} | {time.perf_counter() - begin:.0f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
