"""What devices send: how long it is there, and what of it is no copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from soap.cluster.topology import Topology
from soap.model.graph import Footprint, OperatorGraph
from soap.plan.memory_kinds import MemoryKind
from soap.simulator.lowering import build_plan
from soap.simulator.memory import array_ledger
from soap.simulator.memory.sweep import memory_over_time
from soap.strategy.config import OpConfig
from tests.graph_builder import GraphBuilder
from tests.simulator.examples import chain, on, pairwise_cluster, strategy
from tests.simulator.reference_memory import moving
from tests.simulator.reference_memory.leaving import Lying, given_to_itself, lying, parcels, sent_of_sum
from tests.simulator.reference_memory.ledger import Ledger
from tests.simulator.reference_memory.moving import Send, Stay, until_free
from tests.simulator.reference_memory.residency import memory_over_time as by_objects
from tests.simulator.test_residency import TWO, played


def test_what_is_sent_is_kept_until_later_messages_push_it_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Halves of l1 go to a device of their own and come back one after the other; each half's gradient has 24 bytes."""
    chosen = strategy(l1=on(0, 0, degrees=(2, 1, 1)), loss=on(1, 1, degrees=(2,)))
    ends = []
    for limit in (48, 24):
        monkeypatch.setattr(array_ledger, "SENT_BYTES", limit)
        curve = memory_over_time(*played(chain(4, 2, 3), chosen), 2)[1]
        ends.append(curve.bytes_held[-2])
    assert ends == [32 + 48, 32 + 24]  # with the batch


def test_what_is_sent_is_held_until_it_is_answered_pushed_out_or_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    sends = [Send(0, 9, 10, 10), Send(1, 3, 10, 10), Send(4, 9, 10, 0), Send(5, 9, 10, 10)]
    assert sorted((send.start_ns, end, send.held) for send, end in until_free(sends)) == [(0, 9, 10), (1, 3, 10), (4, 9, 0), (5, 9, 10)]
    monkeypatch.setattr(moving, "SENT_BYTES", 20)  # the second is answered before there are more
    assert sorted((send.start_ns, end, send.held) for send, end in until_free(sends)) == [(0, 5, 10), (1, 3, 10), (4, 9, 0), (5, 9, 10)]
    monkeypatch.setattr(moving, "SENT_TENSORS", 1)
    assert sorted((send.start_ns, end, send.held) for send, end in until_free(sends)) == [(0, 1, 10), (1, 3, 10), (4, 5, 0), (5, 9, 10)]


def test_what_is_sent_beside_what_it_is_made_of_and_what_answers_it() -> None:
    """A copy is there beside its source; what is sent from where it lies is one piece of memory, and outlives its readers here."""
    tasks, _ = played(chain(4, 2, 3), strategy(l1=on(0, degrees=(1, 1, 1)), loss=on(0, degrees=(1,))))

    def held(*sends: tuple[int, int, int], stays: Sequence[Stay] = ()) -> dict[int, int]:
        ledger = Ledger(tasks.plan, 40)
        ledger.hold(0, 0, 10, 4, MemoryKind.KEPT, late=True)
        for start, answer, packed in sends:
            ledger.send(0, start, answer, 2, held=packed, copied=True, stays=stays)
        ledger.hold(0, 20, 30, 8, MemoryKind.WORKSPACE, early=True)  # to which the answer is added
        curve, _ = ledger.curves()
        return dict(zip(curve.times_ns.tolist(), curve.bytes_held.tolist(), strict=True))

    assert held((10, 20, 2)) == {0: 4, 10: 6, 20: 10, 30: 0}
    assert held((5, 20, 0), stays=[Stay(0, 10, 4)]) == {0: 4, 10: 4, 20: 12, 30: 0}
    assert held((5, 20, 0), stays=[Stay(0, 10, 4, 2)]) == {0: 4, 5: 6, 10: 4, 20: 12, 30: 0}  # or it was a copy, until then
    assert held((5, 15, 0), (6, 20, 0), stays=[Stay(0, 10, 4)]) == {0: 4, 10: 4, 20: 12, 30: 0}  # two parts of it
    assert held((5, 20, 0), stays=[Stay(0, 40, 4)]) == {0: 4, 10: 0, 20: 8, 30: 0}


def test_a_part_in_one_piece_leaves_from_where_it_lies() -> None:
    """Rows of what lies row by row, and not its columns, nor two parts at once; a sum always lies so. Of others nobody knows."""
    g = GraphBuilder()
    x = g.linear(g.input("x", 4, 2), 6, name="l1")
    graph = g.build(g.mean(g.elementwise(x, name="next"), name="loss"))
    known = replace(graph, footprints={"l1": (Footprint(0, 0, 0, frozenset(), in_rows=frozenset({3})),)})

    def found(graph: OperatorGraph, first: OpConfig, degrees: tuple[int, int]) -> list[Lying]:
        loss = on(1, degrees=(1, 1))
        plan = build_plan(graph, strategy(l1=first, next=on(1, 1, degrees=degrees), loss=loss), TWO)
        (message,) = plan.messages
        (parcel,) = parcels(plan, message.parts)
        return [lying(plan, parcel._replace(parts=[part])) for part in parcel.parts]

    one, summed = on(0, degrees=(1, 1, 1)), on(0, 0, degrees=(1, 2, 1))
    rows, columns = (2, 1), (1, 2)
    assert {(own.of >= 0, own.surely) for own in found(known, one, rows)} == {(True, True)}
    assert {(own.of >= 0, own.surely) for own in found(graph, one, rows)} == {(True, False)}
    assert {(own.of >= 0, own.surely) for own in found(graph, summed, rows)} == {(True, True)}
    assert {own.of for own in found(known, one, columns)} == {-1}
    plan = build_plan(known, strategy(l1=one, next=on(1, 1, degrees=rows), loss=on(1, degrees=(1, 1))), TWO)
    (parcel,) = parcels(plan, plan.messages[0].parts)
    assert len(parcel.parts) == 2 and lying(plan, parcel).of == -1


