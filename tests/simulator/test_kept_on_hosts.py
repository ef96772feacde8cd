"""Operators that offload what they keep: the tasks of their copies, when these come back, and what memory that takes where."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

import pytest
from hypothesis import given

from soap.cluster.host_links import host_link
from soap.cluster.topology import Topology
from soap.errors import StrategyError
from soap.model.graph import OperatorGraph
from soap.plan.marks.offload import AWAY, BACK, come_back_with
from soap.plan.plan import tile_task_name
from soap.simulator.folding import fold
from soap.simulator.lowering import build_plan, lower
from soap.simulator.memory.hosts import host_use
from soap.simulator.memory.sizes import away_bytes
from soap.simulator.memory.sweep import memory_over_time
from soap.simulator.reference import simulate
from soap.simulator.tasks import TaskGraph, TaskKind
from soap.strategy.config import OpConfig, Strategy
from soap.strategy.offloading import away, offloadable, with_offload
from soap.strategy.recomputation import LIGHT, RECOMPUTED, with_marks
from tests.graph_builder import GraphBuilder, transformer
from tests.simulator.examples import PointCosts, batch_split, by_name, chain, finish, on, predecessors, strategy
from tests.simulator.reference_memory.any_order import memory_use
from tests.simulator.test_recomputation import spans
from tests.strategies import CPU, GPU, cases, cluster

GPUS, CPUS = cluster([2], GPU), cluster([2], CPU)


def lowered(graph: OperatorGraph, chosen: Strategy, topology: Topology = GPUS) -> TaskGraph:
    return lower(build_plan(graph, chosen, topology), topology, PointCosts())


@pytest.mark.parametrize("topology", [GPUS, CPUS], ids=["gpu", "cpu"])
def test_a_run_comes_back_behind_the_backward_pass_after_it(topology: Topology) -> None:
    graph = chain(4, 2, 3, 2, 5)
    tasks = lowered(graph, with_offload(batch_split(graph, [0]), ["l1", "l2"], True), topology)
    assert predecessors(tasks, "need l2[0]") == {"backward l3[0]"} and predecessors(tasks, "need l1[0]") == {"need l2[0]"}
    link, plan = host_link(topology, 0), tasks.plan
    for name in ("l1", "l2"):
        down, up = by_name(tasks)[f"kept to host {name}[0]"], by_name(tasks)[f"kept from host {name}[0]"]
        assert predecessors(tasks, down.name) == {f"forward {name}[0]"}
        assert predecessors(tasks, up.name) == {down.name, f"need {name}[0]"}
        assert up.name in predecessors(tasks, f"backward {name}[0]")
        size = away_bytes(graph, plan.tiles[plan.first_tile[graph.index[name]]])
        copied_ns = ceil((link.latency_seconds + size / link.bandwidth_bytes_per_second) * 1e9)
        assert size and down.duration_ns == up.duration_ns == copied_ns and (down.bytes, up.bytes) == (0, 0)
        assert (down.resources == up.resources == (0,)) == (topology is CPUS) and down.kind is up.kind is TaskKind.COPY
    assert not any("l3" in task.name for task in tasks.tasks if task.kind is TaskKind.COPY)
    first = come_back_with(plan, range(len(plan.tiles)))
    assert first == {plan.first_tile[graph.index[name]]: plan.first_tile[graph.index["l2"]] for name in ("l1", "l2")}


def test_copies_run_beside_the_device() -> None:
    """All but the first copy back of a run are made while others compute."""
    graph = chain(4, 2, 64, 64, 64, 5)
    chosen = with_offload(batch_split(graph, [0]), ["l1", "l2", "l3"], True)
    tasks = lowered(graph, chosen)
    times = spans(tasks, simulate(tasks))
    assert times["kept to host l1[0]"][0] == times["forward l2[0]"][0]
    assert times["kept from host l3[0]"][1] == times["backward l3[0]"][0]
    assert times["kept from host l2[0]"][1] < times["backward l3[0]"][1] == times["backward l2[0]"][0]


def test_what_another_reader_needs_first_comes_back_for_it() -> None:
    """v -> u -> w -> t and v -> x -> t; the backward pass comes to x, which stays, before w, behind which it needs u."""
    g = GraphBuilder()
    v = g.linear(g.input("given", 4, 2), 2, bias=False, name="v")
    w = g.elementwise(g.elementwise(v, name="u"), name="w")
    graph = finish(g, g.elementwise(w, g.elementwise(v, name="x"), name="t"))
    tasks = lowered(graph, with_offload(batch_split(graph, [0]), ["v", "u"], True))
    assert predecessors(tasks, "need v[0]") == {"backward x[0]"} and predecessors(tasks, "need u[0]") == {"backward w[0]"}
    number = {name: tasks.plan.first_tile[graph.index[name]] for name in ("v", "u")}
    assert come_back_with(tasks.plan, range(len(tasks.plan.tiles))) == {number[name]: number[name] for name in ("v", "u")}


def test_a_value_for_another_device_ends_a_run() -> None:
    graph = chain(4, 2, 3, 2)
    split = strategy(l1=on(0, degrees=(1, 1, 1)), l2=on(1, degrees=(1, 1, 1)), loss=on(1, degrees=(1,)))
    tasks = lowered(graph, with_offload(split, ["l1", "l2"], True))
    assert predecessors(tasks, "need l1[0]") == {"transfer gradient of l1[0:4,0:3] 1->0"}


def test_recomputed_and_offloading_operators_do_not_count_for_each_other() -> None:
    graph = chain(4, 2, 3, 2, 5)
    for level in (RECOMPUTED, LIGHT):
        one = with_marks(with_offload(batch_split(graph, [0]), ["l1"], True), ["l2"], level)
        other = with_offload(with_marks(batch_split(graph, [0]), ["l1"], level), ["l2"], True)
        for chosen in (one, other):
            assert predecessors(lowered(graph, chosen), "need l1[0]") == {"backward l2[0]"}


def test_memory_of_devices_and_hosts() -> None:
    """Between the copies a GPU has nothing of it, but its host; a CPU is its own host, and saves nothing."""
    graph = chain(8, 2, 64, 64, 64, 2)
    usual, names = batch_split(graph, [0]), ["l1", "l2", "l3"]
    chosen = with_offload(usual, names, True)
    for topology in (GPUS, CPUS):
        tasks, plain = lowered(graph, chosen, topology), lowered(graph, usual, topology)
        sizes = [away_bytes(graph, tile) for tile in tasks.plan.tiles if graph.operators[tile.operator].name in names]
        schedule, other = simulate(tasks), simulate(plain)
        curve, whole = memory_over_time(tasks, schedule, 0)[0], memory_over_time(plain, other, 0)[0]
        at, then = spans(tasks, schedule)["forward loss[0]"][0], spans(plain, other)["forward loss[0]"][0]
        held, kept = (int(own.bytes_held[own.times_ns <= moment][-1]) for own, moment in ((curve, at), (whole, then)))
        saved = kept - held if topology is GPUS else kept + sum(sizes) - held
        inside = [3 * 8 * 64 * 4]  # each keeps as much as it makes
        assert saved >= sum(inside) and (held < kept) == (topology is GPUS)
        copies = 1 if topology is GPUS else 2
        bounds = [memory_use(own.plan, 0)[0].activations for own in (tasks, plain)]
        assert bounds[0] - bounds[1] == copies * sum(sizes)
        assert host_use(tasks.plan, topology, 0) == (sum(sizes) if topology is GPUS else 0,)
        assert curve.peak_bytes <= memory_use(tasks.plan, 0)[0].total


def test_what_must_not_offload_is_refused() -> None:
    for level in (RECOMPUTED, LIGHT):
        with pytest.raises(StrategyError, match=r"recompute with offload: .*; expected one") as error:
            OpConfig((), (0,), recompute=level, offload=True)
        assert "\n" not in str(error.value)
    g = GraphBuilder()
    rows = g.embedding(g.input("ids", 4, 1, dtype="int64"), 6, 4, weight=g.parameter("table", 6, 4), name="rows")
    g.opaque(g.linear(g.input("x", 4, 4), 4, name="first"))
    graph = g.build(g.mean(g.elementwise(rows, name="act")), None)
    usual = Strategy({op.name: on(0, degrees=(1,) * len(op.factors)) for op in graph.operators})
    for name, why in (("rows", "looks rows up in the sparse parameter 'table'"), ("first", "no backward pass")):
        with pytest.raises(StrategyError, match=f"operator '{name}' is marked to offload what it keeps, but .*{why}"):
            with_offload(usual, [name], True).validate(graph, 2)
        assert name not in offloadable(graph)
    with_offload(usual, ["act"], True).validate(graph, 2)


def test_marks_replace_each_other_and_plans_are_not_folded() -> None:
    graph = transformer()
    usual = batch_split(graph, [0, 1])
    chosen = away(graph, usual)
    names = [name for name, config in chosen.operators.items() if config.offload]
    assert names and {*names} <= offloadable(graph)
    back = with_marks(chosen, names, True)
    assert all(back.operators[name] == replace(usual.operators[name], recompute=True) for name in names)
    assert with_offload(back, names, True) == chosen and with_offload(chosen, names, False) == usual
    assert fold(graph, CPUS, chosen) == "what operators keep is offloaded"


@given(cases(servers=True))
def test_every_tile_with_a_backward_pass_has_what_it_keeps_back_before_it(case: tuple[OperatorGraph, Topology, Strategy]) -> None:
    graph, topology, chosen = case
    tasks = lower(build_plan(graph, chosen, topology), topology, PointCosts())
    times, plan = spans(tasks, simulate(tasks)), tasks.plan
    names = {(task.kind, task.tile): task.name for task in tasks.tasks if task.tile is not None}
    active = {tile for kind, tile in names if kind is TaskKind.BACKWARD}
    own = {tile for tile in active if chosen.operators[plan.operator(plan.tiles[tile]).name].offload}
    assert sum(task.kind is TaskKind.COPY for task in tasks.tasks) == 2 * len(own)
    first = come_back_with(plan, active)
    assert first.keys() == own
    for tile in own:
        op = plan.operator(plan.tiles[tile])
        down, up = times[tile_task_name(AWAY.verb, op, plan.tiles[tile])], times[tile_task_name(BACK.verb, op, plan.tiles[tile])]
        assert times[names[TaskKind.FORWARD, tile]][1] <= down[0] and down[1] <= up[0]
        assert up[1] <= times[names[TaskKind.BACKWARD, tile]][0]
        assert plan.tiles[first[tile]].device == plan.tiles[tile].device and first[tile] >= tile
