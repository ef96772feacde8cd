"""Plans in which readers own parts: who owns what, what travels, what is held."""

from __future__ import annotations

from math import prod
from unittest.mock import patch

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from soap.plan.placement import are_even, first_readers, reader_parts
from soap.plan.plan import Plan, update_name
from soap.plan.syncs.amounts import COUNT_BYTES
from soap.plan.syncs.seam import method_for
from soap.plan.syncs.sharded_state import gather_name, scatter_name
from soap.profiles.roofline import RooflineCosts
from soap.simulator.lowering import build_plan, lower
from soap.simulator.simulate import Simulator
from soap.strategy.classical import data_parallel, zero1
from soap.strategy.sync import SHARDED_STATE
from tests.graph_builder import GraphBuilder, transformer
from tests.simulator.examples import batch_split, chain
from tests.strategies import CPU, GPU, cluster

FOUR = cluster([2, 2], CPU)


def owned(plan: Plan) -> list[int]:
    """By device, bytes of what it alone owns."""
    found = [0] * plan.device_count
    for shard in plan.shards:
        if len(shard.devices) == 1:
            size = plan.graph.tensors[shard.parameter].itemsize
            for start, stop in shard.box:
                size *= stop - start
            found[shard.devices[0]] += size
    return found


def test_rows_are_dealt_out_like_cards() -> None:
    g = GraphBuilder()
    x = g.input("x", 8, 6)
    for width in (7, 6):
        x = g.linear(x, width, name=f"l{width}")
    graph = g.build(g.mean(x))
    assert first_readers(graph) == {"l6.weight": 0, "l7.weight": 6, "l6.bias": 13, "l7.bias": 19}  # rows of 28, 24, 4 and 4 bytes
    plan = build_plan(graph, zero1(graph, FOUR), FOUR)
    owners = [(shard.parameter, shard.box[0], shard.devices[0]) for shard in plan.shards if shard.parameter == "l7.weight"]
    assert owners == [("l7.weight", (0, 2), 2), ("l7.weight", (2, 4), 3), ("l7.weight", (4, 6), 0), ("l7.weight", (6, 7), 1)]
    assert max(owned(plan)) - min(owned(plan)) <= 28


def test_where_rows_are_fewer_than_readers_they_are_cut() -> None:
    graph = chain(8, 2, 3)
    strategy = batch_split(graph, range(4)).with_parameter("l1.weight", SHARDED_STATE)
    plan = build_plan(graph, strategy, FOUR)
    assert [shard.box for shard in plan.shards] == [((0, 1), (0, 1)), ((0, 1), (1, 2)), ((1, 2), (0, 2)), ((2, 3), (0, 2))]
    (sync,) = plan.syncs
    assert sync.readers == (0, 1, 2, 3) == tuple(sorted(plan.owners(sync)))


@given(st.lists(st.integers(1, 5), max_size=3), st.integers(0, 3), st.integers(1, 40))
def test_parts_of_readers_follow_each_other_in_memory(sizes: list[int], first: int, readers: int) -> None:
    box = tuple((first, first + size) for size in sizes)
    parts = reader_parts(box, readers)
    numbers = np.arange(prod(sizes)).reshape(sizes)
    found = [numbers[tuple(slice(a - first, b - first) for a, b in part)].ravel().tolist() for part in parts]
    assert [number for own in found for number in own] == list(range(prod(sizes))) and len(parts) == min(readers, prod(sizes))
    assert are_even(box, readers) == (len(parts) == readers and len({len(own) for own in found}) == 1)


def test_an_experts_matrix_is_shared_evenly() -> None:
    """One row of dimension 0 among readers: padded to it, parts would take as many times the bytes as there are readers."""
    assert reader_parts(((3, 4), (0, 6), (0, 5)), 3) == tuple(((3, 4), (a, a + 2), (0, 5)) for a in (0, 2, 4))
    assert reader_parts(((2, 4), (0, 6), (0, 5)), 4) == tuple(((e, e + 1), (a, a + 3), (0, 5)) for e in (2, 3) for a in (0, 3))


def test_scatter_and_gather_move_half_of_an_all_reduce_each() -> None:
    graph = transformer()
    plan = build_plan(graph, zero1(graph, FOUR), FOUR)
    size = sum(tensor.bytes for tensor in graph.parameters if tensor.requires_grad)
    moved = [[sum(size for *_, size in step.rounds[0][0]) for step in method_for(sync).steps(plan, sync)] for sync in plan.syncs]
    assert [sum(column) for column in zip(*moved, strict=True)] == [3 * size, 3 * size]  # an all-reduce: 2 * 3 * size
    assert all({*sync.readers} == {0, 1, 2, 3} for sync in plan.syncs)


def test_values_are_gathered_behind_the_owners_updates() -> None:
    graph = transformer()
    tasks = lower(plan := build_plan(graph, zero1(graph, FOUR), FOUR), FOUR, RooflineCosts(FOUR)).tasks
    names = [task.name for task in tasks]
    for sync in plan.syncs:
        gather = tasks[names.index(gather_name(sync))]
        assert [names[before] for before in gather.predecessors] == [update_name(device) for device in plan.owners(sync)]
        for device in plan.owners(sync):
            before = [names[other] for other in tasks[names.index(update_name(device))].predecessors]
            assert scatter_name(sync) in before


def test_devices_keep_the_states_of_their_parts() -> None:
    graph, topology = transformer(), cluster([4], GPU)
    size = sum(tensor.bytes for tensor in graph.parameters if tensor.requires_grad)
    simulator = Simulator(graph, topology, RooflineCosts(topology), optimizer_states=2)
    usual, dealt = simulator.run(data_parallel(graph, topology)), simulator.run(zero1(graph, topology))
    numbers = COUNT_BYTES * sum(tensor.requires_grad for tensor in graph.parameters)  # Adam's, of its steps
    assert [own["states"] for own in usual.peak_by_kind] == [2 * size + numbers] * 4
    assert 2 * size + numbers <= sum(own["states"] for own in dealt.peak_by_kind) <= 2 * size + 4 * numbers
    assert [own["values"] for own in dealt.peak_by_kind] == [own["values"] for own in usual.peak_by_kind]
    for before, after, own in zip(usual.peak_bytes, dealt.peak_bytes, owned(dealt.plan), strict=True):
        assert after < before - 2 * (size - own) + 0.05 * before + size  # the states of the others' parts are gone


def test_gradients_leave_in_buckets() -> None:
    graph = transformer()
    with patch("soap.plan.syncs.bucketing.FIRST_BUCKET_BYTES", 1), patch("soap.plan.syncs.bucketing.BUCKET_BYTES", 1):
        plan = build_plan(graph, zero1(graph, FOUR), FOUR)
        assert [len(sync.regions) for sync in plan.syncs] == [1] * len(plan.syncs) and len(plan.syncs) > 4
    together = build_plan(graph, zero1(graph, FOUR), FOUR)
    assert len(together.syncs) == 1 and len(together.syncs[0].regions) == len(plan.syncs)
