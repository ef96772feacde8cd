"""Training on three ranks equals training in one process: named ways to split, and random ones."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from soap.cluster.topology import Topology
from soap.model.graph import OperatorGraph
from soap.model.regions import volume
from soap.plan.plan import Exchange, Message, Part, Pattern, Plan, remote_parts
from soap.runtime.program.program import Program, compile_program
from soap.simulator.lowering import build_plan
from soap.strategy.config import Strategy
from tests.extent import FEW
from tests.graph_builder import GraphBuilder, convnet, mlp, transformer
from tests.runtime.cases import Outcome, train
from tests.runtime.plans import moved_bytes, plan_of, random_order, split
from tests.runtime.pool import Pool
from tests.strategies import cases

TOLERANCE = 1e-10


def assert_equal_to_one_process(outcomes: Sequence[Outcome]) -> None:
    assert all(outcome.losses == outcomes[0].losses for outcome in outcomes)
    first = outcomes[0]
    assert max(first.loss_error, first.gradient_error, first.parameter_error, first.buffer_error) < TOLERANCE, first


def tied() -> OperatorGraph:
    """One weight for the embedding and the head, which are split in different ways."""
    return transformer(layers=1)


def counted() -> OperatorGraph:
    """An operator that keeps a buffer of which each tile updates its own part."""
    g = GraphBuilder("counted")
    x = g.linear(g.input("x", 4, 6), 6, name="fc")
    y = g.elementwise(x, kind="counted", name="counted")
    return g.build(g.mean(y))


NAMED: dict[str, Plan] = {
    "data parallel": plan_of(transformer(), split((0, 1, 2), b=3)),
    "uneven data parallel": plan_of(mlp(batch=7), split((0, 1), b=2)),
    "one device": plan_of(mlp(), split((2,))),
    "parameter split": plan_of(mlp(), split((0, 1, 2), n=3), act=split((0, 1, 2), d1=3), cross_entropy=split((1,))),
    "reduction split": plan_of(mlp(), split((0,)), fc=split((0, 1, 2), k=3)),
    "column then row": plan_of(mlp(), split((0, 1), n=2), act=split((0, 1), d1=2), fc1=split((0, 1), k=2), cross_entropy=split((0,))),
    "replicas": plan_of(mlp(), split((0, 1, 2), replicas=3), fc1=split((0, 1), n=2), head=split((2, 1), replicas=2)),
    "replicas on one device": plan_of(counted(), split((0,)), counted=split((1, 1, 0), replicas=3)),
    "other devices for each operator": plan_of(mlp(), split((0,)), fc1=split((1,)), act1=split((2,)), head=split((1, 0), b=2)),
    "several tiles on a device": plan_of(transformer(layers=1), split((0, 1, 0, 2, 0), b=5)),
    "grids on any devices": plan_of(mlp(), split((2, 0, 0, 1, 2, 1), b=2, n=3), fc1=split((1, 2, 0, 0, 1, 2, 0, 1), b=2, k=2, n=2)),
    "halos": plan_of(convnet(), split((0, 1, 2), l=3), relu0=split((2, 1, 0), d2=3), fc=split((0, 1), b=2)),
    "halos and channels": plan_of(convnet(), split((0, 1), b=2), conv0=split((0, 1, 2, 0), o=2, l=2), conv1=split((1, 2, 0, 1), c=2, l=2)),
    "tied weight split in two ways": plan_of(
        tied(), split((0, 1), b=2), embedding=split((0, 1, 2), v=3), head=split((2, 1, 0, 1), k=2, n=2)
    ),
    "attention heads": plan_of(transformer(joint=True), split((0, 1), b=2), attention=split((1, 2, 0), h=3)),
    "buffers": plan_of(counted(), split((0,)), counted=split((2, 1, 0), d1=3)),
}


@pytest.mark.slow
def test_every_order_gives_the_same(pool: Pool) -> None:
    plan = NAMED["grids on any devices"]
    for seed in range(3):
        assert_equal_to_one_process(pool.run(train, plan, random_order(plan, random.Random(seed))))


def test_equal_runs_give_equal_bits(pool: Pool) -> None:
    plan = NAMED["tied weight split in two ways"]
    assert pool.run(train, plan)[0] == pool.run(train, plan)[0]


def test_frozen_parameters_stay(pool: Pool) -> None:
    g = GraphBuilder("frozen")
    frozen = g.parameter("frozen", 6, 4, frozen=True)
    x = g.linear(g.input("x", 4, 4), 6, weight=frozen, bias=False, name="fixed")
    plan = plan_of(g.build(g.mean(g.elementwise(g.linear(x, 5, name="fc")))), split((0, 1), b=2), fixed=split((2, 0), n=2))
    assert_equal_to_one_process(pool.run(train, plan))
    assert all(not compile_program(plan).plan.shards[s].trainable for s in range(2))


def test_nothing_to_train(pool: Pool) -> None:
    g = GraphBuilder("nothing")
    plan = plan_of(g.build(g.mean(g.elementwise(g.input("x", 4, 4)))), split((0, 1), b=2))
    assert_equal_to_one_process(pool.run(train, plan))


def returned_parts(program: Program) -> list[Part]:
    """What has its gradient sent back; the transpose of a broadcast takes zeros from those that have none."""
    moved = [carrier.parts for carrier in program.index.moves.values() if not _is_broadcast(carrier)]
    parts = [part for own in moved for part in own if part[0] in program.activity.fetches]
    sums = [e.parts for e in program.plan.exchanges if _is_broadcast(e) and any(f in program.activity.fetches for f, _ in e.parts)]
    return [*parts, *(part for own in sums for part in own)]


def _is_broadcast(carrier: Message | Exchange) -> bool:
    return isinstance(carrier, Exchange) and carrier.pattern is Pattern.BROADCAST


@pytest.mark.parametrize("name", NAMED)
def test_named_strategies_train_like_one_process_and_move_the_plan_s_bytes(pool: Pool, name: str) -> None:
    plan = NAMED[name]
    program, steps = compile_program(plan), 2
    outcomes = pool.run(train, plan)
    assert_equal_to_one_process(outcomes)
    back = 8 * sum(volume(box) for _, _, box, _ in remote_parts(plan, returned_parts(program)))
    sums = [r for r in plan.reductions if len(r.devices) > 1]
    returned = [plan.reductions[i] for i in program.activity.reductions if len(plan.reductions[i].devices) > 1]
    shards = [plan.shards[s] for sync in plan.syncs for s in sync.shards if len(sync.readers) > 1]
    traffic = [outcome.traffic for outcome in outcomes]
    assert sum(t.sent_bytes for t in traffic) == sum(t.received_bytes for t in traffic) == steps * (moved_bytes(plan) + back)
    assert sum(t.reduced_bytes for t in traffic) == steps * sum(8 * volume(r.box) * len(r.devices) for r in (*sums, *returned))
    assert sum(t.synchronized_bytes for t in traffic) == steps * sum(8 * volume(s.box) * len(s.devices) for s in shards)


def check_random(pool: Pool, case: tuple[OperatorGraph, Topology, Strategy], rng: random.Random) -> None:
    graph, topology, strategy = case
    plan = build_plan(graph, strategy, topology)
    assert_equal_to_one_process(pool.run(train, plan, random_order(plan, rng)))


@given(cases(max_devices=3), st.randoms(use_true_random=False))
@settings(FEW, suppress_health_check=list(HealthCheck))
def test_random_strategies_train_like_one_process(pool: Pool, case: tuple[OperatorGraph, Topology, Strategy], rng: random.Random) -> None:
    check_random(pool, case, rng)


@pytest.mark.long
@given(cases(max_devices=3, max_moves=9, max_tiles=12), st.randoms(use_true_random=False))
@settings(suppress_health_check=list(HealthCheck))
def test_many_random_strategies(pool: Pool, case: tuple[OperatorGraph, Topology, Strategy], rng: random.Random) -> None:
    check_random(pool, case, rng)


def test_ranks_without_a_device_know_the_loss(pool: Pool) -> None:
    """Both terms of the loss are one sum over all devices of the plan, from which these know the loss; the third rank has no device."""
    g = GraphBuilder("terms")
    x = g.linear(g.input("x", 2, 4), 4)
    terms = g.mean(x, name="mean"), g.mean(g.elementwise(x), name="other")
    loss = g.sum(*terms)
    halves = dict.fromkeys(("mean", "other"), split((0, 1), d1=2))
    outcomes = pool.run(train, plan_of(g.build(loss, None, terms), split((0,)), device_count=2, **halves))
    assert_equal_to_one_process(outcomes)
