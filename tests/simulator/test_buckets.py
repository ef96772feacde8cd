"""Buckets: which gradients are summed together, in which order, and of what size."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from soap.cluster.topology import Topology
from soap.model.graph import DimMap, Factor, OperatorGraph
from soap.plan.plan import Plan, ShardSync
from soap.plan.syncs import bucketing as buckets
from soap.plan.syncs.bucketing import gradient_bytes, idle_shards, shard_bytes
from soap.simulator.lowering import build_plan
from soap.strategy.config import Strategy
from tests.graph_builder import ATTRIBUTE, GraphBuilder
from tests.simulator.examples import batch_split, chain, finish, on, pairwise_cluster, strategy
from tests.strategies import cases

THREE = pairwise_cluster(3)


def plan_of(graph: OperatorGraph, chosen: Strategy) -> Plan:
    return build_plan(graph, chosen, THREE)


def names(plan: Plan) -> list[list[str]]:
    return [[plan.shards[i].parameter for i in bucket.shards] for bucket in plan.syncs]


def limits(monkeypatch: pytest.MonkeyPatch, first: int, others: int) -> None:
    monkeypatch.setattr(buckets, "FIRST_BUCKET_BYTES", first)
    monkeypatch.setattr(buckets, "BUCKET_BYTES", others)


def test_shards_are_taken_in_the_order_of_the_backward_pass() -> None:
    graph = chain(8, 4, 5, 6, 7)
    assert names(plan_of(graph, batch_split(graph, [0, 1]))) == [["l3.weight", "l2.weight", "l1.weight"]]


def test_the_first_bucket_is_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = chain(8, 4, 4, 4, 4, 4, 4, 4)  # 64 bytes a layer
    limits(monkeypatch, 65, 129)
    found = names(plan_of(graph, batch_split(graph, [0, 1])))
    assert found == [["l6.weight", "l5.weight"], ["l4.weight", "l3.weight", "l2.weight"], ["l1.weight"]]


def test_each_set_of_devices_and_dtype_has_buckets_of_its_own() -> None:
    g = GraphBuilder()
    x = g.linear(g.input("x", 6, 2), 2, bias=False, name="l1")
    for i in range(2, 6):
        x = g.linear(x, 2, bias=False, name=f"l{i}")
    graph = finish(g, x)
    kinds = {name: replace(t, dtype="float16") if name == "l5.weight" else t for name, t in graph.tensors.items()}
    two, three = [on(*range(n), degrees=(n, 1, 1)) for n in (2, 3)]
    split = strategy(l1=two, l2=three, l3=on(1, 0, degrees=(2, 1, 1)), l4=three, l5=two, loss=on(0, degrees=(1,)))
    plan = plan_of(replace(graph, tensors=kinds), split)
    assert names(plan) == [["l5.weight"], ["l4.weight", "l2.weight"], ["l3.weight", "l1.weight"]]
    assert [bucket.readers for bucket in plan.syncs] == [(0, 1), (0, 1, 2), (0, 1)]


def test_a_single_device_has_a_bucket_for_each_shard() -> None:
    graph = chain(8, 2, 3, 4)
    assert [(own.shards, own.readers) for own in plan_of(graph, batch_split(graph, [2])).syncs] == [((1,), (2,)), ((0,), (2,))]


def test_a_shared_parameter_waits_for_its_first_operator() -> None:
    g = GraphBuilder()
    x = g.linear(g.linear(g.input("x", 4, 6), 6, bias=False, name="a"), 6, bias=False, name="b")
    graph = finish(g, g.linear(x, 6, weight="a.weight", bias=False, name="c"))
    assert names(plan_of(graph, batch_split(graph, [0, 1]))) == [["b.weight", "a.weight"]]


def test_what_gets_no_gradient_is_in_no_bucket() -> None:
    g = GraphBuilder()
    x = g.linear(g.input("x", 4, 6), 6, weight=g.parameter("frozen", 6, 6, frozen=True), bias=False, name="a")
    y = g.linear(x, 6, bias=False, name="b")
    g.linear(y, 6, bias=False, name="aside")  # nothing reads it
    graph = finish(g, y)
    assert names(plan_of(graph, batch_split(graph, [0, 1]))) == [["b.weight"]]


def test_what_no_tile_reads_of_a_parameter_is_idle() -> None:
    g = GraphBuilder()
    x = g.linear(g.input("x", 4, 6), 6, bias=False, name="a")
    table = g.parameter("table", 9, 6)
    factors = [Factor("s", 4, ATTRIBUTE), Factor("d", 6, ATTRIBUTE)]
    rows = g.operator("copy", factors, [], [(table, [DimMap(0), DimMap(1)])], [((4, 6), [DimMap(0), DimMap(1)])], name="rows")[0]
    graph = finish(g, g.elementwise(x, rows, name="sum"))
    plan = plan_of(graph, batch_split(graph, [0, 1]))
    (idle,) = idle_shards(plan)
    assert (plan.shards[idle].parameter, plan.shards[idle].box, plan.shards[idle].uses) == ("table", ((4, 9), (0, 6)), ())
    assert all(idle not in bucket.shards for bucket in plan.syncs)


@given(cases(), st.integers(1, 400), st.integers(1, 400))
def test_what_holds_for_every_plan(case: tuple[OperatorGraph, Topology, Strategy], first: int, others: int) -> None:
    graph, topology, chosen = case
    with pytest.MonkeyPatch.context() as patch:
        limits(patch, first, others)
        plan = build_plan(graph, chosen, topology)

    users = [{plan.tiles[tile].operator for tile, _ in shard.uses} for shard in plan.shards]
    used = {i for i, shard in enumerate(plan.shards) if shard.trainable and users[i] & graph.backward_operators}

    def lowest(number: int) -> int:
        return min(users[number] & graph.backward_operators)

    listed = [i for bucket in plan.syncs for i in bucket.shards]
    assert len(listed) == len(set(listed)) and set(listed) == used
    seen: dict[tuple[tuple[int, ...], str], list[ShardSync]] = {}
    for bucket in plan.syncs:
        shards = [plan.shards[i] for i in bucket.shards]
        (dtype,) = {graph.tensors[shard.parameter].dtype for shard in shards}
        assert {shard.devices for shard in shards} == {bucket.readers}
        assert all((-lowest(a), a) < (-lowest(b), b) for a, b in pairwise(bucket.shards))
        assert gradient_bytes(plan, bucket) == sum(shard_bytes(graph, shard) for shard in shards)
        seen.setdefault((bucket.readers, dtype), []).append(bucket)
    assert [lowest(bucket.shards[-1]) for bucket in plan.syncs] == sorted((lowest(b.shards[-1]) for b in plan.syncs), reverse=True)
    for (devices, _), own in seen.items():
        if len(devices) == 1:
            assert all(len(bucket.shards) == 1 for bucket in own)
            continue
        own.sort(key=lambda bucket: (-lowest(bucket.shards[0]), bucket.shards[0]))
        for place, bucket in enumerate(own):
            limit = others if place else first
            size, last = gradient_bytes(plan, bucket), shard_bytes(graph, plan.shards[bucket.shards[-1]])
            assert size - last < limit  # closed by its last shard at the latest
            assert size >= limit or bucket is own[-1]
    given = {plan.shards[i].parameter for i in listed}
    assert set(idle_shards(plan)) == {i for i, s in enumerate(plan.shards) if s.trainable and s.parameter in given and i not in used}
