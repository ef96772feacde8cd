"""Ids of tasks that cannot be told apart are refused, by the reference and by compiled code; all others keep their order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from numba import njit

from soap.errors import ModelError
from soap.model.graph import WHOLE, DimMap, Factor, OperatorGraph
from soap.profiles.roofline import RooflineCosts
from soap.simulator.communication.prices import Communication
from soap.simulator.compiled import task_keys
from soap.simulator.engine import Engine
from soap.simulator.shared import Shared
from soap.simulator.task_list import TaskList
from soap.simulator.tasks import CHUNKS, LIMITS, MICRO_BATCHES, TaskKind, check_id
from soap.strategy.config import OpConfig, Strategy
from tests.extent import MANY
from tests.graph_builder import SAMPLE, GraphBuilder, mlp
from tests.simulator.compiled.agreement import compiled_tasks, reference_tasks
from tests.strategies import cluster

IDS = st.tuples(*(st.one_of(st.integers(0, limit - 1), st.sampled_from((0, 1, limit - 2, limit - 1))) for limit in LIMITS.values()))


@njit
def task_key(phase, position, stage, a, b, c, chunk=0):  # type: ignore[no-untyped-def]
    return task_keys.task_key(phase, position, stage, a, b, c, chunk)


@given(IDS, IDS)
@MANY
def test_keys_are_in_the_order_of_ids(one: tuple[int, ...], other: tuple[int, ...]) -> None:
    a, b = task_key(*one), task_key(*other)
    assert (a < b, a == b) == (one < other, one == other)
    assert all(0 <= number < 1 << 63 for number in a)


def test_there_is_room_for_phases_and_micro_batches() -> None:
    """A micro-batch fits between phase and position."""
    last = [limit - 1 for limit in LIMITS.values()]
    (phase, *_), (other_phase, *_) = task_key(2, 0, 0, 0, 0, 0), task_key(3, 0, 0, 0, 0, 0)
    assert (other_phase - phase) // (task_key(2, *last[1:])[0] - phase + 1) == MICRO_BATCHES
    assert task_key(0, 0, 0, 0, 0, 1)[1] == CHUNKS and task_key(0, 0, 0, 0, 0, 0, 1)[1] == 1
    assert LIMITS["phase"] == 16 and task_key(*last)[1] < 1 << 63


@pytest.mark.parametrize("part", range(len(LIMITS)))
@pytest.mark.parametrize("beyond", [False, True])
def test_what_does_not_fit_is_refused(part: int, beyond: bool) -> None:
    name, limit = list(LIMITS.items())[part]
    parts = [0] * len(LIMITS)
    parts[part] = limit if beyond else -1
    with pytest.raises(ValueError, match="does not fit"):
        task_key(*parts)
    with pytest.raises(ModelError, match=f"^task with {name} {parts[part]}; expected fewer than .*: make the model .* smaller$"):
        check_id(parts)
    with pytest.raises(ModelError):
        TaskList(Communication(cluster([2]))).add(tuple(parts), "task", TaskKind.FORWARD, (0,), 1, ())


def test_compiled_code_s_refusal_is_told_in_one_line() -> None:
    topology = cluster([2])
    engine = Engine(Shared(mlp(), topology, RooflineCosts(topology)))
    with pytest.raises(ModelError, match=r"^a task has a number that is too large; expected fewer than .* smaller$"):
        engine.consult(lambda: task_key(0, 0, 0, LIMITS["tile"], 0, 0))


MANY = 257
"""Operands, and results: one more than eight bits tell apart."""


@pytest.mark.parametrize("devices", [(1, 1), (1, 2)])
def test_an_operator_with_many_operands(devices: tuple[int, int]) -> None:
    """Of the two messages to its first tile the second one brings operand 256, that to its second tile operand 0."""
    g = GraphBuilder()
    x = g.linear(g.input("x", 4, 2), 2)
    b, rows = Factor("b", 4, SAMPLE), [DimMap(0), DimMap(1)]
    columns = Factor("n", 2, SAMPLE)
    many = g.operator("many", [b, columns], [(x, rows)], [], [((4, 2), rows)] * (MANY - 1))
    read = [(value, rows) for value in (*many, x)]
    graph = g.build(g.mean(g.operator("joined", [b, columns], read, [], [((4, 2), rows)])[0]))
    check(graph, {"linear0": OpConfig((2, 1, 1), (0, 0)), "many1": OpConfig((2, 1), (0, 0)), "joined2": OpConfig((2, 1), devices)})


def test_an_operator_with_many_results() -> None:
    """Device 1 reads result 256, device 2 result 0, all of both."""
    g = GraphBuilder()
    x = g.linear(g.input("x", 4, 2), 2)
    many = g.operator("many", [Factor("b", 4, SAMPLE)], [(x, [DimMap(0), WHOLE])], [], [((4, 2), [DimMap(0), WHOLE])] * MANY)
    read = [(value, [WHOLE, WHOLE]) for value in many]
    joined = g.operator("joined", [Factor("n", 4, SAMPLE)], read, [], [((4, 2), [DimMap(0), WHOLE])])[0]
    check(g.build(g.mean(joined)), {"many1": OpConfig((1,), (0,)), "joined2": OpConfig((2,), (1, 2))})


def check(graph: OperatorGraph, configs: dict[str, OpConfig]) -> None:
    topology = cluster([3])
    costs = RooflineCosts(topology)
    here = {op.name: OpConfig((1,) * len(op.factors), (0,)) for op in graph.operators}
    strategy = Strategy({**here, **configs})
    engine = Engine(Shared(graph, topology, costs))
    engine.load(strategy)
    engine.simulate()
    assert compiled_tasks(engine) == reference_tasks(graph, topology, costs, strategy)
