"""Micro-batches in the reference: order of passes, bubbles of a pipeline, memory in flight; the compiled simulator agrees."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from soap.cluster.topology import DeviceType, Topology
from soap.model.graph import OperatorGraph
from soap.plan.pass_order import OrderOf, all_forward_first, usual_order
from soap.plan.planning import PlanBuilder
from soap.plan.tiling import Tile
from soap.simulator.engine import Engine
from soap.simulator.lowering import lower
from soap.simulator.memory.residency import memory_over_time
from soap.simulator.reference import execution_order, simulate
from soap.simulator.simulate import Simulation
from soap.simulator.tasks import TaskKind
from soap.strategy.classical import CLASSICAL
from soap.strategy.config import Strategy
from tests.graph_builder import GraphBuilder
from tests.micro_batches import by_hand, one_f_one_b
from tests.simulator.compiled.agreement import Played, compiled_tasks
from tests.strategies import CPU, cluster

STAGES, COUNT = 4, 6


def layers(samples: int = 12) -> OperatorGraph:
    """Stages of equal work; the loss costs nothing (``Even``)."""
    g = GraphBuilder()
    x = g.input("x", samples, 2, 4)
    for stage in range(STAGES):
        x = g.linear(x, 4, name=f"layer.{stage}")
    return g.build(g.mean(x))


class Even:
    """A layer takes 1000 ns a sample each way; everything else, and communication, 1 ns: the least that a task takes."""

    description, hash = "made up for tests", "0" * 16
    updates_rows_alone = True

    def forward_ns(self, graph: OperatorGraph, tile: Tile, device: DeviceType) -> int:
        start, stop = tile.intervals[0]
        return 1000 * (stop - start) if graph.operators[tile.operator].name.startswith("layer") else 1

    def backward_ns(self, graph: OperatorGraph, tile: Tile, device: DeviceType) -> int:
        return self.forward_ns(graph, tile, device)

    def update_ns(self, *_: object, **__: object) -> int:
        return 1


GRAPH, PIPELINE = layers(), cluster([STAGES], CPU, 1e15, 0.0)
BORDERS = [f"layer.{stage}" for stage in range(1, STAGES)]
ORDERS: Mapping[str, OrderOf] = {"usual": usual_order, "gpipe": all_forward_first, "1f1b": one_f_one_b(BORDERS)}


def pipeline(count: int = COUNT) -> Strategy:
    return replace(by_hand(GRAPH, BORDERS, [(stage,) for stage in range(STAGES)]), microbatches=count)


def simulated(strategy: Strategy, order_of: OrderOf, topology: Topology = PIPELINE) -> Simulation:
    plan = PlanBuilder(GRAPH, topology, order_of=order_of).build(strategy)
    tasks = lower(plan, topology, Even())
    return Simulation(plan, tasks, simulate(tasks), 2)


def passes(simulation: Simulation, device: int) -> list[str]:
    """The layer's passes of a device by their start."""
    found = []
    for task, start in zip(simulation.tasks.tasks, simulation.schedule.start_ns.tolist(), strict=True):
        if task.tile is not None and task.resources == (device,) and "layer" in task.name:
            found.append((start, ("F" if task.kind is TaskKind.FORWARD else "B") + str(simulation.plan.tiles[task.tile].part)))
    return [text for _, text in sorted(found)]


def test_devices_run_the_passes_in_their_order() -> None:
    def ends(order: OrderOf) -> list[str]:
        return [" ".join(passes(simulated(pipeline(3), order), device)) for device in (0, STAGES - 1)]

    found = {name: ends(order) for name, order in ORDERS.items()}
    assert found["usual"] == ["F0 B0 F1 B1 F2 B2"] * 2
    assert found["gpipe"] == ["F0 F1 F2 B0 B1 B2"] * 2
    assert found["1f1b"] == ["F0 F1 F2 B0 B1 B2", "F0 B0 F1 B1 F2 B2"]


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_a_pipeline_has_the_bubble_of_the_formula(name: str) -> None:
    """(S-1)/(M+S-1), but for the tasks of 1 ns each that are no layers."""
    makespan = simulated(pipeline(), ORDERS[name]).makespan_ns
    part = 2 * 1000 * 12 // COUNT
    assert 0 <= makespan - (COUNT + STAGES - 1) * part < 100


def test_one_micro_batch_after_the_other_overlaps_nothing_in_a_pipeline() -> None:
    part = 2 * 1000 * 12 // COUNT
    assert 0 <= simulated(pipeline(), usual_order).makespan_ns - COUNT * STAGES * part < 100 + 20 * COUNT


def test_what_is_kept_lives_until_its_own_backward_pass() -> None:
    """All micro-batches' with GPipe, at most those in flight under 1F1B, and one in the usual order."""

    def kept(order: OrderOf, device: int) -> int:
        found = simulated(pipeline(), order)
        return memory_over_time(found.tasks, found.schedule, 0)[device].peak_bytes

    first = {name: kept(order, 0) for name, order in ORDERS.items()}
    assert first["usual"] < first["1f1b"] < first["gpipe"]
    assert kept(ORDERS["1f1b"], STAGES - 1) < kept(ORDERS["gpipe"], STAGES - 1)


def test_gradients_are_summed_once_behind_the_last_micro_batch() -> None:
    topology = cluster([2], CPU)
    found = simulated(replace(CLASSICAL["data_parallel"](GRAPH, topology), microbatches=3), usual_order, topology)
    tasks = found.tasks.tasks
    sums = [task for task in tasks if task.kind is TaskKind.SYNC]
    alone = simulated(CLASSICAL["data_parallel"](GRAPH, topology), usual_order, topology)
    assert [task.bytes for task in sums] == [task.bytes for task in alone.tasks.tasks if task.kind is TaskKind.SYNC]
    for task in sums:
        parts = {found.plan.tiles[tile].part for own in task.predecessors if (tile := tasks[own].tile) is not None}
        assert 2 in parts
    order = execution_order(found.tasks, found.schedule)
    assert len(order.forward) == len(order.backward) == 3 * 2 * (STAGES + 1)


@pytest.mark.parametrize("name", ORDERS)
def test_the_compiled_simulator_follows_any_order(name: str) -> None:
    strategy = pipeline()
    plan = PlanBuilder(GRAPH, PIPELINE, order_of=ORDERS[name]).build(strategy)
    tasks = lower(plan, PIPELINE, Even())
    schedule = simulate(tasks)
    engine = Engine(GRAPH, PIPELINE, Even(), order_of=ORDERS[name])
    engine.load(strategy)
    assert engine.simulate() == schedule.makespan_ns
    ends = sorted(zip((task.duration_ns for task in tasks.tasks), schedule.start_ns.tolist(), schedule.end_ns.tolist(), strict=True))
    played: Mapping[tuple[int, int], Played] = compiled_tasks(engine)
    assert sorted((own[0], own[1], own[3]) for own in played.values()) == ends
    moved = strategy.operators["layer.1"].placed((2, 1, 1, 1), (1, 0))
    assert engine.propose("layer.1", moved) == simulated(strategy.with_operator("layer.1", moved), ORDERS[name]).makespan_ns
    engine.reject()
    assert engine.simulate() == schedule.makespan_ns
