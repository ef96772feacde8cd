"""Operators that are recomputed: the tasks of their second runs, when these come, and what memory that saves."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given

from soap.cluster.topology import Topology
from soap.errors import StrategyError
from soap.model.graph import OperatorGraph
from soap.simulator.lowering import build_plan, lower
from soap.simulator.memory.sweep import memory_over_time
from soap.simulator.reference import execution_order, simulate
from soap.simulator.tasks import Schedule, TaskGraph, TaskKind
from soap.strategy.config import OpConfig, Strategy
from soap.strategy.recomputation import GATHERING, LIGHT, STAYS, with_marks
from tests.graph_builder import GraphBuilder
from tests.simulator.examples import (
    PointCosts,
    batch_split,
    beside_a_barrier,
    by_name,
    chain,
    finish,
    on,
    pairwise_cluster,
    predecessors,
    strategy,
    units,
)
from tests.simulator.reference_memory.running import find_recomputation
from tests.strategies import cases

TWO = pairwise_cluster(1, 1)


def marked(chosen: Strategy, *names: str) -> Strategy:
    """The strategy with these operators recomputed."""
    return with_marks(chosen, names, True)


def lowered(graph: OperatorGraph, chosen: Strategy, topology: Topology = TWO) -> TaskGraph:
    return lower(build_plan(graph, chosen, topology), topology, PointCosts())


def spans(tasks: TaskGraph, schedule: Schedule) -> dict[str, tuple[int, int]]:
    ends = zip(tasks.tasks, schedule.start_ns.tolist(), schedule.end_ns.tolist(), strict=True)
    return {task.name: (start, end) for task, start, end in ends}


def test_a_run_waits_for_the_backward_pass_behind_it() -> None:
    graph = chain(4, 2, 3, 2, 5)
    tasks = lowered(graph, marked(batch_split(graph, [0]), "l1", "l2"))
    assert predecessors(tasks, "need l2[0]") == {"backward l3[0]"}
    assert predecessors(tasks, "need l1[0]") == {"need l2[0]"}
    assert predecessors(tasks, "recompute l1[0]") == {"forward l1[0]", "need l1[0]"}
    assert predecessors(tasks, "recompute l2[0]") == {"forward l2[0]", "need l2[0]", "recompute l1[0]"}
    assert predecessors(tasks, "backward l2[0]") == {"forward l2[0]", "recompute l2[0]", "backward l3[0]"}
    assert predecessors(tasks, "backward l1[0]") == {"forward l1[0]", "recompute l1[0]", "backward l2[0]"}
    assert "recompute l3[0]" not in by_name(tasks)
    again, first = by_name(tasks)["recompute l1[0]"], by_name(tasks)["forward l1[0]"]
    assert (again.duration_ns, again.resources, again.tile) == (first.duration_ns, first.resources, first.tile)
    assert all(max(task.predecessors, default=-1) < place for place, task in enumerate(tasks.tasks))


def test_what_is_marked_alone_adds_its_forward_pass_to_the_time() -> None:
    graph = chain(4, 2, 3, 2, 5)
    usual = batch_split(graph, [0])
    times = [simulate(lowered(graph, chosen)).makespan_ns for chosen in (usual, marked(usual, "l1", "l2"))]
    assert units(times[1] - times[0] - 2) == 4 * 2 * 3 + 4 * 3 * 2  # a need takes a nanosecond


def test_a_value_from_another_device_is_kept() -> None:
    """l2 reads l1 from elsewhere, so both are runs of their own; l1 is needed when its gradient comes back."""
    graph = chain(4, 2, 3, 2)
    split = strategy(l1=on(0, degrees=(1, 1, 1)), l2=on(1, degrees=(1, 1, 1)), loss=on(1, degrees=(1,)))
    tasks = lowered(graph, marked(split, "l1", "l2"))
    assert not find_recomputation(tasks.plan, range(len(tasks.plan.tiles))).links
    assert predecessors(tasks, "recompute l2[0]") == {"forward l2[0]", "need l2[0]"}
    assert predecessors(tasks, "need l1[0]") == {"transfer gradient of l1[0:4,0:3] 1->0"}
    moved = [task.name for task in tasks.tasks if task.kind is TaskKind.TRANSFER]
    assert len(moved) == 2  # there and back, once


def test_a_sum_is_kept() -> None:
    """l1 is a sum of two devices' parts: it is not summed again, and l2 reads it as it is."""
    graph = chain(4, 2, 3, 2)
    one = on(0, degrees=(1, 1, 1))
    tasks = lowered(graph, marked(strategy(l1=on(0, 1, degrees=(1, 2, 1)), l2=one, loss=on(0, degrees=(1,))), "l1", "l2"))
    assert predecessors(tasks, "recompute l2[0]") == {"forward l2[0]", "need l2[0]"}
    for tile in range(2):
        assert predecessors(tasks, f"need l1[{tile}]") == {"reduce gradient of l1[0:4,0:3]#0"}
    assert sum(task.kind is TaskKind.REDUCE for task in tasks.tasks) == 2


