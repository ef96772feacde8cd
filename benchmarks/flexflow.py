"""FlexFlow's experiments again: what a found plan gains over data parallelism on its clusters, and what delta simulation gains the search.

    python -m benchmarks.flexflow --write docs/results/flexflow.md
    python -m benchmarks.flexflow --nets nmt --clusters k80-16x4 --hosts 16 --seconds 1 4 16

Jia, Zaharia and Aiken, "Beyond Data and Model Parallelism for Deep Neural Networks", SysML 2019. Costs are estimates (data sheets);
nothing is fitted to the paper. Data parallelism is simulated as it ran there, every parameter with one holder, to which gradients go and
from which values come, each by itself, and as it runs here (DistributedDataParallel): gradients are summed in buckets while the backward
pass goes on.

Full beside delta simulation: two chains of the same seed see the same proposals, since both simulations give the same times. One simulates
what a proposal changes, the other lowers and simulates the whole task graph for each proposal (of the strategy that the proposal left the
chain with, which has about as many tasks). Only simulating counts in the other's time, not drawing proposals. As in the source, candidates
are taken as they are drawn.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from benchmarks.end_to_end import machine
from benchmarks.pages import give
from benchmarks.search import CLUSTERS, NETS, load_fitting
from soap import api
from soap.cli.options import positive
from soap.cluster.topology import Topology
from soap.model.graph import OperatorGraph
from soap.search.compiled.runner import CompiledChain, CompiledSpace
from soap.search.metropolis import DEFAULT_BETA
from soap.search.options import SearchOptions
from soap.search.space import build_space
from soap.search.starts import BASELINE, reference_strategies, starting_strategies
from soap.simulator.engine import Engine
from soap.simulator.shared import Shared
from soap.strategy.config import Strategy
from soap.strategy.sync import parameter_server, synchronized

HOSTS = {"p100-4x4": (1, 4), "k80-16x4": (1, 4, 16)}
"""Of each cluster, four devices each."""
RACES = (("nmt", "p100-4x4"), ("inception_v3", "p100-4x4"), ("nmt", "k80-16x4"))
"""Nets and clusters on which both simulations are compared; the first is the source's."""
SECONDS = (0.25, 0.5, 1, 2, 4, 8)
"""Of processor time, so that other programs do not count."""
PAPER = {
    "alexnet": "1.3 to 3.3", "inception_v3": "1.3 to 3.3", "resnet101": "about 1", "rnntc": "1.3 to 3.3", "rnnlm": "1.3 to 3.3",
    "nmt": "1.3 to 3.3; 1.7 to 2.4 on 64 K80",
}  # fmt: skip
"""Throughput over data parallelism's and the experts', as the text says; its figures are charts without numbers."""


def first_hosts(topology: Topology, count: int) -> Topology:
    """The cluster with its first hosts alone."""
    hosts = topology.hosts[:count]
    gone = tuple(f"{host.name}/" for host in topology.hosts[count:])
    devices = tuple(device for device in topology.devices if device.host < count)
    links = [link for link in topology.links if not (link.source.startswith(gone) or link.target.startswith(gone))]
    numbered = tuple(replace(link, index=number) for number, link in enumerate(links))
    return replace(topology, name=f"{topology.name}, {len(devices)} devices", devices=devices, hosts=hosts, links=numbered)


def one_holder(graph: OperatorGraph, topology: Topology) -> Strategy:
    """Data parallelism with every parameter on one host's server: nothing is cut, summed within hosts, or put into buckets."""
    strategy = api.classical(BASELINE, graph, topology)
    return strategy.with_changes(parameters=synchronized(graph, parameter_server(), sparse=False))


class Gain(NamedTuple):
    """Milliseconds of an iteration."""

    net: str
    cluster: str
    devices: int
    samples: int
    held_ms: float
    summed_ms: float
    found_ms: float
    search_s: float

    @property
    def cells(self) -> tuple[object, ...]:
        """A line of the table."""
        times = (f"{ms:.1f}" for ms in (self.held_ms, self.summed_ms, self.found_ms))
        over = (f"{ms / self.found_ms:.2f}" for ms in (self.held_ms, self.summed_ms))
        return (self.net, self.cluster, self.devices, self.samples, *times, *over, PAPER[self.net], f"{self.search_s:.0f}")


