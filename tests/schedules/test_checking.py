from __future__ import annotations

import pickle
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from soap.errors import ScheduleError, StrategyError
from soap.schedules.checking import WAYS, check
from soap.schedules.dependencies import Barrier
from soap.schedules.named import parse
from soap.schedules.table import KINDS, Table
from tests.extent import MANY
from tests.schedules.tables import barriers_of, can_be_executed, changed_tables, parsed, tables


def refusal(text: str | Table, *barriers: Barrier) -> ScheduleError:
    table = text if isinstance(text, Table) else parsed(text)
    assert not can_be_executed(table, barriers)
    with pytest.raises(ScheduleError) as caught:
        check(table, barriers)
    assert "\n" not in str(caught.value)
    return caught.value


@MANY
@given(tables())
def test_every_schedule_passes(table: Table) -> None:
    assert can_be_executed(table)
    known = check(table)
    assert len(known.order) == len(known.actions) == sum(map(len, table.stages))


@MANY
@given(changed_tables(), st.data())
def test_a_changed_table_is_refused_or_can_still_be_executed(table: Table, data: st.DataObject) -> None:
    barriers = data.draw(barriers_of(table)) if data.draw(st.booleans()) else []
    try:
        check(table, barriers)
    except ScheduleError as error:
        assert not can_be_executed(table, barriers)
        assert "\n" not in str(error) and "stage" in error.grid
    else:
        assert can_be_executed(table, barriers)


@MANY
@given(tables(), st.data())
def test_a_schedule_with_barriers_is_refused_just_where_it_cannot_be_executed(table: Table, data: st.DataObject) -> None:
    barriers = data.draw(barriers_of(table))
    try:
        check(table, barriers)
    except ScheduleError as error:
        assert not can_be_executed(table, barriers)
        assert "couples the samples" in str(error) and "use schedule 'gpipe'" in str(error)
        assert any(repr(barrier.operator) in str(error) for barrier in barriers)
    else:
        assert can_be_executed(table, barriers)


@given(tables())
def test_the_order_puts_every_action_behind_what_it_waits_for(table: Table) -> None:
    known = check(table, [Barrier(0, "norm")] if can_be_executed(table, [Barrier(0, "norm")]) else [])
    place = {node: i for i, node in enumerate(known.order)}
    assert all(place[other] < place[node] for node, needed in enumerate(known.needs) for other in needed)


@pytest.mark.parametrize(
    ("text", "said", "marked"),
    [
        ("stage 0 0F0 0F0 0B0", "0F0 is done twice, at stage 0, position 0 and at stage 0, position 1; expected once", ">0F0<"),
        ("stage 0 0F0 0B0\nstage 1 1F0 0F1", "0F1 is at stage 1, position 1, but chunk 0 is on stage 0; expected one stage", ">0F1<"),
        ("stage 0 0F0 0B0 0W0", f"0 has both B and W of micro-batch 0; expected {WAYS} (stage 0, position 2)", ">0W0<"),
        ("stage 0 0F0 0W0 0I0", "stage 0, position 1 has 0W0 before 0I0; expected it behind 0I0", ">0W0<"),
        ("stage 0 0B0 0F0", "stage 0, position 0 has 0B0 before 0F0; expected it behind 0F0", ">0B0<"),
        ("stage 0 0F0 0B0 0F1", f"0B1 is missing on stage 0; expected {WAYS}, of 1 chunks and 2 micro-batches", "0F1"),
        ("stage 0 0F0 0I0", "0W0 is missing on stage 0", "0I0"),
        ("stage 0 0F0 0W0", "0I0 is missing on stage 0", "0W0"),
        ("stage 0 0B0", "0F0 is missing on stage 0", "0B0"),
        ("stage 0 0F0 0B0 2F0 2B0", "1F0 is missing on any stage", "2F0"),
    ],
)
def test_says_what_is_wrong_and_where(text: str, said: str, marked: str) -> None:
    error = refusal(text)
    assert said in str(error) and marked in error.grid


def test_messages_name_all_actions_that_there_are() -> None:
    for text in ("stage 0 0F0 0B0 0W0", "stage 0 0F0"):
        expected = str(refusal(text)).partition("expected ")[2]
        assert set(KINDS) <= set(re.findall(r"\b[A-Z]\b", expected))


