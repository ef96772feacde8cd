"""Plans in which each host has a copy in parts (HSDP): what stays inside hosts, what is summed across them, and where hosts differ."""

from __future__ import annotations

from dataclasses import replace

import pytest

from soap.cluster.topology import Topology
from soap.model.graph import OperatorGraph
from soap.plan.plan import Plan, ShardSync, backward_name, update_name
from soap.plan.syncs.bucketing import gradient_bytes
from soap.plan.syncs.gathering import UNDER_WAY
from soap.plan.syncs.seam import Phase, SyncStep, method_for
from soap.plan.syncs.sharded_state import scatter_name
from soap.plan.syncs.sharing import copies_of, holders
from soap.profiles.roofline import RooflineCosts
from soap.simulator.analysis.timeline import link_bytes
from soap.simulator.lowering import build_plan, lower
from soap.simulator.simulate import Simulator
from soap.strategy.classical import data_parallel, fsdp, hsdp
from soap.strategy.config import OpConfig, Strategy, SyncConfig
from soap.strategy.sync import SHARDED, SHARDED_IN_HOSTS, SHARDED_STATE
from tests.graph_builder import transformer
from tests.simulator.examples import batch_split, chain
from tests.simulator.test_sharded import layers
from tests.strategies import CPU, GPU, cluster

FOUR, SIX = cluster([2, 2], CPU), cluster([3, 3], CPU)
STATE_IN_HOSTS = replace(SHARDED_STATE, within="host")


def on_devices(graph: OperatorGraph, devices: tuple[int, ...], sync: SyncConfig) -> Strategy:
    """The batch split over these devices, and all parameters synchronized so."""
    return batch_split(graph, devices).with_changes(parameters={tensor.name: sync for tensor in graph.parameters})


def steps_of(plan: Plan, sync: ShardSync, phase: Phase) -> list[SyncStep]:
    return [step for step in method_for(sync).steps(plan, sync) if step.phase is phase]


@pytest.mark.parametrize(("topology", "inside"), [(FOUR, 2), (SIX, 3), (cluster([2, 2, 2], GPU), 2)])
@pytest.mark.parametrize("sync", [SHARDED_IN_HOSTS, STATE_IN_HOSTS])
def test_every_host_has_a_copy_in_parts(topology: Topology, inside: int, sync: SyncConfig) -> None:
    """Values and scattered gradients stay inside hosts; sums of parts are all that leaves them."""
    graph = layers(5, 12)
    plan = build_plan(graph, data_parallel(graph, topology).with_changes(parameters={t.name: sync for t in graph.parameters}), topology)
    hosts = topology.device_count // inside
    host_of = [device.host for device in topology.devices]
    assert all(len(shard.devices) == hosts and len({host_of[d] for d in shard.devices}) == hosts for shard in plan.shards if shard.uses)
    size = sum(tensor.bytes for tensor in graph.parameters)
    moved, summed = dict.fromkeys(Phase, 0), 0
    for own in plan.syncs:
        assert len(copies_of(own)) == hosts and {devices for devices in holders(own)} == {plan.shards[i].devices for i in own.shards}
        for step in method_for(own).steps(plan, own):
            flows = [flow for flows, _ in step.rounds for flow in flows]
            assert all(host_of[source] == host_of[target] for source, target, _ in flows)
            moved[step.phase] += sum(size for *_, size in flows)
            if step.collective is not None:
                assert [{host_of[device] for device in group} for group in step.collective.groups] == [{host} for host in range(hosts)]
                moved[step.phase] += step.collective.moved_bytes
            summed += step.summed_bytes
            assert not step.among or [host_of[device] for device in step.among] == [*range(hosts)]
    once = (inside - 1) * size * hosts
    gathers = (once, once, 0) if sync is SHARDED_IN_HOSTS else (0, 0, once)
    assert summed == size and moved[Phase.AFTER_BACKWARD] == once
    assert (moved[Phase.BEFORE_FORWARD], moved[Phase.BEFORE_BACKWARD], moved[Phase.AFTER_UPDATE]) == gathers


def test_sums_run_side_by_side_behind_the_scatter() -> None:
    """Each device's update waits for the sum of its own parts."""
    graph = layers(3, 12)
    plan = build_plan(graph, hsdp(graph, FOUR), FOUR)
    tasks = lower(plan, FOUR, RooflineCosts(FOUR)).tasks
    before = {task.name: {tasks[other].name for other in task.predecessors} for task in tasks}
    for sync in plan.syncs:
        scatter, *sums = steps_of(plan, sync, Phase.AFTER_BACKWARD)
        assert scatter.name == scatter_name(sync) and [step.among for step in sums] == [(0, 2), (1, 3)]
        assert all(before[step.name] == {scatter.name} for step in sums)
        users = {backward_name(plan.operator(plan.tiles[tile]), plan.tiles[tile]) for tile, _ in sync.uses}
        assert before[scatter.name] == users
        for device in range(4):
            waits = {step.name for step in sums if step.name in before[update_name(device)]}
            assert waits == {step.name for step in sums if device in step.among}


