"""Pipelines by rough costs: device groups, what layers cost on them, and stages cut so that the slowest is fastest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from soap.cluster.topology import DeviceType, Topology
from soap.model.batch import MicroBatches
from soap.model.graph import OperatorGraph
from soap.profiles.roofline import RooflineCosts
from soap.schedules.named import parse
from soap.schedules.play import in_flight
from soap.search.pipelines import pipelines
from soap.search.pipelining import pipelined
from soap.search.stage_costs import StageCosts, StagePrices
from soap.search.stage_groups import StageGroups, stage_groups
from soap.search.stages import Chain
from soap.simulator.shared import Shared
from tests.graph_builder import GraphBuilder, convnet, mlp, transformer
from tests.search.test_stages import assert_best
from tests.strategies import CPU, cluster

SLOW = DeviceType("test-slow", "cpu", {"float32": 4e9}, 5e9, 2**30, 2e-6, "made up for tests")
SMALL = DeviceType("test-small", "cpu", {"float32": 2e10}, 2e10, 2**20, 1e-6, "made up for tests")


def unequal(counts: list[int], *kinds: DeviceType) -> Topology:
    """Hosts with so many devices each, those of a host of one kind."""
    topology = cluster(counts, CPU)
    devices = tuple(replace(device, type=kinds[device.host if isinstance(device.host, int) else 0]) for device in topology.devices)
    return replace(topology, devices=devices)


def widening(layers: int) -> OperatorGraph:
    """Linear layers, each wider than the one before."""
    g = GraphBuilder("widening")
    x = g.input("x", 8, 4)
    for i in range(layers):
        x = g.linear(x, 4 * (i + 2), name=f"fc{i}")
    return g.build(g.mean(x))


def skipping() -> OperatorGraph:
    """A value that is read again four layers later."""
    g = GraphBuilder("skipping")
    x = first = g.linear(g.input("x", 8, 16), 64, name="first")
    for i in range(4):
        x = g.linear(g.elementwise(x), 64, name=f"fc{i}")
    return g.build(g.mean(g.elementwise(x, first)))


NETS: dict[str, Callable[[], OperatorGraph]] = {
    "mlp": lambda: mlp(8),
    "wide mlp": lambda: mlp(16, (8, 256, 16)),
    "deep mlp": lambda: mlp(8, (16, 32, 64, 32, 16)),
    "transformer": lambda: transformer(layers=1),
    "joint": lambda: transformer(layers=1, joint=True),
    "vocabulary": lambda: transformer(layers=1, vocabulary=512),
    "long": lambda: transformer(layers=1, length=64),
    "convnet": convnet,
    "widening": lambda: widening(8),
    "skipping": skipping,
}


def costs_of(graph: OperatorGraph, topology: Topology, groups: StageGroups, count: int) -> StageCosts:
    return StagePrices(Shared(graph, topology, RooflineCosts(topology)), 2).costs(groups, 1, MicroBatches(graph, count))


@pytest.mark.parametrize("name", NETS)
def test_a_partition_by_the_cost_models_figures_is_the_exhaustive_minimum(name: str) -> None:
    """Ten small nets on three hosts of unequal speed and memory, in any order."""
    graph, topology = NETS[name](), unequal([1, 1, 1], CPU, SLOW, SMALL)
    (groups,) = [own for own in stage_groups(topology, 3) if len(own.devices) == 3]
    chain = costs_of(graph, topology, groups, 4).chain
    assert len({int(own) for own in chain.layer_ns.sum(axis=1)}) == 3 and groups.any_order
    table = parse("1f1b").table(3, 4)
    tight = Chain(
        layer_ns=chain.layer_ns, message_ns=chain.message_ns, kept_bytes=chain.kept_bytes, activation_bytes=chain.activation_bytes,
        limit_bytes=np.full(3, int(chain.kept_bytes[0].sum() + chain.activation_bytes[0].sum()), np.int64) // np.array([1, 2, 3]),
    )  # fmt: skip
    for own in (chain, tight):
        assert_best(own, groups.kinds, in_flight(table), True)


def test_groups_of_a_cluster() -> None:
    alike = list(stage_groups(cluster([2, 2]), 4))
    assert [own.devices for own in alike] == [((0, 1), (2, 3)), ((0,), (1,), (2,), (3,))]
    assert [own.kinds for own in alike] == [(0, 1), (0, 0, 1, 1)]  # what is on one host, messages reach more quickly
    assert not any(own.any_order for own in alike) and all(set(own.classes) == {0} for own in alike)
    uneven = list(stage_groups(unequal([2, 1], CPU, SLOW), 4))
    assert [own.devices for own in uneven] == [((0,), (1,), (2,)), ((0, 1), (2,))]
    assert [own.any_order for own in uneven] == [True, True] and uneven[0].kinds == (0, 0, 1)
    assert uneven[0].in_order((1, 0, 0)) == ((2,), (0,), (1,))


def test_messages_cost_more_between_hosts() -> None:
    graph, topology = transformer(layers=2), cluster([2, 2], CPU)
    groups = list(stage_groups(topology, 4))[-1]
    chain = costs_of(graph, topology, groups, 2).chain
    inside, between = chain.message_ns[0, 0], chain.message_ns[0, 1]
    assert (between >= inside).all() and (between > inside).any()


def test_slower_devices_take_longer_and_micro_batches_share_activations() -> None:
    graph, topology = transformer(layers=2), unequal([1, 1], CPU, SLOW)
    (groups,) = stage_groups(topology, 2)
    two, four = (costs_of(graph, topology, groups, count) for count in (2, 4))
    assert (two.forward_ns[1] >= two.forward_ns[0]).all() and two.forward_ns[1].sum() > two.forward_ns[0].sum()
    assert (two.upkeep_ns == four.upkeep_ns).all() and (two.chain.kept_bytes == four.chain.kept_bytes).all()
    assert two.chain.activation_bytes.sum() > four.chain.activation_bytes.sum()


def test_all_pipelines_are_legal_and_the_best_comes_first() -> None:
    graph, topology = transformer(layers=2), cluster([2, 2], CPU)
    found = pipelines(Shared(graph, topology, RooflineCosts(topology)), 2)
    assert [own.score for own in found] == sorted(own.score for own in found)
    assert {len(own.stages) for own in found} == {2, 4} and {own.microbatches for own in found} == {2, 4, 8}
    assert {own.tensor for own in found} == {1, 2}
    assert {str(own.schedule) for own in found} >= {"gpipe", "1f1b", "interleaved:2", "zb-2p", "zb-v"}
    for own in found:
        pipelined(graph, topology, own).validate(graph, 4)


def test_a_stage_like_a_v_has_the_first_and_the_last_chunk() -> None:
    """So the faster device gets more of the work as soon as these two are larger."""
    graph, topology = widening(8), unequal([1, 1], CPU, SLOW)
    found = [own for own in pipelines(Shared(graph, topology, RooflineCosts(topology)), 2) if str(own.schedule) == "zb-v"]
    assert {own.microbatches for own in found} == {2, 4, 8}
    for own in found:
        assert (own.stages, own.placement) == (((0,), (1,)), (0, 1, 1, 0))
        fast, slow = (sum(op.flops for op, stage in zip(graph.operators, own.blocks, strict=True) if stage == side) for side in (0, 1))
        assert fast > 2 * slow
        pipelined(graph, topology, own).validate(graph, 2)


def test_barriers_leave_gpipe_alone() -> None:
    g = GraphBuilder("centered")
    x = g.linear(g.input("x", 8, 4), 8, name="first")
    x = g.linear(g.elementwise(x, g.batch_mean(x)), 8, name="second")
    graph, topology = g.build(g.mean(x)), cluster([1, 1], CPU)
    assert {own.schedule.schedule.name for own in pipelines(Shared(graph, topology, RooflineCosts(topology)), 2)} == {"gpipe"}


def test_there_is_none_on_one_device() -> None:
    topology = cluster([1], CPU)
    assert pipelines(Shared(mlp(), topology, RooflineCosts(topology)), 2) == []
