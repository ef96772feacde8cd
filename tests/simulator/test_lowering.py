"""Timed tasks: which there are, what they wait for, what they put on links, and what holds for every strategy's schedule."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given

from soap.cluster.topology import Topology
from soap.model.graph import OperatorGraph, TensorKind
from soap.model.regions import volume
from soap.plan.plan import AGAIN, sync_name, update_name
from soap.plan.syncs.bucketing import gradient_bytes, idle_shards
from soap.simulator.analysis.timeline import bytes_moved, link_bytes
from soap.simulator.communication.allreduce import allreduce_bytes
from soap.simulator.communication.offloading import names_behind_links
from soap.simulator.lowering import PlanBuilder, build_plan, lower
from soap.simulator.reference import execution_order, simulate
from soap.simulator.tasks import TaskGraph, TaskKind
from soap.strategy.config import Strategy
from tests.graph_builder import GraphBuilder, counting
from tests.simulator.examples import (
    PointCosts,
    batch_split,
    by_name,
    chain,
    counts,
    finish,
    on,
    pairwise_cluster,
    predecessors,
    strategy,
    units,
)
from tests.strategies import cases, cluster

FOUR = pairwise_cluster(2, 2)
Case = tuple[OperatorGraph, Topology, Strategy]


def lowered(graph: OperatorGraph, chosen: Strategy, topology: Topology = FOUR) -> TaskGraph:
    return lower(build_plan(graph, chosen, topology), topology, PointCosts())


@pytest.mark.parametrize("devices", [2, 3, 4])
def test_data_parallelism_only_reduces_the_loss_and_synchronizes(devices: int) -> None:
    graph = chain(8, 2, 6, 3)
    tasks = lowered(graph, batch_split(graph, range(devices)))
    assert counts(tasks) == {
        TaskKind.FORWARD: 3 * devices,
        TaskKind.BACKWARD: 3 * devices,
        TaskKind.REDUCE: 1,
        TaskKind.SYNC: 1,
        TaskKind.UPDATE: devices,
    }
    synced = {task.name: task.bytes for task in tasks.tasks if task.kind is TaskKind.SYNC}
    assert synced == {"sync l2.weight[0]+1": 2 * (devices - 1) * (6 * 2 + 3 * 6) * 4}
    assert by_name(tasks)["reduce loss[]#0"].bytes == 2 * (devices - 1) * 4


def test_devices_with_their_own_labels_count_them_before_the_loss() -> None:
    """Two sums of one number each: nothing is counted where all labels are on one device, or are given to all."""
    graph, own = counting(chain(8, 2, 6, 3)), replace(FOUR, own_samples=True)
    tasks = lowered(graph, batch_split(graph, range(3)), own)
    counted = by_name(tasks)["count labels of loss#0"]
    assert (counted.kind, counted.bytes, counted.predecessors) == (TaskKind.REDUCE, 2 * 2 * 8, ())
    assert counted.resources == by_name(tasks)["reduce loss[]#0"].resources
    assert sum(link_bytes(tasks).values()) >= bytes_moved(tasks)  # every sum's devices are known
    for tile in range(3):
        assert "count labels of loss#0" in predecessors(tasks, f"forward loss[{tile}]")
    for topology, devices in ((FOUR, range(3)), (own, range(1))):
        assert not any("count" in task.name for task in lowered(graph, batch_split(graph, devices), topology).tasks)
    twice = batch_split(graph, range(3)).with_operator("loss", on(0, 1, 2, 3, degrees=(2,), replicas=2))
    assert {name for name in by_name(lowered(graph, twice, own)) if "count" in name} == {f"count labels of loss#{i}" for i in range(2)}


def test_one_device_has_nothing_to_send() -> None:
    graph = chain(8, 2, 6, 3)
    tasks = lowered(graph, batch_split(graph, [2]))
    assert counts(tasks) == {TaskKind.FORWARD: 3, TaskKind.BACKWARD: 3, TaskKind.UPDATE: 1}
    assert sum(task.bytes for task in tasks.tasks) == 0
    assert {task.resources for task in tasks.tasks} == {(2,)}


def test_resources_of_transfers_and_rings_are_links_behind_the_devices() -> None:
    split = strategy(l1=on(0, 3, degrees=(2, 1, 1)), loss=on(3, degrees=(1,)))
    named = by_name(lowered(chain(4, 2, 6), split))
    transfer = named["transfer l1[0:2,0:6] 0->3"]
    assert (transfer.resources, transfer.bytes, units(transfer.duration_ns)) == ((4 + 2,), 2 * 6 * 4, 48)
    back = named["transfer gradient of l1[0:2,0:6] 3->0"]
    assert (back.resources, back.bytes) == ((4 + 9,), 48)
    sync = named["sync l1.weight[0]"]
    assert (sync.resources, sync.bytes, units(sync.duration_ns)) == ((4 + 2, 4 + 9), 2 * 48, 48 + 24)


def test_a_route_over_switches_holds_every_link_on_it() -> None:
    topology = cluster([1, 1])
    split = strategy(l1=on(0, degrees=(1, 1, 1)), loss=on(1, degrees=(1,)))
    transfer = by_name(lowered(chain(4, 2, 6), split, topology))["transfer l1[0:4,0:6] 0->1"]
    names = [topology.links[resource - 2].name for resource in transfer.resources]
    assert names == ["host0/device0>host0/switch", "host0/switch>network", "network>host1/switch", "host1/switch>host1/device0"]


def test_an_uneven_split_fetches_what_lies_elsewhere() -> None:
    split = strategy(l1=on(0, 1, degrees=(2, 1, 1)), loss=on(0, 1, 1, degrees=(3,)))
    tasks = lowered(chain(8, 2, 6), split)
    assert predecessors(tasks, "forward loss[1]") == {"forward l1[1]", "transfer l1[3:4,0:6] 0->1"}
    assert predecessors(tasks, "forward loss[2]") == {"forward l1[1]"}
    assert predecessors(tasks, "transfer gradient of l1[3:4,0:6] 1->0") == {"backward loss[1]"}
    assert predecessors(tasks, "backward l1[0]") == {
        "forward l1[0]",
        "backward loss[0]",
        "transfer gradient of l1[3:4,0:6] 1->0",
    }


def test_partial_results_are_summed_there_and_back() -> None:
    split = strategy(l1=on(0, 1, degrees=(1, 2, 1)), l2=on(0, 1, degrees=(1, 1, 2)), loss=on(0, degrees=(1,)))
    tasks = lowered(chain(4, 2, 6, 8), split)
    assert predecessors(tasks, "reduce l1[0:4,0:6]#0") == {"forward l1[0]", "forward l1[1]"}
    assert predecessors(tasks, "forward l2[1]") == {"reduce l1[0:4,0:6]#0"}
    assert predecessors(tasks, "reduce gradient of l1[0:4,0:6]#0") == {"backward l2[0]", "backward l2[1]"}
    for tile in (0, 1):
        assert predecessors(tasks, f"backward l1[{tile}]") == {f"forward l1[{tile}]", "reduce gradient of l1[0:4,0:6]#0"}
    named = by_name(tasks)
    assert named["reduce gradient of l1[0:4,0:6]#0"].bytes == named["reduce l1[0:4,0:6]#0"].bytes == 2 * 4 * 6 * 4
    assert counts(tasks)[TaskKind.REDUCE] == 2


def test_a_sum_of_which_each_device_reads_a_part_is_scattered_there_and_gathered_back() -> None:
    split = strategy(l1=on(0, 1, degrees=(1, 2, 1)), loss=on(0, 1, degrees=(2,)))
    tasks = lowered(chain(4, 2, 6), split)
    assert predecessors(tasks, "reduce-scatter l1[0:4,0:6]#0") == {"forward l1[0]", "forward l1[1]"}
    assert predecessors(tasks, "forward loss[1]") == {"reduce-scatter l1[0:4,0:6]#0"}
    assert predecessors(tasks, "all-gather gradient of l1[0:4,0:6]#0") == {"backward loss[0]", "backward loss[1]"}
    for tile in (0, 1):
        assert predecessors(tasks, f"backward l1[{tile}]") == {f"forward l1[{tile}]", "all-gather gradient of l1[0:4,0:6]#0"}
    named = by_name(tasks)
    there, back = named["reduce-scatter l1[0:4,0:6]#0"], named["all-gather gradient of l1[0:4,0:6]#0"]
    assert there.bytes == back.bytes == 4 * 6 * 4  # half of an all-reduce's
    assert there.flows == back.flows == ((0, 1, 48), (1, 0, 48)) or set(there.flows) == set(back.flows) == {(0, 1, 48), (1, 0, 48)}
    assert there.kind is back.kind is TaskKind.REDUCE
    assert {task.name for task in tasks.tasks if task.kind is TaskKind.REDUCE} == {there.name, back.name, "reduce loss[]#0"}


def test_an_all_gather_waits_for_all_its_parts_and_returns_their_gradients() -> None:
    split = strategy(l1=on(0, 1, 2, degrees=(3, 1, 1)), l2=on(0, 1, 2, degrees=(1, 1, 3)), loss=on(3, degrees=(1,)))
    tasks = lowered(chain(7, 2, 6, 9), split)
    name = "all-gather l1[0:7,0:6] 0,1,2"
    assert predecessors(tasks, name) == {"forward l1[0]", "forward l1[1]", "forward l1[2]"}
    assert predecessors(tasks, "forward l2[1]") == {name, "forward l1[1]"}
    there, back = by_name(tasks)[name], by_name(tasks)["all-gather gradient of l1[0:7,0:6] 0,1,2"]
    row = 6 * 4
    assert set(there.flows) == {(0, 1, 3 * row), (0, 2, 3 * row), (1, 0, 2 * row), (1, 2, 2 * row), (2, 0, 2 * row), (2, 1, 2 * row)}
    assert set(back.flows) == {(target, source, size) for source, target, size in there.flows}
    assert there.bytes == back.bytes == 2 * 7 * row
    assert there.kind is TaskKind.EXCHANGE
    assert predecessors(tasks, back.name) == {"backward l2[0]", "backward l2[1]", "backward l2[2]"}
    assert predecessors(tasks, "backward l1[1]") == {"forward l1[1]", back.name, "backward l2[1]"}
    assert {4 + link for link in range(12) if FOUR.links[link].source != "d3" and FOUR.links[link].target != "d3"} == set(there.resources)


def test_a_broadcast_goes_along_a_tree_and_comes_back_as_a_sum() -> None:
    split = strategy(l1=on(1, degrees=(1, 1, 1)), l2=on(0, 1, 2, 3, degrees=(1, 1, 4)), loss=on(3, degrees=(1,)))
    tasks = lowered(chain(4, 2, 6, 8), split)
    there, back = by_name(tasks)["broadcast l1[0:4,0:6] 0,1,2,3"], by_name(tasks)["broadcast gradient of l1[0:4,0:6] 0,1,2,3"]
    assert there.flows == ((1, 0, 96), (1, 2, 96), (0, 3, 96))
    assert set(back.flows) == {(0, 1, 96), (2, 1, 96), (3, 0, 96)}
    assert there.bytes == back.bytes == 3 * 96
    assert predecessors(tasks, "forward l2[1]") == {"forward l1[0]"}
    assert predecessors(tasks, "forward l2[2]") == {there.name}


def test_partial_results_of_one_device_only_wait_for_each_other() -> None:
    split = strategy(l1=on(1, 1, degrees=(1, 2, 1)), loss=on(1, degrees=(1,)))
    tasks = lowered(chain(4, 2, 6), split)
    assert TaskKind.REDUCE not in counts(tasks)
    assert predecessors(tasks, "forward loss[0]") == {"forward l1[0]", "forward l1[1]"}
    assert predecessors(tasks, "backward l1[1]") == {"forward l1[1]", "backward loss[0]"}


def test_the_loss_starts_the_backward_pass_after_its_sum_and_gets_no_gradient() -> None:
    graph = chain(4, 2, 6)
    tasks = lowered(graph, batch_split(graph, [0, 1]))
    assert predecessors(tasks, "backward loss[1]") == {"forward loss[1]", "reduce loss[]#0"}
    assert "reduce gradient of loss[]#0" not in by_name(tasks)


def test_replicas_that_nobody_reads_have_no_backward() -> None:
    split = strategy(l1=on(0, 1, degrees=(1, 1, 1), replicas=2), loss=on(1, 0, degrees=(1,), replicas=2))
    tasks = lowered(chain(4, 2, 6), split)
    backward = [task.name for task in tasks.tasks if task.kind is TaskKind.BACKWARD]
    assert backward == ["backward loss[0]", "backward l1[1]"]
    assert predecessors(tasks, "sync l1.weight[0]") == {"backward l1[1]"}
    assert {task.name for task in tasks.tasks if task.kind is TaskKind.UPDATE} == {"update @0", "update @1"}


def test_each_replica_takes_the_gradient_of_its_own_readers() -> None:
    split = strategy(l1=on(0, 2, degrees=(1, 1, 1), replicas=2), loss=on(1, 2, degrees=(2,)))
    tasks = lowered(chain(4, 2, 6), split)
    assert predecessors(tasks, "backward l1[0]") == {"forward l1[0]", "transfer gradient of l1[0:2,0:6] 1->0"}
    assert predecessors(tasks, "backward l1[1]") == {"forward l1[1]", "backward loss[1]"}


def test_a_shared_fetch_returns_one_gradient_when_its_last_reader_is_done() -> None:
    g = GraphBuilder()
    x = g.linear(g.input("x", 4, 2), 6, bias=False, name="l1")
    graph = finish(g, g.elementwise(x, name="a"), g.elementwise(x, name="b"))
    single, other = on(0, degrees=(1, 1)), on(1, degrees=(1, 1))
    split = strategy(l1=on(0, degrees=(1, 1, 1)), a=other, b=other, loss=on(1, degrees=(1,)))
    tasks = lowered(graph, split)
    assert counts(tasks)[TaskKind.TRANSFER] == 2
    assert predecessors(tasks, "transfer gradient of l1[0:4,0:6] 1->0") == {"backward a[0]", "backward b[0]"}
    tasks = lowered(graph, split.with_operator("a", single))
    assert predecessors(tasks, "backward l1[0]") == {"forward l1[0]", "backward a[0]", "transfer gradient of l1[0:4,0:6] 1->0"}


def test_a_first_reader_without_gradient_does_not_hold_back_the_others() -> None:
    g = GraphBuilder()
    x = g.linear(g.input("x", 4, 2), 6, bias=False, name="l1")
    g.elementwise(x, name="watch")
    g.tensors["watch"] = g.tensors["watch"].__class__("watch", (4, 6), "float32", 4, TensorKind.ACTIVATION, False)
    graph = finish(g, x)
    tasks = lowered(graph, strategy(l1=on(0, degrees=(1, 1, 1)), watch=on(1, degrees=(1, 1)), loss=on(1, degrees=(1,))))
    assert counts(tasks)[TaskKind.TRANSFER] == 2
    assert predecessors(tasks, "transfer gradient of l1[0:4,0:6] 1->0") == {"backward loss[0]"}
    assert "backward watch[0]" not in by_name(tasks)


def test_frozen_parameters_and_what_comes_before_them_have_no_backward() -> None:
    g = GraphBuilder()
    frozen = g.linear(g.input("x", 4, 2), 6, weight=g.parameter("w", 6, 2, frozen=True), bias=False, name="l1")
    graph = finish(g, g.linear(frozen, 3, bias=False, name="l2"))
    split = strategy(l1=on(0, degrees=(1, 1, 1)), l2=on(1, degrees=(1, 1, 1)), loss=on(1, degrees=(1,)))
    assert counts(lowered(graph, split)) == {
        TaskKind.FORWARD: 3,
        TaskKind.BACKWARD: 2,
        TaskKind.TRANSFER: 1,
        TaskKind.UPDATE: 1,
    }


def test_a_shared_parameter_is_synchronized_shard_by_shard() -> None:
    g = GraphBuilder()
    x = g.linear(g.input("x", 4, 6), 6, bias=False, name="a")
    graph = finish(g, g.linear(x, 6, weight="a.weight", bias=False, name="b"))
    split = strategy(a=on(0, 1, degrees=(1, 1, 2)), b=on(0, 2, 0, degrees=(1, 1, 3)), loss=on(0, degrees=(1,)))
    tasks = lowered(graph, split)
    assert predecessors(tasks, "sync a.weight[1]") == {"backward a[0]", "backward b[1]"}
    assert by_name(tasks)["sync a.weight[3]"].bytes == 2 * 2 * 6 * 4
    backward = {f"backward {name}" for name in ("a[0]", "b[0]", "b[2]", "loss[0]")}
    assert predecessors(tasks, "update @0") == {*backward, "sync a.weight[1]", "sync a.weight[3]"}
    assert predecessors(tasks, "update @2") == {"backward b[1]", "sync a.weight[1]", "sync a.weight[2]"}
    assert [units(by_name(tasks)[f"update @{device}"].duration_ns) for device in range(3)] == [3, 2, 2]  # one per shard


def test_ids_stay_when_another_operator_changes() -> None:
    graph = chain(8, 4, 4, 4, 4, 4)
    before = batch_split(graph, [0, 1])
    after = before.with_operator("l1", on(3, 2, 1, 0, degrees=(2, 1, 2)))
    old, new = by_name(lowered(graph, before)), by_name(lowered(graph, after))
    untouched = [name for name in old if "l1" not in name and name in new]
    assert {"forward l2[0]", "backward l4[1]", "update @1", "reduce loss[]#0"} <= set(untouched)
    assert [old[name].id for name in untouched] == [new[name].id for name in untouched]


@given(cases(servers=True))
def test_task_graphs_are_in_order_with_unique_ids(case: Case) -> None:
    graph, topology, chosen = case
    tasks = lowered(graph, chosen, topology)
    assert len({task.id for task in tasks.tasks}) == len(tasks.tasks)
    resources = range(topology.device_count + len(topology.links) + len(names_behind_links(topology)))
    for position, task in enumerate(tasks.tasks):
        assert len(task.id) == 6 and task.duration_ns >= 1
        assert all(p < position for p in task.predecessors)
        assert set(task.resources) <= set(resources) and list(task.predecessors) == sorted(set(task.predecessors))
        computes = (TaskKind.FORWARD, TaskKind.RECOMPUTE, TaskKind.BACKWARD)
        assert (task.tile is not None) == (task.kind in computes and bool(task.resources))  # needs have neither
        between_devices = task.kind in (TaskKind.TRANSFER, TaskKind.EXCHANGE, TaskKind.REDUCE, TaskKind.SYNC) and " host @" not in task.name
        assert (task.bytes > 0) == between_devices
        assert not task.flows or sum(size for *_, size in task.flows) == task.bytes


@given(cases())
def test_bytes_on_links_are_those_of_the_plan(case: Case) -> None:
    graph, topology, chosen = case
    plan = PlanBuilder(graph, topology).build(chosen)
    tasks = lower(plan, topology, PointCosts()).tasks
    moved = {kind: sum(task.bytes for task in tasks if task.kind is kind) for kind in TaskKind}
    forward = sum(
        volume(piece.box) * graph.tensors[fetch.tensor].itemsize
        for fetch in plan.fetches
        for piece in fetch.pieces
        if plan.holdings[piece.holding].device != fetch.device
    )
    carried = (TaskKind.TRANSFER, TaskKind.EXCHANGE)
    gradients = sum(task.bytes for task in tasks if task.kind in carried and "gradient of" in task.name)
    again = sum(task.bytes for task in tasks if task.kind in carried and task.name.endswith(AGAIN))
    assert moved[TaskKind.TRANSFER] + moved[TaskKind.EXCHANGE] == forward + gradients + again and gradients <= forward
    assert again <= forward and (again == 0 or plan.gathered_again)
    kept = ((volume(shard.box) * graph.tensors[shard.parameter].itemsize, len(shard.devices)) for shard in plan.shards)
    assert moved[TaskKind.SYNC] <= sum(allreduce_bytes(size, count) for size, count in kept)


@given(cases())
def test_gradients_are_summed_in_buckets_and_every_device_updates_once(case: Case) -> None:
    graph, topology, chosen = case
    tasks = lowered(graph, chosen, topology)
    plan, named = tasks.plan, by_name(tasks)
    backward = {task.tile: position for position, task in enumerate(tasks.tasks) if task.kind is TaskKind.BACKWARD}
    syncs = {position for position, task in enumerate(tasks.tasks) if task.kind is TaskKind.SYNC}
    assert len(syncs) == sum(len(bucket.readers) > 1 for bucket in plan.syncs)
    for bucket in plan.syncs:
        users = {tile for i in bucket.shards for tile, _ in plan.shards[i].uses}
        if len(bucket.readers) > 1:
            sync = named[sync_name(bucket)]
            assert set(sync.predecessors) == {backward[tile] for tile in users if tile in backward}
            assert sync.bytes == allreduce_bytes(gradient_bytes(plan, bucket), len(bucket.readers))
    devices_of = {sync_name(bucket): bucket.readers for bucket in plan.syncs}
    found = {i for bucket in plan.syncs for i in bucket.shards}
    for i, shard in enumerate(plan.shards):  # whatever gets a gradient is in a bucket
        assert i in found or not (shard.trainable and any(tile in backward for tile, _ in shard.uses))
    for device in range(topology.device_count):
        kept = [i for i in (*found, *idle_shards(plan)) if device in plan.shards[i].devices]
        assert (update_name(device) in named) == bool(kept)
        if kept:
            update = named[update_name(device)]
            assert units(update.duration_ns) == len(kept)
            own = {place for tile, place in backward.items() if plan.tiles[tile].device == device}
            joined = {place for place in syncs if device in devices_of[tasks.tasks[place].name]}
            assert set(update.predecessors) == own | joined
    for parameter in filter(lambda own: own.requires_grad, graph.parameters):  # every element has a gradient from somewhere
        shards = [i for i, shard in enumerate(plan.shards) if shard.parameter == parameter.name]
        assert found & set(shards) or not shards


@given(cases(servers=True))
def test_schedules_are_legal(case: Case) -> None:
    graph, topology, chosen = case
    tasks = lowered(graph, chosen, topology)
    schedule = simulate(tasks)
    start, end = schedule.start_ns.tolist(), schedule.end_ns.tolist()
    busy: dict[int, list[tuple[int, int]]] = defaultdict(list)
    longest = [0] * len(start)
    for position, task in enumerate(tasks.tasks):
        assert end[position] - start[position] == task.duration_ns
        assert all(start[position] >= end[p] for p in task.predecessors)
        longest[position] = task.duration_ns + max((longest[p] for p in task.predecessors), default=0)
        for resource in task.resources:
            busy[resource].append((start[position], start[position] + task.held_ns))
    for spans in busy.values():
        spans.sort()
        assert all(a[1] <= b[0] for a, b in pairwise(spans))
    work = max(sum(b - a for a, b in spans) for spans in busy.values())
    assert max(work, *longest, 0) <= schedule.makespan_ns <= sum(task.duration_ns for task in tasks.tasks)


@given(cases(servers=True))
def test_the_execution_order_is_topological(case: Case) -> None:
    graph, topology, chosen = case
    tasks = lowered(graph, chosen, topology)
    found = execution_order(tasks, simulate(tasks))
    order = found.forward
    assert sorted(order) == list(range(len(tasks.plan.tiles)))
    place, back = ({tile: i for i, tile in enumerate(own)} for own in (order, found.backward))
    for fetch in tasks.plan.fetches:
        for piece in fetch.pieces:
            holding = tasks.plan.holdings[piece.holding]
            makers = (holding.tile,) if holding.reduction is None else tasks.plan.reductions[holding.reduction].tiles
            assert max(place[maker] for maker in makers) < min(place[tile] for tile, _ in fetch.consumers)
            needed = [back[tile] for tile, _ in fetch.consumers if tile in back and tasks.plan.graph.tensors[fetch.tensor].requires_grad]
            assert all(max(needed) < back[maker] for maker in makers if needed)