GAINS = (
    "net", "cluster", "devices", "samples per device", "data parallel, one holder, ms", "data parallel, all-reduce, ms", "found, ms",
    "found over one holder", "found over all-reduce", "published", "search, s",
)  # fmt: skip


def gain(net: str, name: str, topology: Topology, budget: int, folder: Path) -> Gain:
    """What is found for a net, beside both kinds of data parallelism."""
    samples, graph = load_fitting(net, topology, folder)
    begin = time.perf_counter()
    outcome = api.find(graph, topology, SearchOptions(budget=budget))
    seconds = time.perf_counter() - begin
    simulator = outcome.simulator
    strategies = (one_holder(graph, topology), api.classical(BASELINE, graph, topology), outcome.strategy)
    held, summed, found = (simulator.makespan_ns(strategy) / 1e6 for strategy in strategies)
    return Gain(net, name, topology.device_count, samples, held, summed, found, seconds)


class Mark(NamedTuple):
    """When a chain had done so many proposals, and its best iteration time then."""

    seconds: float
    proposals: int
    best_ns: int


class Race:
    """Both chains of one net. The compiled space is shared."""

    def __init__(self, graph: OperatorGraph, topology: Topology) -> None:
        costs = api.simulator_for(graph, topology).costs
        starts = starting_strategies(graph, topology, None, None, 0)
        space = build_space(graph, topology.device_count, references=reference_strategies(graph, topology, starts.values()))
        self.graph, self.topology, self.costs, self.start = graph, topology, costs, starts[BASELINE]
        self.space = CompiledSpace(space, Shared(space.graph, topology, costs))

    def delta(self, limit_s: float, most: int, seed: int) -> Iterator[Mark]:
        """Proposal after proposal, in slices of some milliseconds."""
        chain = CompiledChain(self.space, self.start, seed=seed, proposals=most)
        begin = time.process_time()
        while (seconds := time.process_time() - begin) <= limit_s and chain.proposals < most:
            yield Mark(seconds, chain.proposals, chain.best_ns)
            chain.run(min(most, chain.proposals + 8), beta=DEFAULT_BETA, focus=0.0)
        yield Mark(time.process_time() - begin, chain.proposals, chain.best_ns)

    def full(self, limit_s: float, most: int, seed: int) -> Iterator[Mark]:
        """The same chain; its time is that of simulating each proposal from the ground up. ValueError if that gives another time."""
        chain = CompiledChain(self.space, self.start, seed=seed, proposals=most)
        engine = Engine(Shared(self.graph, self.topology, self.costs))
        seconds = 0.0
        while seconds <= limit_s and chain.proposals < most:
            yield Mark(seconds, chain.proposals, chain.best_ns)
            chain.run(chain.proposals + 1, beta=DEFAULT_BETA, focus=0.0)
            strategy = chain.strategy
            begin = time.process_time()
            engine.load(strategy)
            found_ns = engine.simulate()
            seconds += time.process_time() - begin
            if found_ns != chain.cost_ns:
                raise ValueError(f"full simulation says {found_ns} ns, delta simulation {chain.cost_ns} ns")
        yield Mark(seconds, chain.proposals, chain.best_ns)


def at(marks: Iterable[Mark], seconds: float) -> Mark:
    """The last mark within so many seconds; the first one if there is none."""
    found: Mark | None = None
    for mark in marks:
        if found is not None and mark.seconds > seconds:
            break
        found = mark
    assert found is not None
    return found


RACED = ("net", "cluster", "seconds", "full: proposals", "full: best, ms", "delta: proposals", "delta: best, ms", "delta's gain")


