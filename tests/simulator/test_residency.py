"""Memory over time: by hand, below the bound, above what each task needs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given

from soap.cluster.topology import Topology
from soap.model.graph import Footprint, OperatorGraph
from soap.model.regions import Box, lengths
from soap.plan.delivery import box_bytes
from soap.plan.marks.seam import NOTHING
from soap.plan.memory_kinds import ALLOWANCE, MemoryKind
from soap.plan.syncs import large_parts
from soap.plan.syncs.parameter_server import METHOD
from soap.runtime.comm.packing import are_adjacent, cut
from soap.simulator.lowering import build_plan, lower
from soap.simulator.memory.curves import MemoryCurve
from soap.simulator.memory.sweep import expected_peaks, memory_over_time, peaks_by_kind, with_allowance, without_allowance
from soap.simulator.memory.transit import cells_land_in_place
from soap.simulator.reference import simulate
from soap.simulator.tasks import Schedule, TaskGraph, TaskKind
from soap.strategy.classical import data_parallel, zero1
from soap.strategy.config import OpConfig, Strategy, SyncConfig
from soap.strategy.recomputation import RECOMPUTED
from soap.strategy.sync import SHARDED, SHARDED_STATE
from tests.extent import MANY
from tests.graph_builder import GraphBuilder
from tests.simulator.examples import PointCosts, batch_split, chain, on, pairwise_cluster, strategy, units
from tests.simulator.reference_memory.any_order import peak_bytes
from tests.simulator.reference_memory.as_run import as_run
from tests.simulator.reference_memory.ledger import Ledger
from tests.simulator.reference_memory.residency import memory_over_time as by_objects
from tests.simulator.reference_memory.sizes import is_away, kept_shards, tile_sizes
from tests.simulator.reference_memory.task_spans import TaskSpans
from tests.strategies import cases

TWO = pairwise_cluster(1, 1)


def played(graph: OperatorGraph, chosen: Strategy, topology: Topology = TWO) -> tuple[TaskGraph, Schedule]:
    tasks = lower(build_plan(graph, chosen, topology), topology, PointCosts())
    return tasks, simulate(tasks)


def points(curve: MemoryCurve) -> dict[int, int]:
    return {units(time): held for time, held in zip(curve.times_ns.tolist(), curve.bytes_held.tolist(), strict=True)}


def test_a_pipeline_by_hand() -> None:
    tasks, schedule = played(chain(4, 2, 3), strategy(l1=on(0, degrees=(1, 1, 1)), loss=on(1, degrees=(1,))))
    tile, loss = (own.kept for own in tile_sizes(tasks.plan))
    first, second = memory_over_time(tasks, schedule, 2)
    batch, weight, l1 = 4 * 2 * 4, 3 * 2 * 4, 4 * 3 * 4
    # l1's tile; from 84 on its gradient comes back; its backward task makes the weight's, which is kept to the end.
    always = batch + 3 * weight + 4  # the optimizer counts its steps
    beside = {24: always + tile + l1, 84: always + tile + 2 * l1}  # whether l1 lies row by row is not known, so it may be copied to be sent
    assert points(first) == {0: always + tile, **beside, 132: always + tile + l1 + 2 * weight, 180: always + weight, 181: 0}
    # l1 arrives from 24 on, the loss is computed at 72, its gradient from 76 on, which is sent until 132, and kept. It may be a copy, as
    # it is not known how what the loss makes lies.
    rise = {0: batch, 24: batch + l1, 72: batch + l1 + loss, 76: batch + 3 * l1 + loss}
    assert points(second) == {**rise, 84: batch + l1, 181: 0}
    assert (first.peak_bytes, second.peak_bytes) == (always + tile + l1 + 2 * weight, batch + 3 * l1 + loss)


@pytest.mark.parametrize("stolen", [False, True])
def test_a_gradient_that_autograd_takes_as_it_is_counts_once(stolen: bool) -> None:
    """Of a weight that one device owns. What autograd copies, and what it adds to a gradient that is there, is beside that for a while."""
    graph, weight = _twice_on_one_device(), 8 * 8 * 4
    if stolen:
        graph = replace(graph, footprints={name: (Footprint(0, 0, 0, frozenset({0}), in_rows=frozenset({1})),) for name in ("l1", "l3")})
    first, other = on(0, degrees=(1, 1, 1)), on(1, degrees=(1, 1, 1))
    tasks, schedule = played(graph, strategy(l1=first, l2=other, l3=first, loss=on(1, degrees=(1, 1))))
    begins = {tasks.tasks[i].name: begin for i, begin in enumerate(schedule.start_ns.tolist())}
    curve = memory_over_time(tasks, schedule)[0]
    held = dict(zip(curve.times_ns.tolist(), curve.by_kind[MemoryKind.GRADIENTS].tolist(), strict=True))
    assert held[begins["backward l3[0]"]] == (1 if stolen else 2) * weight
    assert held[begins["backward l1[0]"]] == 2 * weight


@pytest.mark.parametrize(
    ("in_rows", "spread", "copies"),
    [(False, False, 1), (True, False, 0), (False, True, 0)],
    ids=["of two operands", "its own", "made of one number"],
)
def test_a_gradient_that_autograd_copies_to_where_a_segment_starts_counts_twice(in_rows: bool, spread: bool, copies: int) -> None:
    """As that of a shortcut, which is the gradient of what it is added to as well. l1 is another segment, as it is recomputed; a copy of
    one number that the loss has repeated takes the place of l2's gradient, which counts in full."""
    graph = chain(4, 2, 3, 5)
    footprints = {
        "l1": (Footprint(0, 0, 0, frozenset({0}), in_rows=frozenset({1, 2, 3})),),
        "l2": (Footprint(0, 0, 0, frozenset({0}), in_rows=frozenset({0, 1, 2, 3} if in_rows else {1, 2, 3})),),
        "loss": (Footprint(0, 0, 0, frozenset(), in_rows=frozenset({1}), spread=frozenset({0} if spread else ())),),
    }
    whole, first = on(0, degrees=(1, 1, 1)), replace(on(0, degrees=(1, 1, 1)), recompute=RECOMPUTED)
    chosen = strategy(l1=first, l2=whole, loss=on(0, degrees=(1,)))
    tasks, schedule = played(replace(graph, footprints=footprints), chosen)
    begins = {tasks.tasks[i].name: begin for i, begin in enumerate(schedule.start_ns.tolist())}
    curve = memory_over_time(tasks, schedule)[0]
    held = dict(zip(curve.times_ns.tolist(), curve.by_kind[MemoryKind.WORKSPACE].tolist(), strict=True))
    l1, l2 = 4 * 3 * 4, 4 * 5 * 4
    assert held[begins["backward l2[0]"]] == l2 + (1 + copies) * l1