def test_names_the_circle_in_which_stages_wait() -> None:
    error = refusal("stage 0 0F0 0B0 0F1 0B1\nstage 1 1F0 1F1 1B0 1B1")
    assert str(error) == (
        "stages wait for each other for ever: 0B0 (stage 0, position 1) waits for 1B0, which stands behind 1F1, which waits for 0F1, "
        "which stands behind 0B0; change the order of one of them"
    )
    assert error.grid == ("stage 0  0F0  >0B0<  0F1   0B1\nstage 1  1F0   1F1   1B0   1B1")


def test_names_a_wait_for_a_later_action_of_the_same_stage() -> None:
    error = refusal("stage 0 1F0 0F0 1B0 0B0")
    assert "1F0 (stage 0, position 0) waits for 0F0, which stands behind 1F0; change" in str(error)


def test_cuts_a_long_circle_short() -> None:
    first, *others = parse("gpipe:2").table(8, 1).stages
    message = str(refusal(Table.of([(first[1], first[0], *first[2:]), *others])))
    assert message == (
        "stages wait for each other for ever: 8F0 (stage 0, position 0) waits for 7F0, which waits for 6F0, which waits for 5F0, which "
        "waits for 4F0, which waits for 3F0, which waits for 2F0, and so on in a circle; change the order of one of them"
    )


def test_a_barrier_is_passed_too_soon_forward() -> None:
    error = refusal(parse("1f1b").table(2, 4), Barrier(0, "layers.3.norm"))
    assert str(error) == (
        "operator 'layers.3.norm' couples the samples of a step, so no micro-batch may leave chunk 0 before all have reached it; but "
        "1F0 (stage 1, position 0) comes before 0F2 (stage 0, position 3) can: use schedule 'gpipe'"
    )
    assert ">1F0<" in error.grid


def test_a_barrier_is_passed_too_soon_on_the_way_back() -> None:
    text = "stage 0 0F0 0F1 0B0 0B1\nstage 1 1F0 1B0 1F1 1B1"
    check(parsed(text), [Barrier(0, "norm")])  # 1F0 can wait for 0F1
    error = refusal(text, Barrier(1, "norm"))
    assert "no micro-batch may leave chunk 1 before all have reached it; but 1B0 (stage 1, position 1) comes before 1F1" in str(error)


def test_a_barrier_holds_only_the_way_back() -> None:
    """Stage 0 has chunks 0 and 2, and sends micro-batch 0 back through chunk 0 before it begins to send 1 back to chunk 1."""
    text = "stage 0 0F0 0F1 2F0 2F1 2B0 0B0 2B1 0B1\nstage 1 1F0 1F1 1B0 1B1"
    check(parsed(text), [Barrier(0, "norm")])
    error = refusal(text, Barrier(1, "norm"))
    assert "chunk 1 before all have reached it; but 0B0 (stage 0, position 5) comes before 1B1 (stage 1, position 3) can" in str(error)


def test_a_barrier_in_the_first_chunk_holds_its_weight_gradients_back() -> None:
    together, apart = "stage 0 0F0 0F1 0I0 0I1 0W0 0W1", "stage 0 0F0 0F1 0I0 0W0 0I1 0W1"
    check(parsed(together), [Barrier(0, "norm")])
    assert "but 0W0 (stage 0, position 3) comes before 0I1 (stage 0, position 4) can" in str(refusal(apart, Barrier(0, "norm")))
    check(parsed(apart))


def test_what_is_wrong_by_itself_is_not_blamed_on_a_barrier() -> None:
    error = refusal("stage 0 0F0 0B0 0F1 0B1\nstage 1 1F0 1F1 1B0 1B1", Barrier(0, "norm"))
    assert "wait for each other" in str(error)


@pytest.mark.parametrize("chunk", [-1, 2])
def test_a_barrier_is_in_a_chunk(chunk: int) -> None:
    with pytest.raises(ScheduleError, match=f"operator 'norm' is said to be in chunk {chunk} of 2"):
        check(parse("gpipe").table(2, 2), [Barrier(chunk, "norm")])


@given(st.integers(1, 5), st.integers(1, 6), st.integers(1, 3), st.sampled_from(["loop", "v"]))
def test_gpipe_meets_any_barriers(stages: int, microbatches: int, chunks: int, placement: str) -> None:
    table = parse(f"gpipe:{chunks}:{placement}").table(stages, microbatches)
    check(table, [Barrier(chunk, "norm") for chunk in range(table.chunk_count)])


def test_errors_are_errors_of_strategies_and_travel_between_processes_with_their_grid() -> None:
    error = refusal("stage 0 0B0 0F0")
    assert isinstance(error, StrategyError) and error.exit_code == StrategyError.exit_code
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error) and again.grid == error.grid != ""
