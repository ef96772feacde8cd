"""Orders and times of ranks on arrays: as ``plan.running`` and ``as_run`` have them, which follow them pass by pass."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from soap.cluster.topology import Topology
from soap.model.graph import OperatorGraph
from soap.plan.planning import build_plan
from soap.plan.running.run_order import RunOrder
from soap.simulator.lowering import lower
from soap.simulator.memory.played import NAMED, Played, played_of
from soap.simulator.memory.rank_order import RankOrder
from soap.simulator.memory.rank_times import as_ranks_run
from soap.simulator.memory.spans import Spans, spans_of
from soap.simulator.reference import simulate
from soap.simulator.replay import replayed
from soap.simulator.simulate import Simulator
from soap.simulator.tasks import TaskGraph
from soap.strategy.config import Strategy
from soap.strategy.named import named
from tests.graph_builder import transformer
from tests.simulator.examples import LaunchedCosts
from tests.simulator.memory_rows import arrays_and_spans
from tests.simulator.reference_memory.as_run import as_run
from tests.simulator.reference_memory.task_spans import TaskSpans
from tests.strategies import GPU, cases, cluster


def check(tasks: TaskGraph) -> bool:
    """Compare all fields; returns whether ranks run the passes in another order than they were simulated."""
    schedule = simulate(tasks)
    run, played, plan = as_run(tasks, schedule), played_of(tasks, schedule), tasks.plan
    arrays, expected = arrays_and_spans(TaskSpans(tasks, run))
    for own, given_ns in zip(replayed(played, tasks.topology), (schedule.start_ns, schedule.end_ns), strict=True):
        assert np.array_equal(own, given_ns)
    ranks, order = as_ranks_run(played, plan, arrays, tasks.topology)
    check_order(order, run.order)
    assert np.array_equal(ranks.end, run.schedule.end_ns)
    found = spans_of(ranks, order, plan, arrays)
    for name in Spans._fields:
        one, other = getattr(found, name), getattr(expected, name)
        if name == "named":
            assert set(one) == {task.name for task in tasks.tasks if task.kind in NAMED}
            assert one == {own: span for own, span in other.items() if own in one}
        else:
            assert np.array_equal(one, other) if isinstance(one, np.ndarray) else one == other, name
    return run.schedule is not schedule


def check_order(found: RankOrder, expected: RunOrder) -> None:
    """Compare with the order that ranks follow."""
    assert found.forward.tolist() == list(expected.order.forward)
    assert np.flatnonzero(found.active).tolist() == sorted(expected.activity.tiles)
    assert dict(enumerate(found.segments.number.tolist())) == expected.segment_of
    assert found.segments.first.tolist() == [segment.tiles[0] for segment in expected.segments]
    if expected.plan.order is None:
        assert found.turns.tolist() == list(expected.turns.backward)
        assert found.second_turns.tolist() == [[*own] for own in expected.second_turns]


@settings(suppress_health_check=list(HealthCheck))
@given(cases(servers=True, ports=True))
def test_random_cases(case: tuple[OperatorGraph, Topology, Strategy]) -> None:
    """With micro-batches, second runs, offloading, collectives, servers."""
    graph, topology, strategy = case
    check(lower(build_plan(graph, strategy, topology), topology, LaunchedCosts(topology)))


@pytest.mark.parametrize("name", ["data_parallel", "fsdp", "fsdp+recompute", "megatron:2+zero1"])
def test_named_plans(name: str) -> None:
    graph, topology = transformer(), cluster([2, 2], GPU)
    outcome = Simulator(graph, topology, LaunchedCosts(topology)).run(named(name, graph, topology))
    again = check(outcome.tasks)
    assert again or name != "fsdp+recompute"


def test_waits_of_ranks_are_played() -> None:
    """Gathers for backward passes come before the segment's turn, which a simulation of single tiles does not know."""
    graph, topology = transformer(), cluster([2, 2], GPU)
    tasks = Simulator(graph, topology, LaunchedCosts(topology)).run(named("fsdp+recompute", graph, topology)).tasks
    schedule = simulate(tasks)
    played = played_of(tasks, schedule)
    arrays, _ = arrays_and_spans(TaskSpans(tasks, as_run(tasks, schedule)))
    ranks, _ = as_ranks_run(played, tasks.plan, arrays, tasks.topology)
    waits = as_run(tasks, schedule).waits
    assert [sorted(own) for own in waits] == _waits(ranks)
    assert _waits(ranks) != _waits(played)


def _waits(played: Played) -> list[list[int]]:
    return [sorted(own.tolist()) for own in np.split(played.waits, played.waits_ptr[1:-1])]
