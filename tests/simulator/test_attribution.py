from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from soap.simulator.analysis.attribution import Activity, activity, task_shares
from soap.simulator.lowering import build_plan, lower
from soap.simulator.reference import simulate
from soap.simulator.tasks import Schedule, TaskGraph, TaskKind
from soap.strategy.classical import CLASSICAL, random_strategy
from soap.strategy.sync import parameter_server
from tests.extent import FEW
from tests.graph_builder import mlp, transformer
from tests.simulator.examples import PointCosts
from tests.strategies import cluster

FOUR = cluster([2, 2])
GRAPHS = (mlp(), transformer(batch=4, layers=1))


def played(number: int, seed: int, *, servers: bool = False) -> tuple[TaskGraph, Schedule]:
    graph = GRAPHS[number]
    strategy = random_strategy(graph, FOUR, random.Random(seed))
    for parameter in graph.parameters if servers else ():
        strategy = strategy.with_parameter(parameter.name, parameter_server(2))
    tasks = lower(build_plan(graph, strategy, FOUR), FOUR, PointCosts())
    return tasks, simulate(tasks)


@given(st.sampled_from([0, 1]), st.integers(0, 99), st.booleans())
@FEW
def test_every_task_belongs_to_operators_whose_parts_add_up(number: int, seed: int, servers: bool) -> None:
    tasks, _ = played(number, seed, servers=servers)
    plan = tasks.plan
    for task, parts in zip(tasks.tasks, task_shares(tasks), strict=True):
        assert sum(parts.values()) == pytest.approx(1.0)
        if task.tile is not None:
            assert parts == {plan.tiles[task.tile].operator: 1.0}
            assert activity(task) is Activity.COMPUTATION
        elif task.kind in (TaskKind.SYNC, TaskKind.UPDATE):
            assert activity(task) is Activity.SYNCHRONIZATION
            assert all(plan.graph.operators[i].parameters for i in parts)
        else:
            assert activity(task) is Activity.COMMUNICATION
            ((operator, _),) = parts.items()
            assert plan.graph.operators[operator].inputs


def test_a_bucket_is_divided_by_bytes() -> None:
    graph = mlp(widths=(16, 32, 16), classes=4)
    tasks = lower(build_plan(graph, CLASSICAL["data_parallel"](graph, FOUR), FOUR), FOUR, PointCosts())
    found = [parts for task, parts in zip(tasks.tasks, task_shares(tasks), strict=True) if task.kind is TaskKind.SYNC]
    sizes = {graph.index[name]: n for name, n in (("fc0", 16 * 32 + 32), ("fc1", 32 * 16 + 16), ("head", 16 * 4 + 4))}
    assert len(found) == 1
    assert found[0] == pytest.approx({i: n / sum(sizes.values()) for i, n in sizes.items()})
