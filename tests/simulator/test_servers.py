"""Parameter servers: which tasks there are, where they run, and how long they take."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings

from soap.errors import StrategyError
from soap.graph import OperatorGraph
from soap.simulator.buckets import shard_bytes
from soap.simulator.lowering import build_plan, lower
from soap.simulator.memory import memory_use
from soap.simulator.plan import Served, pull_name, push_name, serve_name
from soap.simulator.reference import simulate
from soap.simulator.servers import HOST_CORE, core_names, core_type, first_cores, partitions
from soap.simulator.tasks import TaskGraph, TaskKind
from soap.simulator.timeline import busy_time_ns, chrome_trace, link_bytes, resource_names
from soap.strategy import Strategy, SyncConfig
from soap.topology import Topology
from tests.simulator.examples import UNIT_NS, PointCosts, batch_split, by_name, chain, on, pairwise_cluster, predecessors, strategy, units
from tests.strategies import CPU, GPU, cases, cluster

TWO = pairwise_cluster(1, 1)
SERVER = SyncConfig("parameter_server")


def lowered(graph: OperatorGraph, chosen: Strategy, topology: Topology = TWO) -> TaskGraph:
    return lower(build_plan(graph, chosen, topology), topology, PointCosts())


def test_gradients_are_pushed_and_values_pulled() -> None:
    graph = chain(4, 2, 3)
    tasks = lowered(graph, batch_split(graph, [0, 1]).with_parameter("l1.weight", SERVER))
    assert (tasks.plan.buckets, tasks.plan.served) == ((), (Served(0, 1),))
    schedule = simulate(tasks)
    spans = {task.name: (units(a), units(b)) for task, a, b in zip(tasks.tasks, schedule.start_ns, schedule.end_ns, strict=True)}
    assert spans["backward l1[1]"] == (24, 48)
    assert spans["push l1.weight[0] 1->0"] == (48, 72)
    assert spans["serve l1.weight[0]/0"] == (72, 72 + 24 + 1)  # 24 bytes are added, one update
    assert spans["pull l1.weight[0] 0->1"] == (97, 121)
    assert units(schedule.makespan_ns) == 121
    named, names = by_name(tasks), resource_names(tasks)
    assert [names[r] for r in named["push l1.weight[0] 1->0"].resources] == ["d1->d0"]
    assert [names[r] for r in named["serve l1.weight[0]/0"].resources] == ["h0/core0"]
    assert predecessors(tasks, "serve l1.weight[0]/0") == {"backward l1[0]", "push l1.weight[0] 1->0"}
    assert not any(name.startswith(("sync", "update")) for name in named)
    assert link_bytes(tasks) == {"d0->d1": 24 + 4, "d1->d0": 24 + 4}  # beside the loss
    assert busy_time_ns(tasks)["h0/core0"] == 25 * UNIT_NS and "h1/core0" not in busy_time_ns(tasks)
    threads = [e["args"]["name"] for e in chrome_trace(tasks, schedule)["traceEvents"] if e["name"] == "thread_name"]
    assert threads == ["d0", "d1", "d0->d1", "d1->d0", "h0/core0"]


def test_other_parameters_are_summed_as_ever() -> None:
    graph = chain(4, 2, 3, 5)
    chosen = batch_split(graph, [0, 1])
    tasks, plain = lowered(graph, chosen.with_parameter("l1.weight", SERVER)), lowered(graph, chosen)
    assert set(by_name(plain)) - set(by_name(tasks)) == {"sync l2.weight[0]+1"}
    assert predecessors(tasks, "update @1") >= {"sync l2.weight[0]"}
    assert units(by_name(tasks)["update @1"].duration_ns) == 1
    memory, usual = memory_use(tasks.plan, 2), memory_use(plain.plan, 2)
    assert [use.optimizer for use in memory] == [use.optimizer - 2 * 24 for use in usual]  # the server has the states
    assert [use.gradients for use in memory] == [use.gradients for use in usual]


def test_cores_of_the_host_take_partitions_in_turn() -> None:
    topology, graph = cluster([2, 1], CPU), chain(6, 4, 4, 4)
    server = SyncConfig("parameter_server", 3)
    plan = build_plan(graph, batch_split(graph, [0, 2]).with_parameter("l1.weight", server).with_parameter("l2.weight", server), topology)
    first = first_cores(topology)
    assert first == [3 + len(topology.links), 3 + len(topology.links) + 4]
    found = list(partitions(plan, topology))
    assert [(part.served, part.index, part.resource - first[0]) for part in found] == [
        (0, 0, 0), (0, 1, 1), (0, 2, 2), (1, 0, 3), (1, 1, 0), (1, 2, 1),
    ]  # fmt: skip
    assert [part.size for part in found] == [24, 20, 20] * 2
    assert core_names(topology)[:5] == ["host0/core0", "host0/core1", "host0/core2", "host0/core3", "host1/core0"]


def test_no_partition_is_empty() -> None:
    graph = chain(4, 2, 3)
    chosen = batch_split(graph, [0, 1]).with_parameter("l1.weight", SyncConfig("parameter_server", 4096))
    assert [part.size for part in partitions(build_plan(graph, chosen, TWO), TWO)] == [4] * 6


def test_a_device_without_gradient_only_pulls() -> None:
    split = strategy(l1=on(0, 1, degrees=(1, 1, 1), replicas=2), loss=on(1, 0, degrees=(1,), replicas=2))
    tasks = lowered(chain(4, 2, 6), split.with_parameter("l1.weight", SERVER))
    assert predecessors(tasks, "push l1.weight[0] 1->0") == {"backward l1[1]"}
    assert predecessors(tasks, "serve l1.weight[0]/0") == {"push l1.weight[0] 1->0"}
    assert units(by_name(tasks)["serve l1.weight[0]/0"].duration_ns) == 1  # nothing to add
    assert "pull l1.weight[0] 0->1" in by_name(tasks)


def test_figures_of_a_core() -> None:
    assert core_type(cluster([1, 1], CPU), 1) is CPU
    assert core_type(cluster([1, 1], GPU), 1) is HOST_CORE


def test_what_one_device_keeps_needs_no_server() -> None:
    graph = chain(4, 2, 3)
    tasks = lowered(graph, batch_split(graph, [1]).with_parameter("l1.weight", SERVER))
    assert tasks.plan.served == ()
    assert "update @1" in by_name(tasks)


@pytest.mark.parametrize("count", [0, -1, 4097])
def test_impossible_numbers_of_partitions(count: int) -> None:
    with pytest.raises(StrategyError, match=f"^synchronization by parameter_server in {count} partitions: expected 1 to 4096$"):
        SyncConfig("parameter_server", count)
    with pytest.raises(StrategyError, match=r"^synchronization by allreduce in 2 partitions: expected 1 to 1$"):
        SyncConfig("allreduce", 2)


@settings(max_examples=80, deadline=None)
@given(cases(servers=True))
def test_what_holds_for_every_plan(case: tuple[OperatorGraph, Topology, Strategy]) -> None:
    graph, topology, chosen = case
    tasks = lowered(graph, chosen, topology)
    plan, named = tasks.plan, by_name(tasks)
    plain = build_plan(graph, replace(chosen, parameters={}), topology)
    in_buckets = {i for bucket in plan.buckets for i in bucket.shards}
    served = {own.shard for own in plan.served}
    assert in_buckets | served == {i for bucket in plain.buckets for i in bucket.shards} and not in_buckets & served
    sizes: Counter[int] = Counter()
    for part in partitions(plan, topology):
        sizes[part.served] += part.size
        task = named[serve_name(plan, plan.served[part.served], part.index)]
        assert (task.resources, task.kind, task.bytes) == ((part.resource,), TaskKind.UPDATE, 0)
        first = plan.shards[plan.served[part.served].shard].devices[0]
        assert resource_names(tasks)[part.resource].startswith(f"{topology.hosts[topology.devices[first].host].name}/core")
    active = {task.tile for task in tasks.tasks if task.kind is TaskKind.BACKWARD}
    for number, own in enumerate(plan.served):
        shard = plan.shards[own.shard]
        assert sizes[number] == shard_bytes(graph, shard) and len(shard.devices) > 1
        assert chosen.sync(shard.parameter).method == "parameter_server"
        pushing = {plan.tiles[tile].device for tile, _ in shard.uses if tile in active} - {shard.devices[0]}
        assert {d for d in shard.devices if push_name(plan, own, d) in named} == pushing
        assert {d for d in shard.devices if pull_name(plan, own, d) in named} == set(shard.devices[1:])