def test_a_value_is_needed_by_the_first_reader_that_the_backward_pass_meets() -> None:
    """v -> u -> t and v -> r -> x -> t, all marked but x: t needs v again before x, and so r, have a gradient."""
    g = GraphBuilder()
    v = g.linear(g.input("given", 4, 2), 2, bias=False, name="v")
    u, r = g.elementwise(v, name="u"), g.elementwise(v, name="r")
    x = g.elementwise(r, name="x")
    graph = finish(g, g.elementwise(u, x, name="t"))
    tasks = lowered(graph, marked(batch_split(graph, [0]), "v", "u", "r", "t"))
    assert predecessors(tasks, "need v[0]") == {"need u[0]"} and predecessors(tasks, "need u[0]") == {"need t[0]"}
    assert predecessors(tasks, "need r[0]") == {"backward x[0]"}
    assert len(set(spans(tasks, simulate(tasks)))) == len(tasks.tasks)


def test_with_micro_batches_the_first_reader_is_that_of_the_first_action() -> None:
    """``before`` has a higher position than ``m1``, but its backward pass comes behind that of the barrier: to wait for it would be a
    circle, as it waits for ``behind``, which reads ``v`` again."""
    graph = beside_a_barrier()
    usual = marked(batch_split(graph, [0]), "v", "behind")
    assert predecessors(lowered(graph, usual), "need v[0]") == {"backward before[0]"}
    tasks = lowered(graph, replace(usual, microbatches=2))
    times = spans(tasks, simulate(tasks))
    for part in parts(2):
        assert predecessors(tasks, f"need behind{part}") == {f"backward m1{part}"}
        assert predecessors(tasks, f"need v{part}") == {f"need behind{part}"}
        assert f"recompute v{part}" in predecessors(tasks, f"recompute behind{part}")
        assert times[f"backward behind{part}"][1] <= times["backward before[0] of micro-batch 0"][0]


def test_gradients_that_come_together_come_with_the_last_reader() -> None:
    """From device 1 comes the gradient of ``behind`` alone, before ``before`` has one; or also that of the barrier's reader, behind it."""
    graph, back = beside_a_barrier(), "transfer gradient of v[{}:{},0:2] 1->0 of micro-batch {}"
    alone = marked(replace(batch_split(graph, [0]), microbatches=2), "v").with_operator("behind", on(1, degrees=(1, 1)))
    both = alone.with_operator("batch_mean1", on(1, degrees=(1, 1)))
    for number, part in enumerate(parts(2)):
        assert predecessors(lowered(graph, alone), f"need v{part}") == {back.format(2 * number, 2 * number + 2, number)}
        assert predecessors(lowered(graph, both), f"need v{part}") == {f"backward before{part}"}


def parts(count: int) -> list[str]:
    """Of an operator with one tile, what follows its name in those of tasks."""
    return [f"[{part}] of micro-batch {part}" for part in range(count)]


def held_before_the_loss(graph: OperatorGraph, chosen: Strategy) -> int:
    tasks = lowered(graph, chosen)
    schedule = simulate(tasks)
    curve = memory_over_time(tasks, schedule, 0)[0]
    return int(curve.bytes_held[curve.times_ns <= spans(tasks, schedule)["forward loss[0]"][0]][-1])


def test_what_is_recomputed_is_not_there_between() -> None:
    """A layer keeps as much inside as it makes. What an unmarked one reads stays."""
    graph = chain(8, 2, 64, 2, 64, 2)
    usual = batch_split(graph, [0])
    wide, narrow, held = 8 * 64 * 4, 8 * 2 * 4, held_before_the_loss(graph, usual)
    assert held - held_before_the_loss(graph, marked(usual, "l1", "l3")) == 2 * wide  # l2 and l4 read what they make
    assert held - held_before_the_loss(graph, marked(usual, "l1", "l2")) == 2 * wide + narrow  # inside both, and between them
    all_four = marked(usual, "l1", "l2", "l3", "l4")
    assert held - held_before_the_loss(graph, all_four) == 2 * (wide + narrow) + 2 * wide + narrow  # but what the loss reads


def light(chosen: Strategy, *names: str) -> Strategy:
    """The strategy with these operators recomputed but for their products."""
    return with_marks(chosen, names, LIGHT)


def test_a_light_run_reads_what_is_made_again_and_gives_what_it_has_kept() -> None:
    """l2 keeps what it makes: l3 does not wait for its second run, and l1, which it reads, is needed when l2 has a gradient."""
    graph = chain(4, 2, 3, 2, 5, 2)
    usual = batch_split(graph, [0])
    tasks = lowered(graph, light(marked(usual, "l1", "l3"), "l2"))
    assert predecessors(tasks, "need l2[0]") == {"backward l3[0]"} and predecessors(tasks, "need l1[0]") == {"need l2[0]"}
    assert predecessors(tasks, "recompute l2[0]") == {"forward l2[0]", "need l2[0]", "recompute l1[0]"}
    assert predecessors(tasks, "recompute l3[0]") == {"forward l3[0]", "need l3[0]"}
    assert units(by_name(tasks)["recompute l2[0]"].duration_ns) == 1 < units(by_name(tasks)["forward l2[0]"].duration_ns)
    found = find_recomputation(tasks.plan, range(len(tasks.plan.tiles)))
    assert found.light == {1} and found.links == {1: (0,)} and found.run == {0: 0, 1: 1, 2: 2}