def _twice_on_one_device() -> OperatorGraph:
    """A weight that is used before and behind another layer."""
    g = GraphBuilder()
    weight, x = g.parameter("weight", 8, 8), g.input("x", 4, 8)
    for name, own in (("l1", weight), ("l2", g.parameter("other", 8, 8)), ("l3", weight)):
        x = g.linear(x, 8, name=name, weight=own, bias=False)
    return g.build(g.mean(x, name="loss"))


def test_what_is_made_and_what_makes_room_at_one_moment() -> None:
    """From what ends late the early ones are made; what leaves begins to before others are freed."""
    tasks, _ = played(chain(4, 2, 3), strategy(l1=on(0, degrees=(1, 1, 1)), loss=on(0, degrees=(1,))))
    ledger = Ledger(tasks.plan, 20)
    for start, end, size, order in ((0, 10, 1, {}), (0, 10, 2, {"late": True}), (0, 10, 4, {"freed": True})):
        ledger.hold(0, start, end, size, MemoryKind.VALUES, **order)
    ledger.hold(0, 10, 20, 8, MemoryKind.KEPT, early=True)
    ledger.hold(0, 10, 20, 16, MemoryKind.BUFFERS)
    curve, _ = ledger.curves()
    assert dict(zip(curve.times_ns.tolist(), curve.bytes_held.tolist(), strict=True)) == {0: 7, 10: 8 + 16, 20: 0}
    made_of = {kind: size for kind, size in curve.at_peak.items() if size}
    assert made_of == {MemoryKind.KEPT: 8, MemoryKind.BUFFERS: 16}
    ledger.hold(0, 10, 20, 32, MemoryKind.STATES, leaves=True)
    ledger.hold(0, 5, 10, 64, MemoryKind.STATES, freed=True)
    curve, _ = ledger.curves()
    assert curve.peak_bytes == 2 + 4 + 32 + 64 and sum(curve.at_peak.values()) == curve.peak_bytes


