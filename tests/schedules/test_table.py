from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest
from hypothesis import given
from hypothesis import strategies as st

from soap.errors import ScheduleError
from soap.schedules.table import KINDS, Action, Table, marked, parse_action
from tests.extent import MANY
from tests.schedules.tables import changed_tables, parsed, tables

SMALL = Table.of([[Action("F", 0, 0), Action("F", 0, 1), Action("B", 0, 0), Action("B", 0, 1)], [Action("F", 1, 0), Action("B", 1, 0)]])


def test_prints_as_a_grid() -> None:
    assert str(SMALL) == "stage 0 0F0 0F1 0B0 0B1\nstage 1 1F0 1B0"


def test_columns_and_names_have_equal_widths() -> None:
    stages = [[Action("F", chunk, 0), Action("B", chunk, 0)] for chunk in range(11)]
    lines = str(Table.of(stages)).splitlines()
    assert lines[0] == "stage 0  0F0  0B0" and lines[10] == "stage 10 10F0 10B0"


@MANY
@given(changed_tables())
def test_parses_what_it_prints(table: Table) -> None:
    assert parsed(str(table)) == table
    assert hash(parsed(str(table))) == hash(table)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "a table with 0 stages; expected 1 to 4096"),
        ("stage 0 0F0 0X0", "'0X0' is no action; expected chunk, one of F, B, I, W, and micro-batch, such as 2F0"),
        ("stage 0 .", "stage 0 has no action"),
        ("stage 0 0F65536", "stage 0 has the action 0F65536; expected chunks from 0 to 65535 and micro-batches from 0 to 65535"),
        ("stage 0 " + "0" * 100, "is no action"),
    ],
)
def test_refuses_other_tables_and_actions_in_one_line(text: str, said: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        parsed(text)
    assert said in str(caught.value) and "\n" not in str(caught.value) and len(str(caught.value)) < 200


@given(st.sampled_from(KINDS), st.integers(0, 999_999), st.integers(0, 999_999))
def test_actions_parse_as_they_print(kind: str, chunk: int, microbatch: int) -> None:
    action = parse_action(f"{chunk}{kind}{microbatch}")
    assert action == (kind, chunk, microbatch) and str(action) == f"{chunk}{kind}{microbatch}"


@pytest.mark.parametrize("text", ["F0", "0F", "0f0", "0F0 ", "0F0x", "-1F0", "0F-1", "1²F0", "\u0660F0", "0FB0", "1UNSHARD", ""])
def test_nothing_else_is_an_action(text: str) -> None:
    with pytest.raises(ScheduleError, match="is no action"):
        parse_action(text)


@pytest.mark.parametrize("action", [Action("X", 0, 0), Action("F", -1, 0), Action("F", 0, -1), Action("F", 2**16, 0)])  # type: ignore[arg-type]
def test_refuses_actions_out_of_range(action: Action) -> None:
    with pytest.raises(ScheduleError, match="stage 0 has"):
        Table.of([[action]])


def test_refuses_too_many_actions() -> None:
    actions = tuple(Action("F", 0, m) for m in range(2**16))
    with pytest.raises(ScheduleError, match="use fewer micro-batches"):
        Table((actions,) * 17)


def test_counts_and_placement() -> None:
    table = parsed("stage 0 0F0 3F0\nstage 1 1F0 1F6")
    assert (table.chunk_count, table.microbatch_count, table.placement) == (4, 7, (0, 1, -1, 0))


def test_is_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        SMALL.stages = ()  # type: ignore[misc]


def test_marks_a_cell() -> None:
    assert marked(SMALL, 1, 0) == "stage 0  0F0   0F1   0B0   0B1\nstage 1 >1F0<  1B0"


def test_shows_a_part_of_a_large_grid() -> None:
    table = Table.of([[Action("F", stage, m) for m in range(50)] for stage in range(30)])
    lines = marked(table, 12, 20).splitlines()
    assert [line.split()[1] for line in lines] == [str(stage) for stage in range(8, 17)]
    before, behind = ([f"12F{m}" for m in range(start, start + 6)] for start in (14, 21))
    assert lines[4].split() == ["stage", "12", "…", *before, ">12F20<", *behind, "…"]


@given(tables())
def test_tables_of_schedules_place_every_chunk(table: Table) -> None:
    assert set(table.placement) == set(range(len(table.stages)))
