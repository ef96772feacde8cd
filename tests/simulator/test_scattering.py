"""Cells of a sum: when they are chosen, which, and that they always cover it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from soap.model.regions import Box, contains, intersect, volume
from soap.plan.planning import choose_cells
from tests.extent import MANY
from tests.strategies import boxes

WHOLE: Box = ((0, 8), (0, 6))


def rows(start: int, stop: int) -> Box:
    return ((start, stop), (0, 6))


@pytest.mark.parametrize(
    ("reads", "expected"),
    [
        ([[rows(0, 4)], [rows(4, 8)]], (rows(0, 4), rows(4, 8))),
        ([[rows(4, 8)], [rows(0, 4)]], (rows(4, 8), rows(0, 4))),
        ([[rows(0, 2), rows(2, 4)], [rows(4, 8)]], (rows(0, 4), rows(4, 8))),
        ([[rows(0, 3)], [rows(3, 6)], [rows(6, 8)]], (rows(0, 3), rows(3, 6), rows(6, 8))),
        ([[rows(0, 5)], [rows(3, 8)]], (rows(0, 4), rows(4, 8))),  # halos: the border is in the middle
        ([[rows(0, 3)], [rows(5, 8)]], (rows(0, 4), rows(4, 8))),  # what nobody here reads
    ],
)
def test_parts_that_the_devices_read_are_their_cells(reads: list[list[Box]], expected: tuple[Box, ...]) -> None:
    assert choose_cells(WHOLE, reads) == expected


def test_a_grid_of_parts() -> None:
    grid = [((a, a + 4), (b, b + 3)) for a in (0, 4) for b in (0, 3)]
    assert choose_cells(WHOLE, [[box] for box in grid]) == tuple(grid)


@pytest.mark.parametrize(
    "reads",
    [
        [[WHOLE], [WHOLE]],
        [[WHOLE], []],  # one device would receive the partial results of all
        [[], []],
        [[rows(0, 4)], [rows(4, 8), WHOLE]],  # would fetch the other half besides
        [[rows(0, 8)], [rows(1, 8)]],
        [[rows(0, 4)], [rows(0, 4)]],
    ],
)
def test_sums_that_are_better_left_whole(reads: list[list[Box]]) -> None:
    assert choose_cells(WHOLE, reads) == ()


def test_a_scalar_is_left_whole() -> None:
    assert choose_cells((), [[()], [()]]) == ()


@given(st.lists(st.lists(boxes(2), max_size=3), min_size=2, max_size=4))
@MANY
def test_cells_are_disjoint_and_move_less(reads: list[list[Box]]) -> None:
    cells = choose_cells(WHOLE, reads)
    if not cells:
        return
    full = [cell for cell in cells if volume(cell)]
    assert len(cells) == len(reads) and sum(map(volume, full)) == volume(WHOLE)
    assert all(contains(WHOLE, a) and all(intersect(a, b) is None for b in full[:i]) for i, a in enumerate(full))
    received = 0
    for cell, own in zip(cells, reads, strict=True):
        inside = [part for read in own if (part := intersect(read, WHOLE)) is not None]
        received += (len(cells) - 1) * volume(cell) + sum(volume(part) - volume(intersect(part, cell) or ((0, 0),)) for part in inside)
    assert received < 2 * (len(cells) - 1) * volume(WHOLE)
