"""Values of a step go with the last that has them."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.multiprocessing.reductions import StorageWeakRef

from soap.plan.running.activity import PlanIndex, ValueKey, count_takers
from soap.runtime.program.program import compile_program
from soap.runtime.step.state import ValueStore
from tests.graph_builder import mlp
from tests.runtime.plans import plan_of, split

HELD: ValueKey = ("holding", 3)
FETCHED: ValueKey = ("fetch", 3)


@given(st.integers(1, 5), st.booleans())
@settings(deadline=None)
def test_the_last_reader_takes_a_value_along(readers: int, takes_gradient: bool) -> None:
    """What waits for its gradient has no memory."""
    values = ValueStore({HELD: readers}, {})
    seen = StorageWeakRef(values.put(HELD, torch.ones(2), takes_gradient).untyped_storage())
    assert [values.leave(HELD) for _ in range(readers)] == [False] * (readers - 1) + [True]
    assert HELD not in values and seen.expired() and len(values) == takes_gradient
    assert values.has_readers(HELD) and not values.has_readers(FETCHED)


@given(st.booleans(), st.booleans())
@settings(deadline=None)
def test_what_autograd_has_saved_stays(saved: bool, gathered: bool) -> None:
    """And what comes a second time, until it has come."""
    values = ValueStore({FETCHED: 1}, {}, gathered=[3] * gathered)
    values.put(FETCHED, torch.ones(2), takes_gradient=True)
    seen, made = StorageWeakRef(values[FETCHED].untyped_storage()), values[FETCHED] * (values[FETCHED] if saved else 3)
    assert values.leave(FETCHED) and (FETCHED in values) == gathered
    values.drop(FETCHED)
    assert FETCHED not in values and seen.expired() != saved
    made.sum().backward()
    assert seen.expired() and torch.equal(values.gradient(FETCHED), torch.full((2,), 2.0 if saved else 3.0))  # type: ignore[arg-type]


@given(st.integers(1, 5))
@settings(deadline=None)
def test_the_last_taker_takes_the_gradient_along(takers: int) -> None:
    values = ValueStore({FETCHED: 1}, {FETCHED: takers})
    made = 3 * values.put(FETCHED, torch.ones(2), takes_gradient=True).sum()
    assert values.gradient(FETCHED) is None and values.leave(FETCHED)
    made.backward()
    for _ in range(takers):
        assert torch.equal(values.gradient(FETCHED), torch.full((2,), 3.0))  # type: ignore[arg-type]
        values.taken(FETCHED)
    assert values.gradient(FETCHED) is None and len(values) == 0


def test_a_holding_s_gradient_is_taken_once() -> None:
    values = ValueStore({HELD: 1}, {})
    values.put(HELD, torch.ones(2), takes_gradient=True)
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
