"""Plans between GPUs gather and scatter parts by collectives: what is padded, what travels on which link, how long it takes, what stays."""

from __future__ import annotations

from dataclasses import replace

import pytest

from soap.cluster.presets import preset
from soap.cluster.topology import Topology
from soap.model.graph import OperatorGraph
from soap.plan.plan import Plan
from soap.plan.syncs.even_parts import Collective, bucket_bytes, part_bytes, room_bytes
from soap.plan.syncs.seam import method_for
from soap.plan.syncs.sharing import owned_bytes
from soap.profiles.roofline import RooflineCosts
from soap.simulator.analysis.timeline import link_bytes
from soap.simulator.communication.allreduce import allreduce_options, parted_link_bytes, parted_options
from soap.simulator.communication.prices import Communication
from soap.simulator.lowering import build_plan, lower
from soap.simulator.simulate import Simulator
from soap.strategy.classical import fsdp, hsdp, zero1
from tests.graph_builder import GraphBuilder
from tests.simulator.examples import batch_split
from tests.simulator.reference_memory.any_order import memory_use
from tests.simulator.test_sharded import layers
from tests.strategies import CPU, GPU, cluster

FOUR = cluster([2, 2], GPU)


def collectives(plan: Plan) -> list[Collective]:
    steps = (step for sync in plan.syncs for step in method_for(sync).steps(plan, sync))
    return [step.collective for step in steps if step.collective is not None]


@pytest.mark.parametrize(
    ("rows", "width", "owned"),
    [(8, 16, [32, 32, 32, 32]), (9, 16, [48, 32, 32, 32]), (3, 16, [16, 16, 8, 8]), (1, 16, [4, 4, 4, 4]), (3, 1, [1, 1, 1, 0])],
)
def test_parts_are_padded_to_the_largest(rows: int, width: int, owned: list[int]) -> None:
    """``owned``: elements. Readers that own nothing take part as well."""
    g = GraphBuilder()
    graph = g.build(g.mean(g.linear(g.input("x", 8, width), rows, bias=False, name="l")))
    plan = build_plan(graph, fsdp(graph, FOUR), FOUR)
    (sync,) = plan.syncs
    assert sorted((owned_bytes(plan, sync).get(device, 0) for device in range(4)), reverse=True) == [4 * count for count in owned]
    assert (part_bytes(plan, sync), room_bytes(plan, sync)) == (4 * owned[0], 4 * 4 * owned[0])
    assert bucket_bytes(plan, sync) == room_bytes(plan, sync)
    assert [one.kind for one in collectives(plan)] == ["all_gather", "all_gather", "reduce_scatter"]
    for one in collectives(plan):
        assert (one.size_bytes, one.groups, one.moved_bytes) == (room_bytes(plan, sync), ((0, 1, 2, 3),), 3 * room_bytes(plan, sync))
    assert all(update.added_bytes == 0 for update in method_for(sync).updates(plan, sync))  # the collective adds up


def test_processors_send_messages() -> None:
    """Also where they are some of the readers; nothing is padded then."""
    graph = layers(3, 10)
    mixed = replace(FOUR, devices=(replace(FOUR.devices[0], type=CPU), *FOUR.devices[1:]))
    for topology in (cluster([2, 2], CPU), mixed):
        plan = build_plan(graph, fsdp(graph, topology), topology)
        assert not collectives(plan) and plan.syncs
        assert all(bucket_bytes(plan, sync) == sum(owned_bytes(plan, sync).values()) for sync in plan.syncs)
    strategy = batch_split(graph, (1, 2)).with_changes(parameters=fsdp(graph, mixed).parameters)
    plan = build_plan(graph, strategy, mixed)  # the processor reads nothing
    assert {one.groups for one in collectives(plan)} == {((1, 2),)}


def test_each_host_gathers_by_itself() -> None:
    graph = layers(3, 12)
    plan = build_plan(graph, hsdp(graph, FOUR), FOUR)
    assert {one.groups for one in collectives(plan)} == {((0, 1), (2, 3))}
    tasks = {task.name: task for task in lower(plan, FOUR, RooflineCosts(FOUR)).tasks}
    communication = Communication(FOUR)
    for sync in plan.syncs:
        for step in method_for(sync).steps(plan, sync):
            if step.collective is not None:
                alone = [communication.collective(replace(step.collective, groups=(group,))) for group in step.collective.groups]
                task = tasks[step.name]
                assert task.duration_ns == max(duration for duration, _ in alone)
                assert {resource - 4 for resource in task.resources} == {link for _, links in alone for link in links}
                assert task.bytes == 2 * step.collective.size_bytes


