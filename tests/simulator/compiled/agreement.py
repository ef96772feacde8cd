"""Comparing the compiled simulator with ``lowering`` and ``reference``, task by task."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np

from soap.cluster.topology import Topology
from soap.model.graph import OperatorGraph
from soap.plan.compression.training import PLAIN, PlannedTraining
from soap.simulator.compiled import task_keys
from soap.simulator.costs import CostModel
from soap.simulator.engine import Engine
from soap.simulator.lowering import PlanBuilder, lower
from soap.simulator.memory.memory_sum import MemorySum
from soap.simulator.reference import simulate
from soap.simulator.tasks import LIMITS
from soap.strategy.config import FLOATING, Strategy, SyncConfig
from soap.strategy.sync import SPARSE_ALL_GATHER, compressed, parameter_server
from tests.strategies import LOSSY, SHARED, WITHIN

Played = tuple[int, int, frozenset[int], int, int]
"""(duration, start, resources, end, bytes)."""


def task_key(*parts: int) -> tuple[int, int]:
    """The key that compiled code gives a task with this id, by the same function in Python."""
    own: Any = task_keys.packed
    found: tuple[int, int] = own.py_func(*parts, *[0] * (len(LIMITS) - len(parts)))
    return found


def reference_tasks(
    graph: OperatorGraph, topology: Topology, costs: CostModel, strategy: Strategy, training: PlannedTraining = PLAIN
) -> dict[tuple[int, int], Played]:
    """What the reference makes of a strategy: key -> task as it was played."""
    tasks = lower(PlanBuilder(graph, topology, training).build(strategy), topology, costs)
    schedule = simulate(tasks)
    played = {}
    for task, start, end in zip(tasks.tasks, schedule.start_ns.tolist(), schedule.end_ns.tolist(), strict=True):
        played[task_key(*task.id)] = (task.duration_ns, start, frozenset(task.resources), end, task.bytes)
    assert len(played) == len(tasks.tasks)
    return played


def synchronized(strategy: Strategy, graph: OperatorGraph, draw: random.Random, share: float = 0.5) -> Strategy:
    """The same operators, with any synchronization of such a share of the parameters; servers in up to 40 partitions: more than a host has
    cores."""
    chosen = {}
    for tensor in graph.parameters:
        if draw.random() < share:
            rows = tensor.name in graph.sparse
            within = draw.choice(WITHIN)
            servers = parameter_server(draw.choice((1, 2, 7, 40)), within, rows=rows)
            lossy = compressed(draw.choice(LOSSY), within) if tensor.dtype in FLOATING else servers
            other = SPARSE_ALL_GATHER if rows else lossy
            away = replace(draw.choice((SyncConfig(), *SHARED)), offload=True)
            chosen[tensor.name] = draw.choice((other, servers, *SHARED, away))
    return replace(strategy, parameters=chosen, prefetch=draw.randrange(3))


def compiled_tasks(engine: Engine) -> dict[tuple[int, int], Played]:
    """What the engine makes of the strategy that it holds."""
    slots, state = engine.taken(), engine.state
    begins, resources = engine.held(slots)
    keys, held = map(tuple, engine.keys(slots).tolist()), [frozenset(part.tolist()) for part in np.split(resources, begins[1:-1])]
    start, end = engine.times(slots)
    played = zip(state.duration[slots].tolist(), start.tolist(), held, end.tolist(), state.moved[slots].tolist(), strict=True)
    return dict(zip(keys, played, strict=True))


def most_bytes(memory: MemorySum) -> list[int]:
    """Bytes that each device holds at most, whenever, for the engine's proposal, or, without one, the strategy that it holds."""
    memory.verdict()
    return memory._fixed["total"].tolist()
