"""Operands that are gathered from several devices, and gathered again for the backward pass: bits, bytes and memory."""

from __future__ import annotations

import random

import pytest

from soap.model.regions import volume
from soap.plan.plan import AGAIN, Plan
from soap.runtime.program.actions import ActionKind, part_of
from soap.runtime.program.program import compile_program
from soap.simulator.lowering import build_plan
from soap.strategy.recomputation import ALL_LEVELS, GATHERING, RECOMPUTED, STAYS, repeatable, with_levels
from tests.graph_builder import mlp, transformer
from tests.runtime.cases import train
from tests.runtime.plans import plan_of, random_order, split
from tests.runtime.pool import Pool
from tests.runtime.test_training import assert_equal_to_one_process
from tests.strategies import CPU, cluster

ROWS = split((0, 1, 2), b=3)
WIDTH, PAIR = split((0, 1, 2), n=3), split((0, 1), n=2)
PLANS: dict[str, Plan] = {
    "all-gather": plan_of(mlp(batch=9), ROWS, fc1=WIDTH),
    "messages": plan_of(mlp(), split((0, 1), b=2), fc0=PAIR, fc1=PAIR),
    "several readers": plan_of(transformer(batch=6), ROWS, **{f"{i}.{part}": PAIR for i in range(2) for part in ("q", "k", "v", "fc1")}),
}
SUMS: dict[str, Plan] = {
    "all-reduce": plan_of(mlp(), split((0, 1, 2), n=3), fc1=split((0, 1, 2), k=3), act1=split((0, 1, 2), replicas=3), head=split((0,))),
    "reduce-scatter": plan_of(mlp(batch=9), split((0, 1, 2), n=3), fc1=split((0, 1, 2), k=3), act1=ROWS, head=ROWS, cross=ROWS),
    "transformer": plan_of(
        transformer(batch=6), split((0, 1), b=2), **{f"{i}.{part}": PAIR for i in range(2) for part in ("q", "k", "v", "fc1")},
        **{f"{i}.{part}": split((0, 1), k=2) for i in range(2) for part in ("proj", "fc2")},
    ),
}  # fmt: skip
KINDS = (ActionKind.TRANSFER_AGAIN, ActionKind.EXCHANGE_AGAIN)


def gathering(plan: Plan, *levels: int, seed: int = 0) -> Plan:
    """The plan in which each operator has one of these levels."""
    draw, names = random.Random(seed), sorted(repeatable(plan.graph))
    strategy = with_levels(plan.strategy, {name: draw.choice(levels) for name in names})
    return build_plan(plan.graph, strategy, cluster([plan.device_count], CPU))


@pytest.mark.parametrize("level", GATHERING.values())
@pytest.mark.parametrize("name", PLANS)
def test_it_trains_like_one_process_and_changes_no_bit(pool: Pool, name: str, level: int) -> None:
    usual, again = PLANS[name], gathering(PLANS[name], level)
    assert again.gathered_again
    before, outcomes = pool.run(train, usual), pool.run(train, again)
    assert_equal_to_one_process(outcomes)
    assert outcomes[0].losses == before[0].losses
    program, steps = compile_program(again), 2
    pieces = [(again.fetches[number].device, piece) for number in program.gathered_again for piece in again.fetches[number].pieces]
    moved = 8 * sum(volume(piece.box) for device, piece in pieces if again.holdings[piece.holding].device != device)
    sent = [sum(outcome.traffic.sent_bytes for outcome in own) for own in (before, outcomes)]
    assert sent[1] - sent[0] == steps * moved > 0


@pytest.mark.parametrize("name", SUMS)
def test_second_runs_sum_again(pool: Pool, name: str) -> None:
    usual, again = SUMS[name], gathering(SUMS[name], GATHERING[RECOMPUTED])
    before, outcomes = pool.run(train, usual), pool.run(train, again)
    assert_equal_to_one_process(outcomes)
    assert outcomes[0].losses == before[0].losses
    program, steps = compile_program(again), 2
    own = [again.reductions[number] for number in program.summed_again]
    summed = 8 * sum(volume(reduction.box) * len(reduction.devices) for reduction in own)
    reduced = [sum(outcome.traffic.reduced_bytes for outcome in each) for each in (before, outcomes)]
    assert reduced[1] - reduced[0] == steps * summed > 0


@pytest.mark.parametrize("seed", range(4))
def test_any_mixture_in_any_order(pool: Pool, seed: int) -> None:
    for plan in (*PLANS.values(), *SUMS.values()):
        mixed = gathering(plan, *ALL_LEVELS, seed=seed)
        assert_equal_to_one_process(pool.run(train, mixed, random_order(mixed, random.Random(seed))))


def test_what_is_made_again_is_gathered_between_the_second_runs_of_its_maker_and_of_its_reader() -> None:
    program = compile_program(gathering(PLANS["all-gather"], GATHERING[RECOMPUTED]))
    kinds = [action.kind for action in part_of(program.backward, 0) if action.kind in (*KINDS, ActionKind.RECOMPUTE)]
    again, gathered = ActionKind.RECOMPUTE, ActionKind.EXCHANGE_AGAIN
    assert kinds == [again, gathered, again, gathered, again]  # what fc1 reads, and what is cut by samples again behind it


def test_a_reader_that_does_not_gather_again_keeps_the_region_for_all() -> None:
    plan = PLANS["several readers"]
    names = {name: GATHERING[STAYS] for name in repeatable(plan.graph)}
    one_less = with_levels(plan.strategy, {**names, "0.k": STAYS})
    own = build_plan(plan.graph, one_less, cluster([3], CPU))
    found = {plan.graph.operators[i].name for i in own.gathered_again}
    assert "0.norm1" not in found and {"1.norm1", "0.norm2"} <= found


def test_a_traced_step_names_it(pool: Pool) -> None:
    outcomes = pool.run(train, gathering(PLANS["all-gather"], GATHERING[STAYS]), None, 2, True)
    assert any(event.name.endswith(AGAIN) for event in outcomes[0].events)
