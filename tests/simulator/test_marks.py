"""Marks of operators: what each of them says of itself can be lowered, whatever field it is of."""

from __future__ import annotations

import pytest

from soap.plan.marks.seam import FORWARD, all_marked, row_names
from soap.simulator.compiled.marks import BACKWARD_BLOCK, ROW_BLOCKS, mark_tables
from soap.simulator.costs import ROW_NS
from soap.simulator.tasks import TaskKind
from soap.strategy.marks import FEATURES, MARKS, mark_of, with_mark
from tests.simulator.examples import on

EACH = pytest.mark.parametrize("mark", range(1, len(MARKS)), ids=lambda mark: f"{MARKS[mark].field} {MARKS[mark].value}")


@EACH
def test_rows_and_holds_of_a_mark_refer_to_each_other(mark: int) -> None:
    own = all_marked()[mark]
    names = [row.name for row in own.rows]
    assert len({*names}) == len(names) and {*names} <= {*row_names()}
    for place, row in enumerate(own.rows):
        assert all(FORWARD <= before < place for before in row.after) and TaskKind(row.kind)
        assert row.needed == (place == 0 and own.needed)
        assert row.takes in ROW_NS or row.takes.name in ("MOMENT", "COPY")
    assert {name for hold in own.holds for name in (hold.since, hold.until) if name} <= {*names}
    assert own.kept_until in ("", *names) and (not own.together or own.needed)


def test_ids_of_the_rows_of_all_marks_differ() -> None:
    rows = {row for own in all_marked() for row in own.rows}
    places: dict[str, set[tuple[bool, int]]] = {}
    for row in rows:
        places.setdefault(row.name, set()).add((row.backward, row.stage))
    assert all(len(own) == 1 for own in places.values())
    for own in all_marked():
        assert len({(row.backward, row.stage) for row in own.rows}) == len(own.rows)


@EACH
def test_compiled_code_knows_what_waits_for_what(mark: int) -> None:
    tables, rows = mark_tables(), all_marked()[mark].rows
    assert tables.ptr[mark + 1] - tables.ptr[mark] == len(rows)
    for source in range(FORWARD, len(rows)):
        place = tables.ptr[mark] + mark + source + 1
        told = tables.tells[tables.tells_ptr[place] : tables.tells_ptr[place + 1]].tolist()
        waiting = {ROW_BLOCKS + own for own, row in enumerate(rows) if source in row.after}
        assert {*told} == waiting | ({BACKWARD_BLOCK} if source != FORWARD and rows[source].before_backward else set())


def test_a_configuration_has_one_mark() -> None:
    for mark, own in enumerate(MARKS):
        config = with_mark(with_mark(on(0, degrees=()), len(MARKS) - 1), mark)
        assert mark_of(config) == mark
        assert {feature.field: getattr(config, feature.field) for feature in FEATURES} == {
            feature.field: own.value if own.field == feature.field else feature.values[0] for feature in FEATURES
        }
