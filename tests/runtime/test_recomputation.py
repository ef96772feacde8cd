"""Plans with recomputed operators train like one process, bit for bit where the same plan without marks does."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from soap.cluster.presets import local_topology
from soap.cluster.topology import Topology
from soap.model.graph import OperatorGraph
from soap.plan.plan import Plan
from soap.runtime.program.actions import ActionKind, part_of
from soap.runtime.program.program import compile_program
from soap.simulator.lowering import build_plan
from soap.strategy.config import Strategy
from soap.strategy.recomputation import repeatable, with_marks
from tests.extent import FEW, often
from tests.graph_builder import convnet, mlp, transformer
from tests.runtime.cases import train
from tests.runtime.mixtures import marked
from tests.runtime.plans import plan_of, random_order, split
from tests.runtime.pool import Pool
from tests.runtime.test_training import NAMED, assert_equal_to_one_process
from tests.simulator.examples import batch_split, beside_a_barrier
from tests.strategies import CPU, cases, cluster

THREE, FOUR = cluster([3], CPU), local_topology(4)


def recomputed(plan: Plan, seed: int = 0, share: float = 0.7) -> Plan:
    strategy = marked(plan.graph, plan.strategy, random.Random(seed), share)
    return build_plan(plan.graph, strategy, cluster([plan.device_count], CPU))


NAMED_OFTEN = ("column then row", "replicas on one device", "grids on any devices", "attention heads", "buffers")


@pytest.mark.parametrize("name", often([*NAMED], NAMED_OFTEN))
def test_named_strategies_train_like_one_process(pool: Pool, name: str) -> None:
    for share in (0.6, 1.0):
        assert_equal_to_one_process(pool.run(train, recomputed(NAMED[name], len(name), share)))


def test_marks_change_no_bit(pool: Pool) -> None:
    plan = NAMED["tied weight split in two ways"]
    usual, again = pool.run(train, plan)[0], pool.run(train, recomputed(plan, share=1.0))[0]
    assert usual.losses == again.losses and usual.traffic == again.traffic


def test_every_order_gives_the_same(pool: Pool) -> None:
    plan = recomputed(NAMED["grids on any devices"])
    for seed in range(3):
        assert_equal_to_one_process(pool.run(train, plan, random_order(plan, random.Random(seed))))


def test_each_recomputed_segment_runs_once_more_right_before_it_is_needed() -> None:
    graph = transformer(layers=2)
    usual = plan_of(graph, split((0,)))
    names = [op.name for op in graph.operators if op.name in repeatable(graph)]
    chosen = with_marks(usual.strategy, names[1::3], True)
    program = compile_program(build_plan(graph, chosen, THREE))
    actions = part_of(program.backward, 0)
    again = [action.subject for action in actions if action.kind is ActionKind.RECOMPUTE]
    assert len(again) == len(set(again)) > 1
    for segment in again:
        assert all(tile in program.recomputed for tile in program.segments[segment].tiles)
        places = [place for place, action in enumerate(actions) if action.subject == segment]
        first, last = (next(p for p in places if actions[p].kind is kind) for kind in (ActionKind.RECOMPUTE, ActionKind.SEGMENT))
        assert first < last


def test_a_traced_step_tells_second_runs(pool: Pool) -> None:
    plan = recomputed(plan_of(mlp(), split((0, 1), b=2)), share=1.0)
    outcomes = pool.run(train, plan, None, 2, True)
    names = {event.name for event in outcomes[0].events}
    assert {"recompute fc0[0]", "forward fc0[0]", "backward fc0[0]"} <= names


@given(cases(max_devices=3), st.randoms(use_true_random=False))
@settings(FEW, suppress_health_check=list(HealthCheck))
def test_random_strategies_train_like_one_process(pool: Pool, case: tuple[OperatorGraph, Topology, Strategy], rng: random.Random) -> None:
    graph, topology, strategy = case
    plan = build_plan(graph, marked(graph, strategy, rng), topology)
    assert_equal_to_one_process(pool.run(train, plan, random_order(plan, rng)))


def test_halos_and_channels_run_again(pool: Pool) -> None:
    plan = plan_of(convnet(), split((0, 1), b=2), conv0=split((0, 1, 2, 0), o=2, l=2), conv1=split((1, 2, 0, 1), c=2, l=2))
    assert_equal_to_one_process(pool.run(train, recomputed(plan, share=1.0)))


@pytest.mark.parametrize("device", [0, 1])
def test_readers_on_both_sides_of_a_barrier(pool: Pool, device: int) -> None:
    """In two micro-batches what reads ``v`` before the barrier is on either device. The second runs come before the first backward pass
    that needs them, that of ``behind``."""
    graph = beside_a_barrier()
    usual = replace(with_marks(batch_split(graph, [0]), ("v", "behind"), True), microbatches=2)
    plan = build_plan(graph, usual.with_operator("before", replace(usual.operators["before"], devices=(device,))), THREE)
    program = compile_program(plan)
    of: dict[str, set[int]] = {}
    for number, own in enumerate(program.segments):
        for tile in own.tiles:
            of.setdefault(plan.operator(plan.tiles[tile]).name, set()).add(number)
    order = [(action.kind, action.subject) for action in part_of(program.backward, 0)]
    again = [order.index((ActionKind.RECOMPUTE, number)) for number in of["v"]]
    first = min(order.index((ActionKind.SEGMENT, number)) for number in of["m2" if device else "before"])  # in chunk 0
    last = max(order.index((ActionKind.SEGMENT, number)) for number in of["behind"])
    assert len(again) == 2 and max(again) < last < first
    assert_equal_to_one_process(pool.run(train, plan))
