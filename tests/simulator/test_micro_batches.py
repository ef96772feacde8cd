"""Micro-batches in the reference: order of passes, bubbles of a pipeline, memory in flight; the compiled simulator agrees."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction

import pytest

from soap.cluster.topology import DeviceType, Topology
from soap.errors import StrategyError
from soap.model.graph import OperatorGraph
from soap.plan.memory_kinds import MemoryKind
from soap.plan.planning import build_plan
from soap.plan.tiling import Tile
from soap.schedules.named import parse
from soap.simulator.costs import CostModel
from soap.simulator.engine import Engine
from soap.simulator.lowering import lower
from soap.simulator.memory.sweep import memory_over_time
from soap.simulator.reference import execution_order, simulate
from soap.simulator.shared import Shared
from soap.simulator.simulate import Simulation
from soap.simulator.tasks import TaskKind
from soap.strategy.classical import CLASSICAL
from soap.strategy.config import Strategy
from soap.strategy.division import Half
from tests.graph_builder import GraphBuilder
from tests.micro_batches import by_hand
from tests.simulator.compiled.agreement import Played, compiled_tasks
from tests.simulator.examples import PlainCosts
from tests.simulator.reference_memory.as_run import as_run
from tests.simulator.reference_memory.task_spans import TaskSpans
from tests.strategies import CPU, cluster

STAGES, COUNT = 4, 6


def layers(samples: int = 12, *, entry: bool = False, auxiliary: bool = False) -> OperatorGraph:
    """Stages of equal work; the loss costs nothing (``Even``), nor does an ``entry``, with which all layers' inputs need gradients.
    ``auxiliary``: the loss is a sum of one of each stage's."""
    g = GraphBuilder()
    x = g.input("x", samples, 2, 4)
    if entry:
        x = g.linear(x, 4, name="entry")
    losses = []
    for stage in range(STAGES):
        x = g.linear(x, 4, name=f"layer.{stage}")
        losses += [g.mean(x)] if auxiliary and stage < STAGES - 1 else []
    losses.append(g.mean(x))
    return g.build(g.sum(*losses, name="sum"), terms=losses) if auxiliary else g.build(*losses)


class Even(PlainCosts):
    """A layer takes 1000 ns a sample each way; everything else, and communication, 1 ns: the least that a task takes."""

    def forward_ns(self, graph: OperatorGraph, tile: Tile, device: DeviceType) -> int:
        if not graph.operators[tile.operator].name.startswith("layer"):
            return 1
        start, stop = tile.intervals[0]
        return 1000 * (stop - start)

    def backward_ns(self, graph: OperatorGraph, tile: Tile, device: DeviceType) -> int:
        return self.forward_ns(graph, tile, device)

    def update_ns(self, *_: object, **__: object) -> int:
        return 1


class InTwo(Even):
    """Input gradients take 900 ns a sample, weight gradients 600."""

    def half_ns(self, graph: OperatorGraph, tile: Tile, device: DeviceType, half: Half) -> int:
        return self.forward_ns(graph, tile, device) * (9 if half == "I" else 6) // 10 or 1


GRAPH, PIPELINE = layers(), cluster([STAGES], CPU, 1e15, 0.0)
EVEN, ENTERED = Even(), layers(entry=True)
BORDERS = [f"layer.{stage}" for stage in range(1, STAGES)]


def pipeline(schedule: str, count: int = COUNT, stages: int = STAGES, graph: OperatorGraph = GRAPH) -> Strategy:
    return replace(by_hand(graph, BORDERS, [(stage,) for stage in range(stages)], schedule), microbatches=count)


def simulated(
    strategy: Strategy, topology: Topology = PIPELINE, *, free: bool = False, graph: OperatorGraph = GRAPH, costs: CostModel = EVEN
) -> Simulation:
    """``free``: all but the layers takes no time at all, which no cost model can say."""
    plan = build_plan(graph, strategy, topology)
    tasks = lower(plan, topology, costs)
    if free:
        timed = (replace(task, duration_ns=0) if task.tile is None or "layer" not in task.name else task for task in tasks.tasks)
        tasks = replace(tasks, tasks=tuple(timed))
    return Simulation(plan, tasks, simulate(tasks), 2)