@pytest.mark.parametrize("sync", [SHARDED_STATE, SHARDED], ids=["zero", "fsdp"])
def test_autograd_adds_up_what_a_segment_gives_to_one_region(sync: SyncConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight that is used three times: its gradient is handed on when the last of them, the first layer's, has gone back."""
    g = GraphBuilder()
    weight, x = g.parameter("weight", 8, 8), g.input("x", 4, 8)
    for place in range(3):
        x = g.linear(x, 8, name=f"layer{place}", weight=weight, bias=False)
    graph = g.build(g.mean(x, name="loss"))
    tasks, schedule = played(graph, data_parallel(graph, TWO).with_parameter("weight", sync))
    ends = {tasks.tasks[i].name: end for i, end in enumerate(schedule.end_ns.tolist())}
    held: list[tuple[int, int]] = []
    usual = Ledger.hold

    def noting(self: Ledger, device: int, start: int, end: int, size: int, kind: MemoryKind, **order: bool) -> None:
        if (device, size, kind) == (0, 8 * 8 * 4, MemoryKind.GRADIENTS):
            held.append((start, end))
        usual(self, device, start, end, size, kind, **order)

    monkeypatch.setattr(Ledger, "hold", noting)
    by_objects(tasks, schedule, 2)
    first, second, last = (ends[f"backward layer{place}[0]"] for place in (2, 1, 0))
    assert (first, second) in held and (second, last) in held  # sums beside what comes
    assert min(start for start, end in held if end >= last and start not in (first, second)) == last


@pytest.mark.parametrize(("bias", "large"), [(False, False), (False, True), (True, False)])
def test_a_buffer_of_gradients_is_made_when_what_was_added_up_has_gone(bias: bool, large: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a weight that is used twice: two gradients and their sum, then that and the buffer; unless the bias's have made the buffer before.
    A large sum stays as it is."""
    g = GraphBuilder()
    weight, x = g.parameter("weight", 8, 8), g.input("x", 4, 8)
    for place in range(2):
        x = g.linear(x, 8, name=f"layer{place}", weight=weight, bias=bias and place == 0)
    graph = g.build(g.mean(x, name="loss"))
    monkeypatch.setattr(large_parts, "LARGE_BYTES", 1 if large else 2**20)
    tasks, schedule = played(graph, zero1(graph, TWO))
    last = next(end for task, end in zip(tasks.tasks, schedule.end_ns.tolist(), strict=True) if task.name == "backward layer0[0]")
    begun: list[int] = []
    usual = Ledger.hold

    def noting(self: Ledger, device: int, start: int, end: int, size: int, kind: MemoryKind, **order: bool) -> None:
        if device == 0 and start == last and kind is MemoryKind.GRADIENTS and order.get("early"):
            begun.append(size)
        usual(self, device, start, end, size, kind, **order)

    monkeypatch.setattr(Ledger, "hold", noting)
    by_objects(tasks, schedule, 2)
    of_weight, of_bias = 8 * 8 * 4, 8 * 4
    added_up = 3 * of_weight
    assert sum(begun) == (added_up + (of_weight + of_bias) + of_weight if bias else added_up)


def test_cells_land_in_place_if_they_lie_in_the_order_of_the_devices() -> None:
    """As tensors do."""
    box: Box = ((4, 12), (3, 9))
    rows: list[Box] = [((4, 6), (3, 9)), ((6, 6), (3, 9)), ((6, 12), (3, 9))]
    columns: list[Box] = [((4, 12), (3, 5)), ((4, 12), (5, 9))]
    for cells, in_place in ((rows, True), (rows[::-1], False), (columns, False), ([box], True)):
        whole = torch.zeros(lengths(box))
        places = [place for cell in cells if (place := cut(whole, box, cell)).numel()]
        assert are_adjacent(places) == cells_land_in_place(box, cells) == in_place


def test_an_allowance_is_made_that_limits_leave_room_for() -> None:
    assert expected_peaks([1000, 0]) == (1045, 0)
    for limit in (1000, 1045, 1046, 2**40):
        most = without_allowance(limit)
        assert with_allowance(most) <= limit < with_allowance(most + 2)


def test_of_a_region_that_came_each_later_gradient_is_beside_the_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three operators on device 1 read what device 0 has made."""
    g = GraphBuilder()
    x = g.linear(g.input("x", 4, 2), 6, name="l1")
    readers = [g.elementwise(x, name=f"reader{place}") for place in range(3)]
    graph = g.build(g.mean(g.elementwise(*readers, name="added"), name="loss"))
    there = on(1, degrees=(1, 1))
    chosen = strategy(l1=on(0, degrees=(1, 1, 1)), reader0=there, reader1=there, reader2=there, added=there, loss=there)
    tasks, schedule = played(graph, chosen)
    times = zip(tasks.tasks, schedule.start_ns.tolist(), schedule.end_ns.tolist(), strict=True)
    first, second, third = sorted((start, end) for task, start, end in times if task.name.startswith("backward reader"))
    held: list[tuple[int, int]] = []
    usual = Ledger.hold

    def noting(self: Ledger, device: int, start: int, end: int, size: int, kind: MemoryKind, **order: bool) -> None:
        if (device, size, kind) == (1, 4 * 6 * 4, MemoryKind.WORKSPACE):
            held.append((start, end))
        usual(self, device, start, end, size, kind, **order)

    monkeypatch.setattr(Ledger, "hold", noting)
    by_objects(tasks, schedule, 2)
    assert any(start == first[0] and end >= third[1] for start, end in held)
    assert second in held and third in held and first not in held


def test_a_part_of_a_region_is_let_go_when_the_region_has_been_put_together() -> None:
    """Each device makes half of the rows, and reads all of them. Both operators run again: what came is kept for that, the own half is
    not."""
    g = GraphBuilder()
    x = g.elementwise(g.linear(g.input("x", 4, 2), 6, name="l1"), name="next")
    graph = g.build(g.mean(g.linear(x, 2, name="l2"), name="loss"))
    chosen = strategy(
        l1=on(0, 1, degrees=(2, 1, 1)),
        next=OpConfig((2, 1), (0, 1), recompute=RECOMPUTED),
        l2=OpConfig((1, 1, 2), (0, 1), recompute=RECOMPUTED),
        loss=on(0, 1, degrees=(1, 2)),
    )
    tasks, schedule = played(graph, chosen)
    spans, plan = TaskSpans(tasks, as_run(tasks, schedule)), tasks.plan
    (fetch,) = [own for own in plan.fetches if own.tensor == "next" and own.device == 0]
    (reader, _), (mine,) = fetch.consumers[0], [own.holding for own in fetch.pieces if plan.holdings[own.holding].device == 0]
    assert mine in spans.dropped and reader in spans.second
    assert spans.forward[reader][0] <= spans.read_until[mine] < spans.second[reader][0]


def test_what_is_received_is_added_up_one_after_the_other() -> None:
    """Each sum of 2 is there from when what was received for it, 6, is let go: before the third where two may be under way, else at 20."""
    tasks, _ = played(chain(4, 2, 3), strategy(l1=on(0, degrees=(1, 1, 1)), loss=on(0, degrees=(1,))))
    found = []
    for few in (True, False):
        ledger = Ledger(tasks.plan, 30)
        for start in (0, 4, 10):
            ledger.receive(0, start, 20, 6, few=few, sum_bytes=2)
        curve, _ = ledger.curves()
        found.append(dict(zip(curve.times_ns.tolist(), curve.bytes_held.tolist(), strict=True)))
        assert curve.at_peak[MemoryKind.BUFFERS] + curve.at_peak[MemoryKind.GRADIENTS] == curve.peak_bytes
    assert found[0] == {0: 6, 4: 12, 9: 14, 10: 14, 18: 16, 19: 12, 30: 0}
    assert found[1] == {0: 6, 4: 12, 10: 18, 17: 20, 18: 16, 19: 12, 30: 0}


def test_gradients_that_are_summed_have_their_buffers_all_the_time() -> None:
    graph = chain(4, 2, 3)
    tasks, schedule = played(graph, batch_split(graph, [0, 1]))
    for curve in memory_over_time(tasks, schedule, 0):
        assert points(curve)[48] == 4 * 2 * 4 + 2 * 3 * 2 * 4  # while it is summed: the batch, the weight and its gradient


def test_a_sum_that_a_device_does_not_read_is_there_until_its_gradient_comes() -> None:
    """The loss reads it on the other device, and others may come to a sum later than simulated."""
    tasks, schedule = played(chain(4, 2, 3), strategy(l1=on(0, 1, degrees=(1, 2, 1)), loss=on(0, degrees=(1,))))
    held = points(memory_over_time(tasks, schedule, 0)[1])
    (total,) = (box_bytes(tasks.plan, "l1", reduction.box) for reduction in tasks.plan.reductions)
    assert units(schedule.end_ns[2]) == 84  # of the sum
    assert held[12] == held[0] + total and held[96] == held[12] + total and set(held) == {0, 12, 96, 168, 192, 193}


@pytest.mark.slow
@MANY
@given(cases(servers=True))
def test_between_what_tasks_need_and_the_bound(case: tuple[OperatorGraph, Topology, Strategy]) -> None:
    graph, topology, chosen = case
    tasks, schedule = played(graph, chosen, topology)
    plan, curves, run = tasks.plan, memory_over_time(tasks, schedule, 2), as_run(tasks, schedule)
    schedule = run.schedule
    for curve, bound in zip(curves, peak_bytes(plan, 2), strict=True):
        assert curve.times_ns[0] == 0 and (curve.times_ns[1:] > curve.times_ns[:-1]).all()
        assert (curve.bytes_held >= 0).all() and curve.peak_bytes <= bound
    kept, lives = [own.kept for own in tile_sizes(plan)], lives_of(tasks, schedule)
    for time, device, needed in working_sets(tasks, schedule):
        curve = curves[device]
        held = curve.bytes_held[curve.times_ns.searchsorted(time, side="right") - 1]
        here = [(tile, start, end) for tile, own in lives.items() if plan.tiles[tile].device == device for start, end in own]
        alive = sum(kept[tile] for tile, start, end in here if start <= time < end)
        owned = ((number, size, trained) for number, keeper, size, trained in kept_shards(plan) if keeper == device)
        shards = sum((3 if trained and not is_away(plan, number, device) else 1) * size for number, size, trained in owned)
        copies = sum(METHOD.copies(plan, sync).get(device, 0) for sync in plan.syncs if sync.contract is METHOD.contract)
        assert held >= alive + shards + copies + needed


def lives_of(tasks: TaskGraph, schedule: Schedule) -> dict[int, list[tuple[int, int]]]:
    """Tile -> from the start of its forward task to the end of its last; if it is recomputed, its first run, and from its second one on; if
    it offloads, its first run."""
    runs: dict[int, dict[TaskKind, tuple[int, int]]] = {}
    for task, start, end in zip(tasks.tasks, schedule.start_ns.tolist(), schedule.end_ns.tolist(), strict=True):
        if task.tile is not None:
            runs.setdefault(task.tile, {})[task.kind] = (start, end)
    lives: dict[int, list[tuple[int, int]]] = {}
    for tile, own in runs.items():
        first, again, end = own[TaskKind.FORWARD], own.get(TaskKind.RECOMPUTE), max(stop for _, stop in own.values())
        lives[tile] = [(first[0], end)] if again is None else [first, (again[0], end)]
        if tasks.plan.marked.get(tasks.plan.tiles[tile].operator, NOTHING).kept_until and TaskKind.BACKWARD in own:
            lives[tile] = [first]
    return lives


def working_sets(tasks: TaskGraph, schedule: Schedule) -> list[tuple[int, int, int]]:
    """(start, device, bytes) of each tile's tasks: the inputs that come from another device."""
    plan, found = tasks.plan, []
    for task, start in zip(tasks.tasks, schedule.start_ns.tolist(), strict=True):
        if task.tile is not None:
            device = plan.tiles[task.tile].device
            fetched = [fetch for fetch in plan.fetches if any(tile == task.tile for tile, _ in fetch.consumers)]
            remote = [fetch for fetch in fetched if any(plan.holdings[piece.holding].device != device for piece in fetch.pieces)]
            found.append((start, device, sum(box_bytes(plan, fetch.tensor, fetch.box) for fetch in remote)))
    return found


@pytest.mark.slow
@MANY
@given(cases(servers=True))
def test_the_kinds_of_what_is_held_add_up_to_the_peak(case: tuple[OperatorGraph, Topology, Strategy]) -> None:
    graph, topology, chosen = case
    tasks, schedule = played(graph, chosen, topology)
    curves = memory_over_time(tasks, schedule, 2)
    peaks = expected_peaks(curve.peak_bytes for curve in curves)
    for curve, kinds, peak in zip(curves, peaks_by_kind(curves, peaks), peaks, strict=True):
        assert sum(curve.at_peak.values()) == curve.peak_bytes and sum(kinds.values()) == peak
        assert min(kinds.values()) >= 0 and list(kinds) == [*MemoryKind, ALLOWANCE]


def test_what_a_peak_is_made_of_by_hand() -> None:
    graph = chain(4, 2, 3)
    tasks, schedule = played(graph, batch_split(graph, [0, 1]))
    for curve in memory_over_time(tasks, schedule, 2):
        held, weight = curve.at_peak, 3 * 2 * 4
        assert (held[MemoryKind.VALUES], held[MemoryKind.STATES], held[MemoryKind.BATCH]) == (weight, 2 * weight + 4, 4 * 2 * 4)
        # While l1's weight gets its gradient, that is there beside the buffer of its sum, l1's gradient beside l1.
        assert held[MemoryKind.GRADIENTS] == 2 * weight
        assert (held[MemoryKind.WORKSPACE], held[MemoryKind.BUFFERS]) == (2 * 3 * 4, 0)
        assert held[MemoryKind.KEPT] == curve.peak_bytes - 5 * weight - 4 - 4 * 2 * 4 - 2 * 3 * 4
