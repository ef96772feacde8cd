"""Buckets of compressed shards: which shards travel together, and what a proposal for one of them changes for the others."""

from __future__ import annotations

import random

import pytest

from soap.cluster.topology import Topology
from soap.model.graph import OperatorGraph
from soap.plan.compression.training import PLAIN, PlannedTraining
from soap.plan.plan import Plan, ShardSync
from soap.plan.syncs.bucketing import BUCKET_BYTES, FIRST_BUCKET_BYTES, gradient_bytes
from soap.profiles.roofline import RooflineCosts
from soap.simulator.engine import Engine
from soap.simulator.lowering import build_plan
from soap.simulator.memory.memory_sum import MemorySum
from soap.simulator.memory.sweep import memory_over_time
from soap.simulator.reference import simulate
from soap.simulator.shared import Shared
from soap.simulator.simulate import Simulator
from soap.strategy.classical import data_parallel, random_config
from soap.strategy.compression import Bf16, Compression, Int8, PowerSgd, Rgc
from soap.strategy.config import Strategy, SyncConfig
from soap.strategy.sync import compressed
from soap.strategy.sync_contracts import Within
from tests.graph_builder import GraphBuilder
from tests.simulator.compiled.agreement import most_bytes
from tests.simulator.compiled.walks import Edit, check
from tests.simulator.reference_memory.any_order import peak_bytes
from tests.strategies import CPU, WITHIN, cluster

WIDE, MEDIUM, NARROW = 2600, 560, 16
"""Layers of 26 and 1.2 MiB and of 1 KiB: larger than a bucket, than the first bucket, and than nothing."""


def layers(widths: list[int]) -> OperatorGraph:
    g = GraphBuilder()
    x = g.input("x", 8, widths[0])
    for number, after in enumerate([*widths[1:], 8]):
        x = g.linear(x, after, name=f"l{number}")
    return g.build(g.mean(x))


MIXED = layers([MEDIUM, MEDIUM, MEDIUM, NARROW, WIDE, WIDE, NARROW, MEDIUM, MEDIUM, NARROW])
SMALL = layers([NARROW] * 5)
HOSTS = cluster([2, 2], CPU)


def everything(graph: OperatorGraph, topology: Topology, sync: SyncConfig) -> Strategy:
    names = [tensor.name for tensor in graph.parameters]
    return data_parallel(graph, topology).with_changes(parameters=dict.fromkeys(names, sync))


def names_of(sync: ShardSync) -> list[str]:
    return [region.parameter for region in sync.regions]


def compressed_syncs(plan: Plan) -> list[ShardSync]:
    return [sync for sync in plan.syncs if sync.compression is not None]


@pytest.mark.parametrize("within", WITHIN)
def test_all_of_a_small_model_travels_at_once(within: Within) -> None:
    plan = build_plan(SMALL, everything(SMALL, HOSTS, compressed(Bf16(), within)), HOSTS)
    [sync] = plan.syncs
    assert set(names_of(sync)) == {tensor.name for tensor in SMALL.parameters}
    assert names_of(sync)[0].startswith("l4.") and names_of(sync)[-1].startswith("l0.")  # as the backward pass completes them


def test_buckets_are_those_of_all_reduces() -> None:
    """They close at as many bytes of gradients, the first one early."""
    dense = build_plan(MIXED, data_parallel(MIXED, HOSTS), HOSTS)
    plan = build_plan(MIXED, everything(MIXED, HOSTS, compressed(Int8())), HOSTS)
    assert [names_of(sync) for sync in plan.syncs] == [names_of(sync) for sync in dense.syncs]
    sizes = [gradient_bytes(plan, sync) for sync in plan.syncs]
    assert len(sizes) > 2 and FIRST_BUCKET_BYTES <= sizes[0] < BUCKET_BYTES and max(sizes) >= BUCKET_BYTES


def test_only_what_is_alike_travels_together() -> None:
    strategy = everything(SMALL, HOSTS, compressed(Int8()))
    other = {"l1.weight": compressed(PowerSgd(2)), "l2.weight": compressed(Int8(), "host"), "l3.weight": SyncConfig()}
    plan = build_plan(SMALL, strategy.with_changes(parameters=other), HOSTS)
    found = sorted(names_of(sync) for sync in plan.syncs)
    rest = {tensor.name for tensor in SMALL.parameters} - other.keys()
    assert sorted(map(sorted, found)) == sorted([sorted(rest), *([name] for name in other)])
    sparse = {"l1.weight": compressed(Rgc(0.5)), "l2.weight": compressed(Rgc(0.1))}
    plan = build_plan(SMALL, strategy.with_changes(parameters=sparse), HOSTS)
    assert len(compressed_syncs(plan)) == 3  # densities are settings, too


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_delta_full_and_reference_are_equal(seed: int, clips: bool) -> None:
    """Proposals that take a shard out of a bucket, or put it into one, in models whose buckets close and whose do not."""
    rng = random.Random(f"buckets {seed} {clips}")
    graph, topology = (MIXED, SMALL)[seed % 2], (HOSTS, cluster([1, 1, 1], CPU), cluster([3], CPU))[seed]
    ways = [compressed(how, within) for how in (Int8(), Rgc(0.2), PowerSgd(2)) for within in WITHIN]
    start, edits = everything(graph, topology, ways[0]), list[Edit]()
    for _ in range(6):
        names = rng.sample([tensor.name for tensor in graph.parameters], rng.choice((1, 1, 2)))
        op = rng.choice(graph.operators)
        configs = {op.name: random_config(op, topology.device_count, rng)} if rng.random() < 0.3 else {}
        edits.append(Edit(configs, {name: rng.choice((SyncConfig(), *ways[:3])) for name in names}, rng.random() < 0.6))
    check((graph, topology, start, edits), afresh=True, training=PlannedTraining(clips=clips))


@pytest.mark.parametrize("within", WITHIN)
@pytest.mark.parametrize("how", [Int8(), Rgc(0.2, ragged=True), PowerSgd(2), Bf16()], ids=repr)
def test_memory_is_bounded(how: Compression, within: Within) -> None:
    for training in (PLAIN, PlannedTraining(kept=1, made=1, densest=0.5, dense=True)):
        for graph in (MIXED, SMALL):
            strategy = everything(graph, HOSTS, compressed(how, within))
            costs = RooflineCosts(HOSTS)
            engine = Engine(Shared(graph, HOSTS, costs, training))
            memory = MemorySum(engine, [1 << 60] * 4, 2)
            engine.load(strategy)
            engine.simulate()
            simulation = Simulator(graph, HOSTS, costs, training=training).run(strategy)
            curves = memory_over_time(simulation.tasks, simulate(simulation.tasks))
            for exact in (peak_bytes(simulation.plan), most_bytes(memory)):
                assert all(curve.peak_bytes <= most for curve, most in zip(curves, exact, strict=True))
