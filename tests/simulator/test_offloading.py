"""Plans whose optimizer states are in hosts' memory: what is copied, updated and held where, and what waits for what."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

import pytest

from soap.cluster.host_links import LATENCY_SECONDS, host_link
from soap.cluster.topology import Host, Topology
from soap.errors import StrategyError
from soap.model.graph import OperatorGraph
from soap.plan.compression.training import PlannedTraining
from soap.plan.offloading import from_host_name, host_update_name, offloaded_bytes, to_host_name
from soap.plan.plan import Plan, update_name
from soap.plan.syncs.amounts import COUNT_BYTES
from soap.plan.syncs.clipping import NORM_NAME
from soap.plan.syncs.sharded_state import gather_name
from soap.profiles.roofline import RooflineCosts
from soap.simulator.communication.offloading import HOST_BYTES_PER_SECOND, offload_updater
from soap.simulator.folding import fold
from soap.simulator.lowering import PlanBuilder, build_plan, lower
from soap.simulator.memory.hosts import host_use
from soap.simulator.simulate import Simulator
from soap.simulator.tasks import Task
from soap.strategy.classical import data_parallel, zero1
from soap.strategy.config import Strategy, SyncConfig
from soap.strategy.named import named
from soap.strategy.sync import SPARSE_ALL_GATHER, compressed, offloaded, parameter_server
from tests.graph_builder import transformer
from tests.strategies import CPU, GPU, LOSSY, cluster

GRAPH = transformer()
SIZE = sum(tensor.bytes for tensor in GRAPH.parameters if tensor.requires_grad)
GPUS, CPUS = cluster([2, 2], GPU), cluster([2, 2], CPU)


def tasks_of(strategy: Strategy, topology: Topology, graph: OperatorGraph = GRAPH) -> tuple[Plan, dict[str, Task], dict[str, set[str]]]:
    """Plan, tasks by name, and the names of each one's predecessors."""
    plan = build_plan(graph, strategy, topology)
    tasks = lower(plan, topology, RooflineCosts(topology)).tasks
    before = {task.name: {tasks[other].name for other in task.predecessors} for task in tasks}
    return plan, {task.name: task for task in tasks}, before


@pytest.mark.parametrize("topology", [GPUS, CPUS], ids=["gpu", "cpu"])
def test_gradients_go_down_hosts_update_values_come_up(topology: Topology) -> None:
    plan, tasks, before = tasks_of(named("data_parallel+offload", GRAPH, topology), topology)
    assert offloaded_bytes(plan) == dict.fromkeys(range(4), SIZE)
    costs = RooflineCosts(topology)
    for device in range(4):
        down, host, up = to_host_name(device), host_update_name(device), from_host_name(device)
        assert (before[down], before[host], before[up]) == ({update_name(device)}, {down}, {host})
        assert tasks[update_name(device)].duration_ns == 1
        link = host_link(topology, device)
        copied_ns = ceil((link.latency_seconds + SIZE / link.bandwidth_bytes_per_second) * 1e9)
        assert tasks[down].duration_ns == tasks[up].duration_ns == copied_ns
        sizes = [plan.graph.tensors[plan.shards[n].parameter].bytes for n in sorted(plan.offloaded)]
        assert tasks[host].duration_ns == sum(costs.update_ns(size, offload_updater(topology, device)) for size in sizes)
        on_device = topology.devices[device].type.kind == "cpu"
        assert all((tasks[name].resources == (device,)) == on_device for name in (down, host, up))
        assert not any(tasks[name].bytes for name in (down, host, up))  # they go to no other device
    names = [name(device) for device in range(4) for name in (to_host_name, host_update_name, from_host_name)]
    held = [tasks[name].resources[0] for name in names]
    assert len({*held}) == (4 if topology is CPUS else 12)


@pytest.mark.parametrize("topology", [GPUS, CPUS], ids=["gpu", "cpu"])
def test_values_of_parts_are_gathered_behind_the_copies_back(topology: Topology) -> None:
    plan, tasks, before = tasks_of(offloaded(GRAPH, zero1(GRAPH, topology)), topology)
    assert sum(offloaded_bytes(plan).values()) == SIZE
    assert all(sync.offload for sync in plan.syncs)
    for sync in plan.syncs:
        assert before[gather_name(sync)] == {from_host_name(device) for device in plan.owners(sync)}
    adding = topology is CPUS  # between GPUs the collective adds up what others send
    assert all((tasks[update_name(device)].duration_ns > 1) == adding for device in range(4))


def test_offloaded_and_other_parameters_travel_apart() -> None:
    name = GRAPH.parameters[0].name
    plan, tasks, before = tasks_of(zero1(GRAPH, GPUS).with_parameter(name, SyncConfig("parts", offload=True)), GPUS)
    away = [sync for sync in plan.syncs if sync.offload]
    assert [region.parameter for sync in away for region in sync.regions] == [name]
    for sync in plan.syncs:
        last = from_host_name if sync.offload else update_name
        assert before[gather_name(sync)] == {last(device) for device in plan.owners(sync)}
    usual = tasks_of(zero1(GRAPH, GPUS), GPUS)[1]
    assert 1 < tasks[update_name(0)].duration_ns < usual[update_name(0)].duration_ns


