"""How often a search would ask for rows of a synchronization that it has not seen, if these were made once in Python and kept.

    python -m benchmarks.templates --nets nmt transformer --devices 4 16 --methods allreduce parameter_server zero1 fsdp

A chain of random proposals (all of SOAP's space, one operator at a time) is accepted as by Metropolis. Of each proposal's plan it counts
the synchronizations that are new by two keys: *roles*, the method's setting with its readers, leaders and servers, if the engine works out
sizes; and *sizes*, with all bytes that prices depend on, if rows are kept with their prices. The figures decide what a template holds.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import tempfile
import time
from collections.abc import Hashable, Iterator, Sequence
from itertools import product
from pathlib import Path

from benchmarks.simulator import NETS, SAMPLES, cluster, load_net, soap_configs
from soap import api
from soap.cli.options import positive
from soap.model.graph import OperatorGraph
from soap.plan.plan import Plan
from soap.plan.planning import PlanBuilder
from soap.plan.syncs.bucketing import gradient_bytes
from soap.plan.syncs.seam import method_for
from soap.plan.syncs.sharing import owned_bytes
from soap.search.metropolis import DEFAULT_BETA
from soap.simulator.engine import Engine
from soap.simulator.shared import Shared
from soap.strategy.config import Strategy
from soap.strategy.sync import parameter_server, synchronized

METHODS = ("allreduce", "parameter_server", "zero1", "fsdp")
COLUMNS = ("net", "devices", "gradients", "synchronizations", "new by roles", "new by sizes", "us each")


def keys(plan: Plan) -> Iterator[tuple[int, Hashable, Hashable]]:
    """(number of a synchronization, its key by roles, its key by sizes) for each of a plan's."""
    for number, sync in enumerate(plan.syncs):
        servers = tuple(plan.shards[shard].devices for shard in sync.shards) if sync.contract.has_servers else ()
        roles = sync.contract.name, sync.readers, sync.leaders, servers
        if sync.contract.has_servers:
            sizes: Hashable = tuple(plan.shards[shard].box for shard in sync.shards)
        else:
            parts = tuple(sorted(owned_bytes(plan, sync).items())) if sync.contract.owned_in_parts else ()
            sizes = gradient_bytes(plan, sync), parts
        yield number, roles, (roles, sizes)


def line(graph: OperatorGraph, devices: int, method: str, proposals: int) -> str:
    """A row of the table: synchronizations in a plan, new keys for each proposal of the second half, microseconds to make one's rows."""
    topology = cluster(devices // 4)
    choices = {name: configs for name, configs in soap_configs(graph, devices).items() if configs}
    builder, draw = PlanBuilder(graph, topology), random.Random(7)
    engine = Engine(Shared(graph, topology, api.simulator_for(graph, topology).costs))
    engine.load(_start(graph, devices, method))
    cost_ns = engine.simulate()
    beta = DEFAULT_BETA / cost_ns
    seen: tuple[set[Hashable], set[Hashable]] = set(), set()
    new, seconds, made, syncs = [0, 0], 0.0, 0, 0
    for proposal in range(proposals):
        name = draw.choice(list(choices))
        config = draw.choice(choices[name])
        plan = builder.build(engine.strategy.with_changes(operators={name: config}))
        for number, *found in keys(plan):
            syncs += 1
            for place, key in enumerate(found):
                if key not in seen[place]:
                    seen[place].add(key)
                    new[place] += proposal >= proposals // 2
                    if place:
                        own, begin = plan.syncs[number], time.perf_counter()
                        answers = method_for(own)
                        _ = answers.steps(plan, own), answers.updates(plan, own), list(answers.holds(plan, own))
                        seconds, made = seconds + time.perf_counter() - begin, made + 1
        proposed_ns = engine.propose(name, config)
        assert proposed_ns is not None  # there is no bound
        if draw.random() < math.exp(min(0.0, beta * (cost_ns - proposed_ns))):
            engine.accept()
            cost_ns = proposed_ns
        else:
            engine.reject()
    half = proposals - proposals // 2
    cells = graph.name, devices, method, round(syncs / proposals), *(f"{count / half:.3f}" for count in new), f"{seconds / made * 1e6:.0f}"
    return "| " + " | ".join(map(str, cells)) + " |"


def _start(graph: OperatorGraph, devices: int, method: str) -> Strategy:
    strategy = api.classical(method if method in ("zero1", "fsdp") else "data_parallel", graph, cluster(devices // 4))
    if method == "parameter_server":
        return strategy.with_changes(parameters=synchronized(graph, parameter_server(), sparse=False))
    return strategy


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="templates", description="How often a search meets a synchronization that it has not seen.")
    parser.add_argument("--nets", nargs="+", choices=NETS, default=["nmt", "transformer"])
    parser.add_argument("--devices", nargs="+", type=positive, default=[4, 16], help="multiples of four")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), help="how gradients are synchronized")
    parser.add_argument("--proposals", type=positive, default=200, help="of each chain (default %(default)s)")
    args = parser.parse_args(argv)
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for net, devices in product(args.nets, args.devices):
            graph = load_net(net, SAMPLES * devices, Path(folder))
            for method in args.methods:
                print(line(graph, devices, method, args.proposals), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