def test_between_hosts_travel_sums_of_parts_alone() -> None:
    """On each host's cable as many bytes as a ring's all-reduce of the gradients moves, however many devices share it."""
    graph, topology = transformer(), cluster([4, 4], GPU)
    carried = {}
    for make in (data_parallel, fsdp, hsdp):
        found = link_bytes(lower(build_plan(graph, make(graph, topology), topology), topology, RooflineCosts(topology)))
        carried[make] = [size for name, size in found.items() if "network" in name]
    size = sum(tensor.bytes for tensor in graph.parameters)
    assert all(size <= own <= 1.01 * size for own in carried[hsdp])
    assert min(carried[fsdp]) > 2.6 * size  # two gathers and a scatter, of all but what the host has


@pytest.mark.parametrize("sync", [SHARDED_IN_HOSTS, STATE_IN_HOSTS])
def test_hosts_with_unlike_numbers_of_readers_share_one_copy(sync: SyncConfig) -> None:
    graph, plain = chain(8, 4, 4), replace(sync, within="none")
    for counts, devices in (([2, 1], (0, 1, 2)), ([3, 3], (0, 1, 2, 4, 5)), ([4], (0, 1, 2, 3))):
        topology = cluster(counts, CPU)
        one, other = (build_plan(graph, on_devices(graph, devices, own), topology) for own in (sync, plain))
        assert one.syncs == other.syncs and one.shards == other.shards and {own.method for own in one.syncs} == {plain.contract.name}


@pytest.mark.parametrize("sync", [SHARDED_IN_HOSTS, STATE_IN_HOSTS])
def test_one_reader_on_each_host_has_nothing_to_share(sync: SyncConfig) -> None:
    graph = chain(8, 4, 4)
    for topology, devices in ((cluster([1, 1, 1], CPU), (0, 1, 2)), (FOUR, (1, 2)), (FOUR, (0,))):
        one, other = (build_plan(graph, on_devices(graph, devices, own), topology) for own in (sync, SyncConfig()))
        assert one.syncs == other.syncs and one.shards == other.shards


def test_parameters_with_and_without_copies_travel_apart() -> None:
    graph = layers(4, 12)
    strategy = hsdp(graph, FOUR).with_parameter("l1.weight", SHARDED).with_parameter("l2.weight", SHARDED)
    plan = build_plan(graph, strategy, FOUR)
    for sync in plan.syncs:
        assert len({strategy.sync(region.parameter) for region in sync.regions}) == 1
    assert sum(gradient_bytes(plan, sync) for sync in plan.syncs) == sum(tensor.bytes for tensor in graph.parameters)


def test_regions_are_copied_where_their_readers_are() -> None:
    """Halves of a weight, each read by two devices of a host: they share it, and nothing leaves the host; or by one of each."""
    graph = chain(8, 4, 4)
    on_one, on_both = {("sharded", (0, 1)), ("sharded", (2, 3))}, {("all_reduce", (0, 2)), ("all_reduce", (1, 3))}
    for devices, groups in (((0, 2, 1, 3), on_one), ((0, 1, 2, 3), on_both)):
        op = next(op for op in graph.operators if op.parameters)
        degrees = tuple(2 if factor.kind.value in ("sample", "parameter") and factor.size % 2 == 0 else 1 for factor in op.factors)
        strategy = data_parallel(graph, FOUR).with_operator(op.name, OpConfig(degrees, devices))
        strategy = strategy.with_changes(parameters={operand.tensor: SHARDED_IN_HOSTS for operand in op.parameters})
        own = {operand.tensor for operand in op.parameters}
        plan = build_plan(graph, strategy, FOUR)
        assert {(sync.method, sync.readers) for sync in plan.syncs if sync.parameter in own} == groups


def test_a_device_holds_a_share_of_its_host() -> None:
    graph, topology = layers(16, 512), cluster([4, 4], GPU)
    simulator = Simulator(graph, topology, RooflineCosts(topology), optimizer_states=2)
    found = [simulator.run(make(graph, topology)).memory_over_time for make in (fsdp, hsdp, data_parallel)]
    peaks = [max(curve.peak_bytes for curve in curves) for curves in found]
    size = sum(tensor.bytes for tensor in graph.parameters)
    # Values, two states and sums of gradients: a quarter, no eighth. But what comes in a scatter is added up at once, to be summed over
    # hosts, where with one copy two scatters may be under way, and a third begins.
    moving = (UNDER_WAY + 1) * max(tensor.bytes for tensor in graph.parameters)
    assert 3 * size / 8 - moving <= peaks[1] - peaks[0] <= 4 * size / 8 - moving / 2
    assert peaks == sorted(peaks) and peaks[2] > 2 * peaks[1]