def race_lines(net: str, name: str, race: Race, seconds: Sequence[float], most: int, seed: int) -> list[tuple[object, ...]]:
    """Best found against seconds by both, and last how long each took for as many proposals as the slower one did."""
    full, delta = list(race.full(max(seconds), most, seed)), list(race.delta(max(seconds), most, seed))
    lines: list[tuple[object, ...]] = []
    for limit in seconds:
        a, b = at(full, limit), at(delta, limit)
        cells = [f"{a.proposals:,}", f"{a.best_ns / 1e6:.1f}", f"{b.proposals:,}", f"{b.best_ns / 1e6:.1f}"]
        lines.append((net, name, f"{limit:g}", *cells, f"{a.best_ns / b.best_ns - 1:+.1%}"))
    last = full[-1]
    same = next(mark for mark in delta if mark.proposals >= last.proposals)
    last_cells = [f"{last.seconds:.1f} s", "", f"{same.seconds:.1f} s", "", f"{last.seconds / same.seconds:.1f} times as fast"]
    lines.append((net, name, f"for {last.proposals:,} proposals", *last_cells))
    return lines


def table(head: Sequence[object], lines: Iterable[Sequence[object]]) -> str:
    """Markdown."""
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in (head, ["---"] * len(head), *lines)) + "\n"


HEAD = """# FlexFlow's experiments, simulated

`python -m benchmarks.flexflow --write docs/results/flexflow.md`; what is done is said in
[benchmarks/flexflow.py](../../benchmarks/flexflow.py). Published figures: Jia, Zaharia and Aiken, "Beyond Data and Model Parallelism for
Deep Neural Networks", SysML 2019. Nothing is fitted to them.

"""

SPEED = """## Found plans over data parallelism

Predicted iterations. "One holder" is data parallelism as it ran there, "all-reduce" as it runs here. "Published": throughput of the
paper's found plans over data parallelism's and the experts'.

"""

BUDGETS = """## Full beside delta simulation

The best iteration that a chain from data parallelism found in so many seconds of one core. Delta simulation's include drawing
proposals and preparing what a configuration needs when it is first drawn; full simulation's do not. The source needed 16 minutes with
full and 6 with delta simulation for NMT on 16 P100, and found better plans with delta simulation wherever the limit was 8 minutes or
less.

"""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="flexflow", description="FlexFlow's experiments, simulated.")
    parser.add_argument("--nets", nargs="+", choices=NETS, default=list(NETS))
    parser.add_argument("--clusters", nargs="+", choices=CLUSTERS, default=list(CLUSTERS))
    parser.add_argument("--hosts", nargs="+", type=positive, help="of four devices (default: 1, 4 of p100-4x4; 1, 4, 16 of k80-16x4)")
    parser.add_argument("--budget", type=positive, default=1000, help="proposals of each search (default %(default)s)")
    parser.add_argument("--seconds", nargs="+", type=float, default=list(SECONDS), help="limits at which full and delta are compared")
    parser.add_argument("--only", choices=("gains", "budgets"), help="one of both parts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the page here instead of printing it")
    args = parser.parse_args(argv)
    gains: list[tuple[object, ...]] = []
    races: list[tuple[object, ...]] = []
    api.find("zoo:rnnlm:tiny", "local:2", SearchOptions(budget=500))  # compiles the simulator and the chain, where that has not been done
    with tempfile.TemporaryDirectory() as folder:
        for net, name in ((net, name) for name in args.clusters for net in args.nets if args.only != "budgets"):
            whole = api.load_cluster(name)
            for hosts in args.hosts or HOSTS[name]:
                gains.append(gain(net, name, first_hosts(whole, hosts), args.budget, Path(folder)).cells)
                print(*gains[-1], file=sys.stderr, flush=True)
        for net, name in RACES:
            if net in args.nets and name in args.clusters and args.only != "gains":
                _, graph = load_fitting(net, api.load_cluster(name), Path(folder))
                races += race_lines(net, name, Race(graph, api.load_cluster(name)), args.seconds, 200_000, args.seed)
                print(*races[-1], file=sys.stderr, flush=True)
    parts = [f"{SPEED}{table(GAINS, gains)}"] if gains else []
    parts += [f"{BUDGETS}{table(RACED, races)}"] if races else []
    text = f"{HEAD}{machine()}\n\n" + "\n".join(parts)
    give(text, args.write)
    return 0


if __name__ == "__main__":
    sys.exit(main())