def test_half_of_an_all_reduce_by_hand() -> None:
    """One turn of the ring: half the steps and half the bytes of two, without the plateau of a sum's latency."""
    one, four = ({option.protocol: option for option in parted_options(preset(name), range(count))} for name, count in CASES)
    assert one["LL"].latency_seconds == pytest.approx(1e-6 * (6.6 + 7 * 0.6))
    assert one["LL128"].latency_seconds == pytest.approx(1e-6 * (14.0 + 7 * 1.9))
    assert one["Simple"].latency_seconds == pytest.approx(1e-6 * (8.4 + 7 * 3.4))
    assert one["Simple"].seconds_per_byte == pytest.approx(7 / 8 / 240e9)
    assert four["LL"].latency_seconds == pytest.approx(1e-6 * (6.6 + 28 * 1.0 + 3 * 2.7))
    assert four["Simple"].latency_seconds == pytest.approx(1e-6 * (8.4 + 28 * 3.4 + 3 * 14.0))
    assert four["Simple"].seconds_per_byte == pytest.approx(31 / 32 / 192e9)


CASES = (("a100-40gb-8", 8), ("a100-40gb-4x8", 32))


@pytest.mark.parametrize("name", ["a100-40gb-8", "mi300x-8", "v100-2x8", "l4-4", "h100-2x8"])
def test_a_ring_of_an_all_reduce_takes_twice_as_long_for_many_bytes(name: str) -> None:
    topology = preset(name)
    ring = min(option.seconds_per_byte for option in parted_options(topology, range(topology.device_count)))
    sums = [option for option in allreduce_options(topology, range(topology.device_count)) if option.algorithm.value == "ring"]
    assert not sums or 2 * ring == pytest.approx(min(option.seconds_per_byte for option in sums))


def leaving(topology: Topology, carried: dict[int, int]) -> dict[str, int]:
    """GPU -> bytes that leave its host through its card."""
    found = {device.name: 0 for device in topology.devices}
    for link, size in carried.items():
        if "rail" in topology.links[link].target:
            found[topology.links[link].source] += size
    return found


def test_every_byte_enters_a_host_once() -> None:
    """Spread over its cards, whatever the number of its GPUs."""
    topology = preset("h100-8x8")
    carried = leaving(topology, parted_link_bytes(topology, range(64), 64_000_000))
    assert set(carried.values()) == {63_000_000 // 8}


def test_links_carry_what_tasks_move() -> None:
    """On links into devices: each receives all parts of its copy but its own."""
    graph, topology = layers(3, 16), cluster([4, 4], GPU)
    for make, turns, inside in ((fsdp, 3, 8), (zero1, 2, 8), (hsdp, 3, 4)):
        plan = build_plan(graph, make(graph, topology), topology)
        found = link_bytes(lower(plan, topology, RooflineCosts(topology)))
        rooms = sum(room_bytes(plan, sync) for sync in plan.syncs)
        summed = sum(step.summed_bytes for sync in plan.syncs for step in method_for(sync).steps(plan, sync)) // inside
        for device in topology.devices:
            into = next(size for name, size in found.items() if name.endswith(f">{device.name}"))
            assert 0 <= into - turns * rooms * (inside - 1) // inside - summed <= 64


def test_others_gradients_are_not_received() -> None:
    """A device holds its bucket, a part of the sum, and nothing of what each other one sends."""
    graph = layers(6, 64)
    peaks = {}
    for kind in (GPU, CPU):
        topology = cluster([8], replace(kind, memory_bytes=2**40))
        simulator = Simulator(graph, topology, RooflineCosts(topology), optimizer_states=2)
        peaks[kind.kind] = max(curve.peak_bytes for curve in simulator.run(zero1(graph, topology)).memory_over_time)
    assert peaks["cuda"] < peaks["cpu"]


def memory_of(graph: OperatorGraph, topology: Topology) -> None:
    for make in (fsdp, zero1, hsdp):
        found = Simulator(graph, topology, RooflineCosts(topology), optimizer_states=2).run(make(graph, topology))
        for curve, bound in zip(found.memory_over_time, memory_use(found.plan), strict=True):
            assert curve.peak_bytes <= bound.total


@pytest.mark.parametrize("width", [7, 16])
def test_memory_is_within_its_bound(width: int) -> None:
    memory_of(layers(5, width), cluster([3, 3], GPU))