def test_what_a_light_run_reads_is_not_there_between() -> None:
    """Selective recomputation: of l1, which is recomputed, and l2, which is light, only what l2 makes stays. Without it l2 keeps l1."""
    graph = chain(8, 2, 64, 2, 64, 2)
    usual = batch_split(graph, [0])
    wide = 8 * 64 * 4
    alone, both = marked(usual, "l1"), light(marked(usual, "l1"), "l2")
    assert held_before_the_loss(graph, alone) - held_before_the_loss(graph, both) == wide  # how much of l2 a second run needs is not known


def test_without_a_product_all_of_an_operator_runs_again() -> None:
    """l2, which is no product here, keeps what it makes, but l1, which only l2 reads, is made again for it."""
    graph = chain(4, 2, 3, 2, 5)
    operators = tuple(replace(op, kind="gelu") if op.name == "l2" else op for op in graph.operators)
    graph = OperatorGraph(graph.name, operators, graph.tensors, graph.loss)
    tasks = lowered(graph, light(marked(batch_split(graph, [0]), "l1"), "l2"))
    again, first = (by_name(tasks)[f"{kind} l2[0]"].duration_ns for kind in ("recompute", "forward"))
    assert again == first and predecessors(tasks, "recompute l2[0]") == {"forward l2[0]", "need l2[0]", "recompute l1[0]"}


def test_levels_are_six() -> None:
    graph = chain(4, 2, 3)
    with pytest.raises(StrategyError, match="recompute 6: expected one of 0, 1, 2, 3, 4, 5"):
        light(batch_split(graph, [0]), "l1").with_operator("l1", OpConfig((1, 1, 1), (0,), 1, 6))


def test_the_loss_may_be_recomputed() -> None:
    graph = chain(4, 2, 3)
    tasks = lowered(graph, marked(batch_split(graph, [0, 1]), "l1", "loss"))
    assert predecessors(tasks, "need loss[1]") == {"reduce loss[]#0"} and predecessors(tasks, "need l1[1]") == {"need loss[1]"}


def test_what_must_not_repeat_is_refused() -> None:
    g = GraphBuilder()
    opaque = g.opaque(g.linear(g.input("x", 4, 4), 4, name="first"))
    rows = g.embedding(g.input("ids", 4, 1, dtype="int64"), 6, 4, weight=g.parameter("table", 6, 4), name="rows")
    graph = g.build(g.mean(g.elementwise(rows, name="act")), None)
    del opaque
    usual = Strategy({op.name: on(0, degrees=(1,) * len(op.factors)) for op in graph.operators})
    found = {op.name: op.kind for op in graph.operators}
    expected = {"rows": "looks rows up in the sparse parameter 'table'", "first": "no backward pass"}
    for name in found:
        if name in expected:
            with pytest.raises(StrategyError, match=f"operator '{name}' is marked to be recomputed, but .*{expected[name]}"):
                marked(usual, name).validate(graph, 2)
    marked(usual, "act").validate(graph, 2)


@given(cases(servers=True))
def test_every_tile_with_a_backward_pass_runs_again_before_it(case: tuple[OperatorGraph, Topology, Strategy]) -> None:
    graph, topology, chosen = case
    tasks = lower(build_plan(graph, chosen, topology), topology, PointCosts())
    schedule = simulate(tasks)
    times, plan = spans(tasks, schedule), tasks.plan
    names = {(task.kind, task.tile): task.name for task in tasks.tasks if task.tile is not None}
    active = {tile for kind, tile in names if kind is TaskKind.BACKWARD}
    again = {tile for kind, tile in names if kind is TaskKind.RECOMPUTE}
    level = {tile: chosen.operators[plan.operator(plan.tiles[tile]).name].recompute for tile in active}
    assert again == {tile for tile in active if level[tile] not in (STAYS, GATHERING[STAYS])}
    for tile in again:
        start, end = times[names[TaskKind.RECOMPUTE, tile]]
        assert times[names[TaskKind.FORWARD, tile]][1] <= start and end <= times[names[TaskKind.BACKWARD, tile]][0]
    recomputation = find_recomputation(plan, active)
    assert recomputation.light == {tile for tile in again if level[tile] in (LIGHT, GATHERING[LIGHT])}
    for tile, makers in recomputation.links.items():
        assert not recomputation.light & set(makers)
        assert all(times[names[TaskKind.RECOMPUTE, maker]][1] <= times[names[TaskKind.RECOMPUTE, tile]][0] for maker in makers)
    order = execution_order(tasks, schedule)
    assert sorted(order.forward) == list(range(len(plan.tiles))) and set(order.backward) == active