@pytest.mark.parametrize(("regions", "parts"), [(1, 2 + 1), (2, 4)])
def test_a_device_gives_itself_its_part_of_the_only_region_that_comes(regions: int, parts: int) -> None:
    """Three devices have a third of the rows of a value each, and read a third of its columns, or two."""
    g = GraphBuilder()
    first = g.linear(g.input("x", 6, 2), 6, name="first")
    places = [(0, 1, 2), (1, 2, 0)][:regions]
    losses = [g.mean(g.elementwise(first, name=f"columns{i}"), name=f"loss{i}") for i in range(regions)]
    configs = {f"columns{i}": on(*own, degrees=(1, 3)) for i, own in enumerate(places)} | {loss: on(0, degrees=(1, 1)) for loss in losses}
    chosen = strategy(first=on(0, 1, 2, degrees=(3, 1, 1)), sum=on(0, degrees=()), **configs)
    plan = build_plan(g.build(g.elementwise(*losses, name="sum")), chosen, pairwise_cluster(1, 1, 1))
    (exchange,) = [own for own in plan.exchanges if own.tensor == "first"]
    sizes = [(own.source, own.size_bytes) for own in (*parcels(plan, exchange.parts), *given_to_itself(plan, exchange))]
    assert [sum(size for source, size in sizes if source == device) for device in range(3)] == [parts * 2 * 2 * 4] * 3


def _on_gpus(topology: Topology) -> Topology:
    return replace(topology, devices=tuple(replace(device, type=replace(device.type, kind="cuda")) for device in topology.devices))


@pytest.mark.parametrize("rows", [True, False])
def test_cells_leave_from_the_sum_they_are_of(rows: bool) -> None:
    """If they are rows of it, all of it stays, else each is a copy. NCCL takes one piece for all others."""
    g = GraphBuilder()
    graph = g.build(g.mean(g.elementwise(g.linear(g.input("x", 6, 3), 6, name="l1"), name="next"), name="loss"))
    reads = on(0, 1, 2, degrees=(3, 1) if rows else (1, 3))
    chosen = strategy(l1=on(0, 1, 2, degrees=(1, 3, 1)), next=reads, loss=on(0, degrees=(1, 1)))
    of_sum, topology = 6 * 6 * 4, pairwise_cluster(1, 1, 1)
    for devices, held in ((topology, of_sum if rows else of_sum * 2 // 3), (_on_gpus(topology), of_sum * 2 // 3)):
        plan = build_plan(graph, chosen, devices)
        reduction = next(own for own in plan.reductions if own.cells)
        assert [sent_of_sum(plan, reduction, device) for device in range(3)] == [held] * 3


def test_values_for_several_are_one_piece_of_memory_under_gloo_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of three devices makes a third of the rows, and all read all of them."""
    g = GraphBuilder()
    x = g.linear(g.input("x", 6, 2), 6, name="l1")
    graph = g.build(g.mean(g.linear(x, 9, name="l2"), name="loss"))
    known = replace(graph, footprints={"l1": (Footprint(0, 0, 0, frozenset(), in_rows=frozenset({3})),)})
    chosen = strategy(l1=on(0, 1, 2, degrees=(3, 1, 1)), l2=on(0, 1, 2, degrees=(1, 1, 3)), loss=on(0, degrees=(1, 1)))
    third, topology = 2 * 6 * 4, pairwise_cluster(1, 1, 1)
    found: dict[bool, set[tuple[int, int]]] = {}
    for devices, packs in ((topology, False), (_on_gpus(topology), True)):
        tasks, schedule = played(known, chosen, devices)
        assert [own.tensor for own in tasks.plan.exchanges] == ["l1"]
        sent: list[tuple[int | None, tuple[Stay, ...]]] = []
        monkeypatch.setattr(Ledger, "send", lambda *_, held=None, stays=(), sent=sent, **__: sent.append((held, tuple(stays))))
        by_objects(tasks, schedule, 0)
        assert all(stay.copy_bytes == 0 for _, stays in sent for stay in stays if stay.size == third)
        found[packs] = {(held or 0, sum(stay.size == third for stay in stays)) for held, stays in sent}
    assert (0, 3) in found[False] and (3 * third, 0) in found[True]  # each gives itself its own rows as well, so that all land in place
