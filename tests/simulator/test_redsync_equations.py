"""RedSync's equations (1) and (2) come out of simulated tasks, if collectives take the paper's algorithms: recursive doubling gathers, and
Rabenseifner sums. With p = 2^k devices, M elements, density D, a message's latency a, an element's time b on the wire:

    (1)  T_sparse = T_select + lg(p) a + (p - 1) m + p g1         m: time of one message of k = D M elements on the wire
    (2)  T_dense  = 2 lg(p) a + 2 (p - 1) / p M b + (p - 1) / p g2

g1: decompressing one message; g2: adding up M elements.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import log2
from unittest.mock import patch

import pytest

from soap.cluster.topology import Topology
from soap.model.graph import OperatorGraph
from soap.plan.collectives import REDUCE_TRAFFIC
from soap.plan.compression.seam import layout_of
from soap.plan.delivery import Round
from soap.plan.plan import Plan, ShardSync, sync_name
from soap.plan.syncs.all_reduce import BucketedSum
from soap.plan.syncs.bucketing import gradient_bytes
from soap.plan.syncs.compressed import CompressedSum
from soap.plan.syncs.seam import SUM, Phase, SyncMethod, SyncStep
from soap.profiles.roofline import RooflineCosts
from soap.simulator.lowering import build_plan, lower
from soap.simulator.reference import simulate
from soap.strategy.classical import data_parallel
from soap.strategy.compression import Rgc
from soap.strategy.sync import compressed
from tests.graph_builder import GraphBuilder
from tests.strategies import CPU, cluster

WIDE = 1024
DENSITY = 2**-9
LATENCY, BYTES_PER_SECOND = 20e-6, 1.25e9


def network(devices: int) -> Topology:
    """So many hosts on one switch; the links of a route share its latency."""
    found = cluster([1] * devices, CPU)
    latency = LATENCY / len(found.route(0, 1))
    kind = replace(found.devices[0].type, memory_bandwidth_bytes_per_second=32e9)
    links = tuple(replace(link, bandwidth_bytes_per_second=BYTES_PER_SECOND, latency_seconds=latency) for link in found.links)
    return replace(found, links=links, devices=tuple(replace(device, type=kind) for device in found.devices))


def layer() -> OperatorGraph:
    g = GraphBuilder()
    return g.build(g.mean(g.linear(g.input("x", 256, WIDE), WIDE, name="layer", bias=False)))


GRAPH = layer()


def doubling(devices: Sequence[int], message_bytes: int) -> tuple[Round, ...]:
    """An all-gather by recursive doubling: in round j each sends what it has to the device whose number differs in bit j."""
    count = len(devices)
    rounds = range(count.bit_length() - 1)
    return tuple((tuple((devices[i], devices[i ^ 1 << j], message_bytes << j) for i in range(count)), 0) for j in rounds)


def rabenseifner(devices: Sequence[int], size: int) -> tuple[Round, ...]:
    """An all-reduce: halves are exchanged and added, then gathered by doubling."""
    count = len(devices)
    last = count.bit_length() - 1
    halving = []
    for j in reversed(range(last)):
        half = size >> last - j
        halving.append((tuple((devices[i], devices[i ^ 1 << j], half) for i in range(count)), half))
    return (*halving, *doubling(devices, size // count))


@contextmanager
def forced() -> Iterator[None]:
    """The paper's algorithms in place of ours."""

    def sparse(self: CompressedSum, plan: Plan, sync: ShardSync, *, pull_together: bool = True) -> Sequence[SyncStep]:
        (select, step, restore), (message,) = SyncMethod.steps(self, plan, sync), self.messages(plan, sync)
        return select, replace(step, rounds=doubling(sync.readers, message.message_bytes)), restore

    def dense(self: BucketedSum, plan: Plan, sync: ShardSync, *, pull_together: bool = True) -> Sequence[SyncStep]:
        rounds = rabenseifner(sync.readers, gradient_bytes(plan, sync))
        return (SyncStep(Phase.AFTER_BACKWARD, SUM, sync_name(sync), rounds),)

    with patch.object(CompressedSum, "steps", sparse), patch.object(BucketedSum, "steps", dense):
        yield