def test_hosts_wait_for_the_norm() -> None:
    plan = PlanBuilder(GRAPH, GPUS, PlannedTraining(clips=True)).build(offloaded(GRAPH, data_parallel(GRAPH, GPUS)))
    tasks = lower(plan, GPUS, RooflineCosts(GPUS)).tasks
    names = [task.name for task in tasks]
    assert NORM_NAME in {names[other] for other in tasks[names.index(update_name(0))].predecessors}
    assert {names[other] for other in tasks[names.index(to_host_name(0))].predecessors} == {update_name(0)}


def test_states_are_on_hosts_of_gpus() -> None:
    simulator = Simulator(GRAPH, GPUS, RooflineCosts(GPUS))
    usual, away = (simulator.run(named(name, GRAPH, GPUS)) for name in ("data_parallel", "data_parallel+offload"))
    kinds = [[(found["states"], found["values"]) for found in run.peak_by_kind] for run in (usual, away)]
    numbers = COUNT_BYTES * sum(tensor.requires_grad for tensor in GRAPH.parameters)  # Adam's, of its steps
    assert kinds == [[(2 * SIZE + numbers, SIZE)] * 4, [(0, SIZE)] * 4]
    assert usual.host_memory == (0, 0)
    counted = len([t for t in GRAPH.parameters if t.requires_grad])
    assert [size // (8 * SIZE) for size in away.host_memory] == [1, 1]  # two devices of a host: values, gradients, two states each
    assert all(0 <= size - 8 * SIZE <= 2 * 64 * counted for size in away.host_memory)
    small = replace(GPUS, hosts=tuple(replace(host, memory_bytes=4 * SIZE) for host in GPUS.hosts))
    lacking = Simulator(GRAPH, small, RooflineCosts(small)).run(named("data_parallel+offload", GRAPH, small))
    assert lacking.overflow_bytes == sum(away.host_memory) - 8 * SIZE


def test_a_cpu_holds_states_and_second_copies() -> None:
    simulator = Simulator(GRAPH, CPUS, RooflineCosts(CPUS))
    usual, away = (simulator.run(named(name, GRAPH, CPUS)) for name in ("data_parallel", "data_parallel+offload"))
    for one, other in zip(usual.memory_over_time, away.memory_over_time, strict=True):
        assert other.peak_bytes - one.peak_bytes == 2 * SIZE
    assert away.host_memory == (0, 0) == host_use(build_plan(GRAPH, data_parallel(GRAPH, CPUS), CPUS), CPUS)


def test_copies_contend_with_messages_over_pcie() -> None:
    """Where devices are joined by PCI Express, a copy holds the same links; beside NVLink there is a way of its own."""
    joined = tuple(replace(link, interconnect="pcie") for link in GPUS.links)
    topology = replace(GPUS, links=joined)
    link = host_link(topology, 1)
    assert {topology.links[i].source for i in link.down} == {topology.devices[1].name} == {topology.links[i].target for i in link.up}
    assert link.bandwidth_bytes_per_second == max(topology.effective_bandwidths[i] for i in link.down)
    _, tasks, _ = tasks_of(named("data_parallel+offload", GRAPH, topology), topology)
    for name, links in ((to_host_name, link.down), (from_host_name, link.up)):
        assert {4 + i for i in links} < {*tasks[name(1)].resources}
    fast = replace(GPUS, links=tuple(replace(link, interconnect="nvlink4") for link in GPUS.links))
    assert host_link(fast, 0).down == () and host_link(fast, 0).bandwidth_bytes_per_second == pytest.approx(63e9 * 0.762)
    assert host_link(GPUS, 0).bandwidth_bytes_per_second == pytest.approx(15.75e9 * 0.762)
    assert host_link(GPUS, 0).latency_seconds == LATENCY_SECONDS


def test_a_devices_share_of_its_host_updates() -> None:
    many = replace(GPUS, hosts=tuple(Host(host.name, 200, None) for host in GPUS.hosts))
    assert offload_updater(many, 0).memory_bandwidth_bytes_per_second == HOST_BYTES_PER_SECOND / 2  # of two devices; 100 cores read faster
    few = replace(GPUS, hosts=tuple(Host(host.name, 1, None) for host in GPUS.hosts))
    assert offload_updater(few, 0).memory_bandwidth_bytes_per_second == 1e10
    assert offload_updater(CPUS, 0) is CPUS.devices[0].type


@pytest.mark.parametrize("sync", [parameter_server(2), SPARSE_ALL_GATHER, parameter_server(rows=True), compressed(LOSSY[0])])
def test_other_methods_refuse_it(sync: SyncConfig) -> None:
    with pytest.raises(StrategyError, match="with offload: expected one of allreduce, zero, fsdp") as error:
        replace(sync, offload=True)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("topology", [GPUS, CPUS], ids=["gpu", "cpu"])
def test_what_crosses_links_is_as_without(topology: Topology) -> None:
    usual, away = (tasks_of(named(name, GRAPH, topology), topology) for name in ("zero1", "zero1+offload"))
    simulator = Simulator(GRAPH, topology, RooflineCosts(topology))
    one, other = (simulator.run(plan.strategy) for plan, *_ in (usual, away))
    assert one.link_bytes == other.link_bytes and one.bytes_moved == other.bytes_moved > 0


def test_it_is_not_folded() -> None:
    assert fold(GRAPH, CPUS, named("data_parallel+offload", GRAPH, CPUS)) == "optimizer states are offloaded"
