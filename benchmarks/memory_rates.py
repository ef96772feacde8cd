"""Proposals per second of a chain where memory binds, and how often it has to ask Python whether a strategy fits; and with micro-batches.

    python -m benchmarks.memory_rates
    python -m benchmarks.memory_rates --models gpt@64 --clusters v100-4 p100-4x4 --proposals 1000

Each cell is a chain on one core. *no limit*: from data parallelism, and memory is not asked about. *recompute*: every device may use
``SHARE`` of what data parallelism takes, and the chain begins with data parallelism that recomputes as few runs as fit. *fsdp*: the same
limit, from sharded parameters, all ways to save memory allowed. *8 micro-batches*: as *no limit*, in so many. *pipeline*: from the best
pipeline of 8 micro-batches by rough costs, inside its stages. Seconds are processor time, and so are those spent in Python's answers.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass, replace

from soap import api
from soap.api.predictions import usual_in_stages
from soap.cluster.topology import Topology
from soap.search.compiled.runner import CompiledChain, CompiledSpace
from soap.search.metropolis import DEFAULT_BETA
from soap.search.pipelines import pipelines
from soap.search.pipelining import pipelined, space_of
from soap.search.recomputing import recompute_to_fit, with_recomputation
from soap.search.space import Space, build_space
from soap.search.starts import Start, reference_strategies
from soap.search.tempering import FOCUS
from soap.simulator.engine import Engine
from soap.simulator.incremental import IncrementalSimulator
from soap.simulator.shared import Shared
from soap.simulator.simulate import Simulator
from soap.strategy.config import Strategy
from soap.strategy.named import DATA_PARALLEL, named
from soap.strategy.sync import sync_choices

MODELS, CLUSTERS = ("gpt@64",), ("v100-4", "p100-4x4")
MICROBATCHES = 8
UNLIMITED = ("no limit", f"{MICROBATCHES} micro-batches", "pipeline")
CELLS = (*UNLIMITED, "recompute", "fsdp")
SHARE = 0.6


@dataclass(frozen=True)
class Rate:
    """``per_second``: proposals. ``asked``: questions that Python answered. ``asking``: the share of the time that this took."""

    per_second: float
    proposals: int
    asked: int
    asking: float
    best_ns: int


def limited(simulator: Simulator, share: float) -> Topology:
    """The cluster, whose devices may use this share of what data parallelism takes."""
    usual = simulator.run(named(DATA_PARALLEL, simulator.graph, simulator.topology))
    return replace(simulator.topology, limits=tuple(int(share * size) for size in usual.peak_bytes))


def prepared(simulator: Simulator, cell: str) -> tuple[Simulator, Space, Strategy]:
    """(simulator under the cell's limit, space, strategy to begin with)."""
    graph = simulator.graph
    usual = named(DATA_PARALLEL, graph, simulator.topology)
    if cell == "no limit":
        references = reference_strategies(graph, simulator.topology, [usual])
        return simulator, build_space(graph, simulator.topology.device_count, references=references), usual
    if cell in UNLIMITED:
        shapes = pipelines(simulator.shared, simulator.optimizer_states) if cell == "pipeline" else []
        found = (pipelined(graph, simulator.topology, own) for own in shapes if own.microbatches == MICROBATCHES)
        parted = usual_in_stages(graph, replace(usual, microbatches=MICROBATCHES), simulator.topology)
        start = next(found, parted)
        around = space_of(build_space(graph, simulator.topology.device_count), Start(cell, start, 0, 0))
        assert around is not None
        return simulator, around, start
    own = Simulator(graph, limited(simulator, SHARE), simulator.costs, simulator.optimizer_states)
    topology = own.topology
    begin = named("fsdp", graph, topology) if cell == "fsdp" else usual
    syncs = sync_choices(graph, topology, saving=True) if cell == "fsdp" else {}
    space = build_space(graph, topology.device_count, references=reference_strategies(graph, topology, [usual, begin]), syncs=syncs)
    start = recompute_to_fit(graph, topology, begin, own.costs, own.peak_share).strategy if own.overflow_bytes(begin) else begin
    return own, with_recomputation(space), start


def rate(model: str, cluster: str, cell: str, proposals: int, seconds: float) -> Rate:
    """One cell: a chain of so many proposals after as many that fill tables, or fewer if the time is over."""
    simulator = api.simulator_for(api.load(f"zoo:{model}", plan_only=True), cluster, costs="estimate")
    simulator, space, start = prepared(simulator, cell)
    evaluator = IncrementalSimulator(simulator)
    asked, spent = 0, 0.0

    def fits(strategy: Strategy, engine: Engine) -> bool:
        nonlocal asked, spent
        begin = time.process_time()
        found = evaluator.fits(strategy, engine)
        asked, spent = asked + 1, spent + time.process_time() - begin
        return found

    compiled = CompiledSpace(space, Shared(space.graph, simulator.topology, simulator.costs), simulator.optimizer_states)
    chain = CompiledChain(compiled, start, seed=1, proposals=2 * proposals)
    ask = None if cell in UNLIMITED else fits
    for most in (proposals, 2 * proposals):  # variants are made and tables filled in the first half
        first, begin, asked, spent = chain.proposals, time.process_time(), 0, 0.0
        while chain.proposals < most and time.process_time() - begin < seconds:
            chain.run(min(most, chain.proposals + 20), beta=DEFAULT_BETA, focus=FOCUS, fits=ask)
        took = time.process_time() - begin
    return Rate((chain.proposals - first) / took, chain.proposals - first, asked, spent / took, chain.best_ns)


def main(argv: list[str] | None = None) -> int:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--clusters", nargs="+", default=CLUSTERS)
    parser.add_argument("--cells", nargs="+", default=CELLS, choices=CELLS)
    parser.add_argument("--proposals", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=60, help="of processor time, for each half of a cell (default %(default)s)")
    args = parser.parse_args(argv)
    print("| net | cluster | cell | proposals/s | proposals | asked | time in answers | best, ms |\n|---|---|---|---|---|---|---|---|")
    for model in args.models:
        for cluster in args.clusters:
            for cell in args.cells:
                own = rate(model, cluster, cell, args.proposals, args.seconds)
                columns = (f"{own.per_second:,.1f}", own.proposals, own.asked, f"{own.asking:.0%}", f"{own.best_ns / 1e6:.2f}")
                print(f"| {model} | {cluster} | {cell} | {' | '.join(map(str, columns))} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
