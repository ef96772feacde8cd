"""Memory is predicted of the order in which ranks run: segments as wholes, in the turns of the runtime's program."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import event, given

from soap.cluster.topology import Topology
from soap.model.graph import OperatorGraph
from soap.runtime.program.actions import ActionKind
from soap.runtime.program.program import compile_program
from soap.simulator.reference import execution_order
from soap.simulator.tasks import Schedule, TaskGraph, TaskKind
from soap.strategy.config import Strategy
from tests.extent import MANY
from tests.graph_builder import GraphBuilder
from tests.simulator.examples import on, pairwise_cluster, strategy
from tests.simulator.reference_memory.as_run import as_run
from tests.simulator.test_residency import played
from tests.strategies import cases

PASSES = {ActionKind.TILE: TaskKind.FORWARD, ActionKind.RECOMPUTE: TaskKind.RECOMPUTE, ActionKind.SEGMENT: TaskKind.BACKWARD}


def passes_of(tasks: TaskGraph, schedule: Schedule) -> list[list[tuple[TaskKind, int]]]:
    """By device: (kind, tile) of all passes, in the order in which they run."""
    found: list[list[tuple[int, TaskKind, int]]] = [[] for _ in range(tasks.plan.device_count)]
    for task, start in zip(tasks.tasks, schedule.start_ns.tolist(), strict=True):
        if task.tile is not None and task.kind in PASSES.values():
            found[tasks.plan.tiles[task.tile].device].append((start, task.kind, task.tile))
    return [[(kind, tile) for _, kind, tile in sorted(own, key=lambda each: each[0])] for own in found]


@pytest.mark.slow
@MANY
@given(cases(servers=True))
def test_passes_run_in_the_order_of_the_program(case: tuple[OperatorGraph, Topology, Strategy]) -> None:
    graph, topology, chosen = case
    tasks, schedule = played(graph, chosen, topology)
    run = as_run(tasks, schedule)
    assert (run.schedule.end_ns > 0).all()  # nothing waits for itself
    for waits, task, start in zip(run.waits, tasks.tasks, run.schedule.start_ns.tolist(), strict=True):
        assert all(run.schedule.end_ns[other] <= start for other in waits)
        if task.tile is not None or task.kind in (TaskKind.TRANSFER, TaskKind.EXCHANGE, TaskKind.REDUCE):  # those wait for what they need
            assert {*task.predecessors} <= {*waits}
    if chosen.microbatches > 1:
        return
    event("as simulated" if run.schedule is schedule else "in another order")
    program = compile_program(tasks.plan, execution_order(tasks, schedule))
    expected: list[list[tuple[TaskKind, int]]] = [[] for _ in range(topology.device_count)]
    for action in (*program.forward, *program.backward):
        if action.kind is ActionKind.TILE and tasks.plan.tiles[action.subject].operator not in graph.epilogue:
            expected[tasks.plan.tiles[action.subject].device].append((TaskKind.FORWARD, action.subject))
        elif action.kind in (ActionKind.RECOMPUTE, ActionKind.SEGMENT):
            tiles = [tile for tile in program.segments[action.subject].tiles if tile in program.activity.tiles]
            own = tiles if action.kind is ActionKind.RECOMPUTE else tiles[::-1]
            expected[program.segments[action.subject].device] += [(PASSES[action.kind], tile) for tile in own]
    of_both = {own for device in passes_of(tasks, schedule) for own in device} & {own for device in expected for own in device}
    for found, own in zip(passes_of(tasks, run.schedule), expected, strict=True):
        if any(marked in graph.epilogue for marked in tasks.plan.recomputed_operators):  # then a second run may come with it
            found, own = ([(kind, tile) for kind, tile in each if kind is not TaskKind.RECOMPUTE] for each in (found, own))
        assert [each for each in found if each in of_both] == [each for each in own if each in of_both]


def test_a_segment_is_not_left_for_another() -> None:
    """Two branches on device 1 read layers of device 0. Tiles take turns; ranks first finish the segment that begins with layer b1."""
    g = GraphBuilder()
    x, ends = g.input("x", 4, 8), []
    for branch in "ab":
        value = x
        for layer in range(3):
            value = g.linear(value, 8, name=f"{branch}{layer}")
        ends.append(g.mean(value, name=f"{branch}3"))
    graph = g.build(g.elementwise(*ends, name="sum"))
    configs = {op.name: on(0 if op.name in ("a0", "b0") else 1, degrees=(1,) * len(op.factors)) for op in graph.operators}
    tasks, schedule = played(graph, strategy(**configs), pairwise_cluster(1, 1))
    run, names = as_run(tasks, schedule), [graph.operators[tile.operator].name for tile in tasks.plan.tiles]
    passes = [passes_of(*own)[1] for own in ((tasks, schedule), (tasks, run.schedule))]
    simulated, kept = ([names[tile] for kind, tile in own if kind is TaskKind.BACKWARD] for own in passes)
    assert simulated == ["sum", "b3", "a3", "b2", "a2", "b1", "a1"]
    assert kept == ["sum", "b3", "b2", "a3", "b1", "a2", "a1"]


def test_a_term_of_the_loss_goes_back_where_ranks_begin() -> None:
    """Both devices compute term m, and device 1 adds up the terms. Ranks go back from replica 0, on device 0. The simulation does so too,
    though device 1 has the number at hand: no gradient of what m reads travels, and device 0 has m's second run."""
    g = GraphBuilder()
    value = g.linear(g.input("x", 4, 8), 8, name="a")
    ends = [g.mean(value, name=name) for name in "mn"]
    graph = g.build(g.sum(*ends, name="sum"), terms=ends)
    configs = {op.name: on(0, degrees=(1,) * len(op.factors)) for op in graph.operators}
    configs["m"] = replace(on(0, 1, degrees=configs["m"].degrees, replicas=2), recompute=1)
    tasks, schedule = played(graph, strategy(**{**configs, "sum": on(1, degrees=())}), pairwise_cluster(1, 1))
    names = [graph.operators[tile.operator].name for tile in tasks.plan.tiles]
    back = [[(kind, names[tile]) for kind, tile in own if kind is not TaskKind.FORWARD] for own in passes_of(tasks, schedule)]
    second = [(TaskKind.RECOMPUTE, "m"), *((TaskKind.BACKWARD, name) for name in "mna")]
    assert (sorted(back[0]), back[1]) == (sorted(second), [(TaskKind.BACKWARD, "sum")])
    moved = {task.name: task.bytes for task in tasks.tasks if task.kind is TaskKind.TRANSFER}
    numbers = {f"transfer {what}{end}[] {ends}": 4 for end in "mn" for what, ends in (("", "0->1"), ("gradient of ", "1->0"))}
    assert moved == {"transfer a[0:4,0:8] 0->1": 128, **numbers}
    program = compile_program(tasks.plan, execution_order(tasks, schedule))
    assert [tasks.plan.tiles[tile].device for tile in program.activity.tiles if names[tile] == "m"] == [0]