def passes(simulation: Simulation, device: int) -> list[str]:
    """The layer's passes of a device by their start."""
    found = []
    for task, start in zip(simulation.tasks.tasks, simulation.schedule.start_ns.tolist(), strict=True):
        if task.tile is not None and task.resources == (device,) and "layer" in task.name:
            kind = {TaskKind.FORWARD: "F", TaskKind.WEIGHTS: "W"}.get(task.kind, "B")
            found.append((start, kind + str(simulation.plan.tiles[task.tile].part)))
    return [text for _, text in sorted(found)]


def test_devices_run_the_passes_in_their_order() -> None:
    def ends(schedule: str) -> list[str]:
        return [" ".join(passes(simulated(pipeline(schedule, 3)), device)) for device in (0, STAGES - 1)]

    assert ends("accumulation") == ["F0 B0 F1 B1 F2 B2"] * 2
    assert ends("gpipe") == ["F0 F1 F2 B0 B1 B2"] * 2
    assert ends("1f1b") == ["F0 F1 F2 B0 B1 B2", "F0 B0 F1 B1 F2 B2"]


@pytest.mark.parametrize(
    ("schedule", "stages", "parts"),
    [
        ("gpipe", 4, COUNT + 3),
        ("1f1b", 4, COUNT + 3),
        ("interleaved:2", 2, 2 * COUNT + 1),
        ("gpipe:2", 2, 2 * COUNT + 1),
        ("accumulation", 4, 4 * COUNT),
    ],
)
def test_a_pipeline_has_the_bubble_of_the_formula(schedule: str, stages: int, parts: int) -> None:
    """(S-1)/(M+S-1), and with v chunks on each stage (S-1)/(vM+S-1), exactly; nothing overlaps in accumulation."""
    found = simulated(pipeline(schedule, stages=stages), free=True)
    part_ns = 2 * 1000 * 12 // COUNT
    assert found.makespan_ns == parts * part_ns
    for device in range(stages):
        idle_ns = found.makespan_ns - found.busy_ns[PIPELINE.devices[device].name]
        assert Fraction(idle_ns, found.makespan_ns) == Fraction(parts - COUNT * STAGES // stages, parts)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_losses_of_each_stage_cost_no_time(schedule: str) -> None:
    """They are added up behind all passes, and no backward pass waits for that."""
    graph = layers(auxiliary=True)
    one, several = (simulated(pipeline(schedule, graph=own), free=True, graph=own) for own in (GRAPH, graph))
    assert several.makespan_ns == one.makespan_ns
    assert [passes(several, device) for device in range(STAGES)] == [passes(one, device) for device in range(STAGES)]
    ends = dict(zip((task.name for task in several.tasks.tasks), several.schedule.end_ns.tolist(), strict=True))
    (last,) = (name for name in ends if name.startswith("forward sum"))
    assert not any("backward sum" in name for name in ends)
    on_last = [task.name for task in several.tasks.tasks if task.tile is not None and task.resources == (STAGES - 1,)]
    assert ends[last] == max(ends[name] for name in on_last)
    engine = Engine(Shared(graph, PIPELINE, EVEN))
    engine.load(pipeline(schedule, graph=graph))
    assert engine.simulate() == simulated(pipeline(schedule, graph=graph), graph=graph).makespan_ns


@pytest.mark.parametrize("count", [STAGES, COUNT])
def test_zero_bubble_has_the_bubble_and_the_memory_of_its_paper(count: int) -> None:
    """Idle are (S - 1)(T_F + T_B - T_W) of each stage, where T_B is of input gradients: 2401.10241, table 2. What a stage has begun and not
    yet ended are at most S micro-batches, as many as stage 0 has under 1F1B."""
    found = simulated(pipeline("zb-h1", count, graph=ENTERED), free=True, graph=ENTERED, costs=InTwo())
    each = 12 // count
    idle_ns = (STAGES - 1) * (1000 + 900 - 600) * each
    assert found.makespan_ns == count * (1000 + 900 + 600) * each + idle_ns
    spans = TaskSpans(found.tasks, as_run(found.tasks, found.schedule))
    for stage in range(STAGES):
        assert found.makespan_ns - found.busy_ns[PIPELINE.devices[stage].name] == idle_ns
        lives = [(spans.forward[tile][0], spans.last(tile)) for tile in spans.weights if found.plan.tiles[tile].device == stage]
        assert max(sum(a <= start < b for a, b in lives) for start, _ in lives) == STAGES


def test_weight_gradients_follow_in_the_order_of_the_schedule() -> None:
    """The first layer's input needs no gradient, so that it has weight gradients alone, where these are due."""
    found = simulated(pipeline("zb-h1", 4))
    assert " ".join(passes(found, 0)) == "F0 F1 F2 F3 B0 B1 B2 B3"
    assert " ".join(passes(found, 1)) == "F0 F1 F2 B0 F3 B1 W0 B2 W1 B3 W2 W3"
    assert {task.name for task in found.tasks.tasks if task.kind is TaskKind.WEIGHTS and task.resources == (3,)} == {
        f"weights layer.3[{part}] of micro-batch {part}" for part in range(4)
    }
    sums = [task for task in found.tasks.tasks if task.kind is TaskKind.UPDATE]
    last = {found.tasks.tasks[task.predecessors[-1]].kind for task in sums if task.resources[0] in range(1, STAGES)}
    assert last == {TaskKind.WEIGHTS}


def test_what_is_kept_lives_until_its_own_backward_pass() -> None:
    """All micro-batches' with GPipe, min(M, S - s) under 1F1B, and one in the usual order: what stage s keeps at its peak in excess of a
    stage's with one micro-batch in flight is that of the others."""

    def kept(schedule: str, count: int = COUNT) -> list[int]:
        found = simulated(pipeline(schedule, count), free=True)
        return [curve.at_peak[MemoryKind.KEPT] for curve in memory_over_time(found.tasks, found.schedule, 0)[:STAGES]]

    one, gpipe, usual = kept("1f1b"), kept("gpipe"), kept("accumulation")
    each = [(most - least) // (COUNT - 1) for most, least in zip(gpipe, usual, strict=True)]
    assert all(each)
    for stage in range(STAGES):
        assert (one[stage] - usual[stage]) == each[stage] * (min(COUNT, STAGES - stage) - 1), stage


def test_gradients_are_summed_once_behind_the_last_micro_batch() -> None:
    topology = cluster([2], CPU)
    found = simulated(replace(CLASSICAL["data_parallel"](GRAPH, topology), microbatches=3), topology)
    tasks = found.tasks.tasks
    sums = [task for task in tasks if task.kind is TaskKind.SYNC]
    alone = simulated(CLASSICAL["data_parallel"](GRAPH, topology), topology)
    assert [task.bytes for task in sums] == [task.bytes for task in alone.tasks.tasks if task.kind is TaskKind.SYNC]
    for task in sums:
        parts = {found.plan.tiles[tile].part for own in task.predecessors if (tile := tasks[own].tile) is not None}
        assert 2 in parts
    order = execution_order(found.tasks, found.schedule)
    assert len(order.forward) == len(order.backward) == 3 * 2 * (STAGES + 1)


@pytest.mark.parametrize("schedule", ["accumulation", "gpipe", "1f1b", "interleaved:2", "zb-h1", "zb-v"])
def test_the_compiled_simulator_follows_any_schedule(schedule: str) -> None:
    topology, stages = cluster([STAGES + 1], CPU, 1e15, 0.0), STAGES // parse(schedule).chunks
    strategy = pipeline(schedule, stages=stages)
    tasks = lower(build_plan(GRAPH, strategy, topology), topology, InTwo())
    expected = simulate(tasks)
    engine = Engine(Shared(GRAPH, topology, InTwo()))
    engine.load(pipeline("gpipe:2", 3, stages=2))  # of which nothing is left
    engine.load(strategy)
    assert engine.simulate() == expected.makespan_ns
    ends = sorted(zip((task.duration_ns for task in tasks.tasks), expected.start_ns.tolist(), expected.end_ns.tolist(), strict=True))
    played: Mapping[tuple[int, int], Played] = compiled_tasks(engine)
    assert sorted((own[0], own[1], own[3]) for own in played.values()) == ends
    wider = strategy.operators["layer.1"].placed((2, 1, 1, 1), (1, STAGES))
    assert engine.propose("layer.1", wider) == simulated(strategy.with_operator("layer.1", wider), topology, costs=InTwo()).makespan_ns
    engine.reject()
    assert engine.simulate() == expected.makespan_ns
    with pytest.raises(StrategyError, match=r"operator 'layer.1' of stage 1 runs on device 0, as 'layer.0' of stage 0 does"):
        engine.propose("layer.1", wider.placed((2, 1, 1, 1), (1, 0)))
