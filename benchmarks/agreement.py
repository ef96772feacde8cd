"""Is a delta simulation what a full simulation is? Random proposals on the zoo's nets, each simulated both ways, and compared task by task.

    python -m benchmarks.agreement
    python -m benchmarks.agreement --nets gpt:tiny inception_v3 --devices 4 16 64 --proposals 10000

Proposals are drawn from the whole SOAP space: one operator's degrees, replicas and devices, or one parameter's synchronization. They are
accepted by Metropolis' rule, from data parallelism on, so that strategies of all kinds come to be changed. One engine makes deltas; the
other lowers and simulates every proposal from the ground up. A difference is a task of the one that the other has not, or has with another
start, end, duration or number of bytes. Exit code 1 if there is any.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence
from math import exp
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from benchmarks.end_to_end import machine
from benchmarks.simulator import cluster
from soap import api, zoo
from soap.cli.options import positive
from soap.cluster.topology import Topology
from soap.model.graph import OperatorGraph
from soap.search.metropolis import DEFAULT_BETA
from soap.simulator.engine import Engine
from soap.simulator.shared import Shared
from soap.strategy.classical import random_config
from soap.strategy.config import Strategy, SyncConfig
from soap.strategy.sync import fitted, parameter_server

SYNC_SHARE = 0.1
"""Part of the proposals that change a parameter's synchronization."""
SYNCS = (SyncConfig(), parameter_server(), parameter_server(4))


class Agreement(NamedTuple):
    """What was seen: tasks of the last strategy, proposals, how many were accepted, how many differed, tasks that were compared."""

    tasks: int
    proposals: int
    accepted: int
    different: int
    compared: int


def _played_alike(*engines: Engine) -> bool:
    """Whether two engines have played the same tasks at the same times, wherever they have them."""
    found = []
    for engine in engines:
        slots, state = engine.taken(), engine.state
        waiting, waits = engine.waits(slots)
        own = engine.keys(slots), *engine.times(slots), state.duration[slots], state.moved[slots]
        found.append((*own, waiting, engine.keys(waits), *engine.held(slots)))
    return all(np.array_equal(x, y) for x, y in zip(*found, strict=True))


def compare(graph: OperatorGraph, topology: Topology, proposals: int, seed: int = 0, beta: float = DEFAULT_BETA) -> Agreement:
    """So many random proposals, simulated both ways."""
    costs = api.simulator_for(graph, topology).costs
    delta, full = Engine(Shared(graph, topology, costs)), Engine(Shared(graph, topology, costs))
    strategy = api.classical("data_parallel", graph, topology)
    delta.load(strategy)
    start_ns = current_ns = delta.simulate()
    draw = random.Random(seed)
    accepted = different = compared = 0
    for _ in tqdm(range(proposals), disable=None, leave=False):
        proposed, cost_ns = _propose(delta, graph, topology, strategy, draw)
        full.load(proposed)
        full_ns = full.play()
        different += cost_ns != full_ns or not _played_alike(delta, full)
        compared += len(full.taken())
        if cost_ns <= current_ns or draw.random() < exp(beta * (current_ns - cost_ns) / start_ns):
            delta.accept()
            strategy, current_ns, accepted = proposed, cost_ns, accepted + 1
        else:
            delta.reject()
    return Agreement(len(delta.taken()), proposals, accepted, different, compared)


def _propose(
    engine: Engine, graph: OperatorGraph, topology: Topology, strategy: Strategy, draw: random.Random
) -> tuple[Strategy, int]:
    """A random change of the engine's strategy, and its makespan by a delta simulation."""
    if graph.parameters and draw.random() < SYNC_SHARE:
        name, sync = draw.choice(graph.parameters).name, draw.choice(SYNCS)
        sync = fitted(graph, name, sync)
        proposed, found = strategy.with_parameter(name, sync), engine.propose_sync(name, sync)
    else:
        op = draw.choice(graph.operators)
        config = random_config(op, topology.device_count, draw)
        proposed, found = strategy.with_operator(op.name, config), engine.propose(op.name, config)
    assert found is not None  # there is no bound
    return proposed, found


COLUMNS = ("net", "operators", "devices", "proposals", "accepted", "tasks at the end", "tasks compared", "different", "minutes")


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="agreement", description="Delta simulations beside full ones.")
    parser.add_argument("--nets", nargs="+", default=list(zoo.names()), help="names of the zoo, all by default")
    parser.add_argument("--devices", nargs="+", type=positive, default=[4, 16, 64], help="multiples of four")
    parser.add_argument("--proposals", type=positive, default=10_000, help="of each net on each cluster (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    print(f"{machine()}\n\n| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}", flush=True)
    different = 0
    for net in args.nets:
        for devices in args.devices:
            graph, begin = api.load(f"zoo:{net}", plan_only=True).graph, time.monotonic()
            found = compare(graph, cluster(devices // 4), args.proposals, args.seed)
            cells = (
                net, len(graph.operators), devices, found.proposals, found.accepted, found.tasks, f"{found.compared:,}", found.different,
                f"{(time.monotonic() - begin) / 60:.1f}",
            )  # fmt: skip
            print(f"| {' | '.join(map(str, cells))} |", flush=True)
            different += found.different
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
