"""Values of a step go with the last that has them."""

from __future__ import annotations

import weakref

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from soap.plan.running.activity import PlanIndex, ValueKey, count_takers
from soap.runtime.program.program import compile_program
from soap.runtime.step.state import ValueStore
from tests.graph_builder import mlp
from tests.runtime.plans import plan_of, split

HELD: ValueKey = ("holding", 3)
FETCHED: ValueKey = ("fetch", 3)


def leaf(takes_gradient: bool) -> torch.Tensor:
    return torch.ones(2).requires_grad_(takes_gradient)


@given(st.integers(1, 5), st.booleans())
@settings(deadline=None)
def test_the_last_reader_takes_a_value_along_unless_it_waits_for_a_gradient(readers: int, takes_gradient: bool) -> None:
    values = ValueStore({HELD: readers}, {})
    values[HELD] = leaf(takes_gradient)
    seen = weakref.ref(values[HELD])
    assert [values.leave(HELD) for _ in range(readers)] == [False] * (readers - 1) + [True]
    assert (HELD in values) == takes_gradient == (seen() is not None)
    assert values.has_readers(HELD) and not values.has_readers(FETCHED)


@given(st.integers(1, 5))
@settings(deadline=None)
def test_the_last_taker_takes_the_gradient_along(takers: int) -> None:
    values = ValueStore({FETCHED: 1}, {FETCHED: takers})
    values[FETCHED] = leaf(True)
    assert values.gradient(FETCHED) is None and values.leave(FETCHED)
    (3 * values[FETCHED].sum()).backward()
    for _ in range(takers):
        assert torch.equal(values.gradient(FETCHED), torch.full((2,), 3.0))  # type: ignore[arg-type]
        values.taken(FETCHED)
    assert values.gradient(FETCHED) is None and len(values) == 0


def test_a_holding_s_gradient_is_taken_once() -> None:
    values = ValueStore({HELD: 1}, {})
    values[HELD] = leaf(True)
    values.taken(HELD)
    assert len(values) == 0
    values.taken(HELD)  # there may be none: nothing on this rank has read it


def test_steps_do_not_count_each_other_s_readers() -> None:
    readers = {HELD: 2}
    assert [ValueStore(readers, {}).leave(HELD) for _ in range(3)] == [False] * 3
    assert readers == {HELD: 2}


def test_takers_are_what_brought_parts_and_own_holdings() -> None:
    """``head`` reads all rows on rank 1: half of them are its own, the other half come from rank 0, by one message."""
    plan = plan_of(mlp(), split((0, 1), b=2), device_count=2, head=split((1,)), cross_entropy=split((1,)))
    index = PlanIndex(plan)
    (fetch,) = [number for number in index.carriers if plan.fetches[number].device == 1]
    assert len(plan.fetches[fetch].pieces) == 2
    assert count_takers(plan, index, 1) == {("fetch", fetch): 2} == compile_program(plan).takers(1)
    assert count_takers(plan, index, 0) == {}
