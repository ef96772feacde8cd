"""Draws of the costs: what an error is worth, and what many come to."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.oracles.drawn_cost import cost_ns
from soap import api
from soap.plan.planning import build_plan
from soap.profiles.roofline import RooflineCosts
from soap.simulator.drawn_times import drawn_times, reference_times_ns
from soap.simulator.draws import Communicated, DrawnTasks, Draws, Error, Risk, drawn_ns, links_between_hosts
from soap.simulator.lowering import lower
from soap.simulator.simulate import Simulator
from soap.simulator.tasks import TaskKind
from tests.graph_builder import mlp
from tests.simulator.examples import ExampleSpreads
from tests.strategies import CPU, cluster

GRAPH, TOPOLOGY = mlp(), cluster([2, 2], CPU)


def draws(count: int, seed: int | str = 0, risk: Risk = Risk.MEAN, times: float = 1.0) -> Draws:
    return Draws(ExampleSpreads(times), count, seed, risk)


@pytest.mark.parametrize("count", [2, 3, 8, 64])
def test_every_error_has_the_same_factors_in_another_order(count: int) -> None:
    found = draws(count)
    logs = np.array([np.log(found.factors([Error((name,), 0.5)])) for name in "abcdefgh"])
    assert np.allclose(np.sort(logs, axis=1), np.sort(logs[0]))
    assert np.allclose(logs.mean(axis=1), 0.0) and np.allclose(logs.std(axis=1), 0.5)
    assert count < 8 or len({tuple(row) for row in logs.round(9)}) == 8


def test_a_single_draw_is_the_usual_costs() -> None:
    assert draws(1).factors([Error(("a",), 2.0)]).tolist() == [1.0]


def test_an_error_with_a_mean_moves_all_draws_by_it() -> None:
    assert draws(1).factors([Error(("a",), 2.0, 0.5)]).tolist() == pytest.approx([np.exp(0.5)])
    found = draws(16)
    assert np.allclose(found.factors([Error(("a",), 0.2, -0.3)]), found.factors([Error(("a",), 0.2)]) * np.exp(-0.3))


def test_equal_names_err_alike_and_factors_multiply() -> None:
    found = draws(16)
    a, b = found.factors([Error(("a",), 0.2)]), found.factors([Error(("b",), 0.3)])
    assert np.allclose(found.factors([Error(("a",), 0.2), Error(("b",), 0.3)]), a * b)
    assert np.allclose(found.factors([Error(("a",), 0.4)]), a**2)
    assert np.array_equal(draws(16).factors([Error(("a",), 0.2)]), a)
    assert not np.array_equal(draws(16, seed=1).factors([Error(("a",), 0.2)]), a)


@pytest.mark.parametrize(("risk", "expected"), [(Risk.MEAN, 45), (Risk.TAIL, (45 + 85) // 2), (Risk.Q80, 70), (Risk.WORST, 90)])
def test_what_many_times_come_to(risk: Risk, expected: int) -> None:
    assert cost_ns([90, 0, 80, 10, 20, 70, 60, 30, 40, 50], risk) == expected


def test_no_time_becomes_nothing_and_nothing_stays() -> None:
    assert [drawn_ns(0, 5.0), drawn_ns(1, 0.1), drawn_ns(10, 1.29)] == [0, 1, 12]


def test_links_of_hosts_and_between_them() -> None:
    topology = api.load_cluster("p100-4x4")
    far = links_between_hosts(topology)
    inside = {link for a in range(4) for b in range(4) if a != b for link in topology.route(a, b)}
    assert not far[sorted(inside)].any() and far[[link for link in topology.route(0, 4) if link not in inside]].all()
    assert links_between_hosts(cluster([1, 1], CPU)).all()


def test_tasks_err_by_what_they_are() -> None:
    """Each task's factor is that of its errors; the plan and its order stay."""
    strategy = api.classical("data_parallel", GRAPH, TOPOLOGY)
    tasks = lower(build_plan(GRAPH, strategy, TOPOLOGY), TOPOLOGY, RooflineCosts(TOPOLOGY))
    found = draws(4)
    drawn = DrawnTasks(tasks, found, links_between_hosts(TOPOLOGY))
    spreads, plan = found.spreads, tasks.plan
    for draw in range(4):
        for before, after in zip(tasks.tasks, drawn.under(draw).tasks, strict=True):
            assert (before.id, before.predecessors, before.resources, before.bytes) == (
                after.id, after.predecessors, after.resources, after.bytes,
            )  # fmt: skip
            if before.tile is not None:
                errors = spreads.of_tile(GRAPH, plan.tiles[before.tile], CPU, backward=before.kind is TaskKind.BACKWARD)
            elif before.kind is TaskKind.UPDATE:
                errors = spreads.of_update(CPU)
            else:
                assert before.kind in (TaskKind.SYNC, TaskKind.REDUCE)
                errors = spreads.of_communication(Communicated(between_hosts=True, collective=True))
            assert after.duration_ns == drawn_ns(before.duration_ns, float(found.factors(errors)[draw]))
            assert after.latency_ns < after.duration_ns


def test_compiled_code_and_the_reference_draw_alike_and_plans_share_their_draws() -> None:
    simulator = Simulator(GRAPH, TOPOLOGY, RooflineCosts(TOPOLOGY))
    plans = [api.classical(name, GRAPH, TOPOLOGY) for name in ("data_parallel", "single_device", "megatron")]
    found = draws(6)
    both = [drawn_times(simulator, plans, found, compiled=compiled) for compiled in (True, False)]
    assert both[0] == both[1]
    assert [own.usual_ns for own in both[0]] == [simulator.makespan_ns(plan) for plan in plans]
    assert reference_times_ns(simulator.run(plans[1]), found) == both[0][1].times_ns
    assert both[0][0].messages > 0 == both[0][1].messages


def test_a_device_that_is_slower_slows_every_plan() -> None:
    """With one shared error alone the ratio of two plans that only compute is the same in all draws."""
    spreads = ExampleSpreads()
    spreads._errors = lambda *names: (Error(("all",), 0.5),)  # type: ignore[method-assign]
    simulator = Simulator(GRAPH, TOPOLOGY, RooflineCosts(TOPOLOGY))
    plans = [api.classical(name, GRAPH, TOPOLOGY) for name in ("data_parallel", "single_device")]
    a, b = (np.array(own.times_ns) for own in drawn_times(simulator, plans, Draws(spreads, 8)))
    assert np.ptp(np.log(a)) > 1.0 and np.allclose(a / b, a[0] / b[0], rtol=1e-3)