def from_gradient_to_update_ns(topology: Topology, *, sparse: bool, density: float = DENSITY) -> int:
    """From the end of the backward pass to the beginning of the update."""
    strategy = data_parallel(GRAPH, topology)
    if sparse:
        strategy = strategy.with_parameter("layer.weight", compressed(Rgc(density, "exact")))
    with forced():
        tasks = lower(build_plan(GRAPH, strategy, topology), topology, RooflineCosts(topology))
        schedule = simulate(tasks)
    at = {task.name: (int(s), int(e)) for task, s, e in zip(tasks.tasks, schedule.start_ns, schedule.end_ns, strict=True)}
    return at["update @0"][0] - at["backward layer[0]"][1]


def equations_ns(topology: Topology, density: float = DENSITY) -> tuple[float, float]:
    """(1) and (2), in nanoseconds."""
    peers, elements, bandwidth = topology.device_count, WIDE * WIDE, topology.devices[0].type.memory_bandwidth_bytes_per_second
    how, kind = Rgc(density, "exact"), topology.devices[0].type
    layout, costs = layout_of(how, (WIDE, WIDE), 4, peers), RooflineCosts(topology)
    select = costs.compression_ns(how, layout, "select", kind)
    restore = costs.compression_ns(how, layout, "restore", kind)
    words = 2 * 4 * round(elements * density) + 8  # positions and values, and the length
    sparse = select + 1e9 * (log2(peers) * LATENCY + (peers - 1) * words / BYTES_PER_SECOND) + restore
    moving = 2 * log2(peers) * LATENCY + 2 * (peers - 1) / peers * 4 * elements / BYTES_PER_SECOND
    return sparse, 1e9 * (moving + (peers - 1) / peers * 4 * elements * REDUCE_TRAFFIC / bandwidth)


@pytest.mark.parametrize("peers", [2, 4, 8, 16, 32])
def test_tasks_take_what_the_equations_say(peers: int) -> None:
    topology = network(peers)
    sparse, dense = equations_ns(topology)
    found = from_gradient_to_update_ns(topology, sparse=True), from_gradient_to_update_ns(topology, sparse=False)
    rounding = 2 * int(log2(peers)) + 3  # each task, and each round of a collective, is rounded up
    assert 0 <= found[0] - sparse <= rounding
    assert 0 <= found[1] - dense <= rounding


def test_decompression_grows_with_the_peers() -> None:
    """p messages are added up, each at the price g1; so are equation (1)'s last term and the update's share at scale."""
    how = Rgc(DENSITY, "exact")
    times = []
    for peers in (2, 4, 8):
        topology = network(peers)
        layout = layout_of(how, (WIDE, WIDE), 4, peers)
        times.append(RooflineCosts(topology).compression_ns(how, layout, "restore", topology.devices[0].type))
    assert abs((times[2] - times[1]) - 2 * (times[1] - times[0])) <= 3


@pytest.mark.parametrize("density", [2**-9, 2**-7, 2**-5])
def test_sparse_and_dense_cross_where_the_equations_do(density: float) -> None:
    """With more peers the gathered messages outgrow the sum, whose bytes hardly grow: at p D words of 2 M."""
    sides = []
    for peers in (2, 4, 8, 16, 32, 64, 128):
        topology = network(peers)
        sparse, dense = equations_ns(topology, density)
        found = from_gradient_to_update_ns(topology, sparse=True, density=density), from_gradient_to_update_ns(topology, sparse=False)
        sides.append((sparse < dense, found[0] < found[1]))
    assert all(ours == theirs for theirs, ours in sides)
    assert sides[0] == (True, True) and (sides[-1] == (False, False)) == (density > 2**-9)
