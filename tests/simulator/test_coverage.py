"""Coverage: pieces come from the nearest holders, are disjoint and complete, whatever the holders look like."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from soap.errors import ModelError
from soap.model.regions import Box, contains, intersect, volume
from soap.plan.coverage import HolderIndex
from soap.plan.plan import Holding
from tests.strategies import boxes


def index(*held: tuple[Box, int]) -> HolderIndex:
    holdings = [Holding("t", box, device, tile) for tile, (box, device) in enumerate(held)]
    return HolderIndex("t", range(len(holdings)), holdings)


def test_a_holder_on_the_device_that_has_it_all_is_the_only_source() -> None:
    assert index((((0, 8),), 0), (((0, 8),), 1)).cover(((2, 5),), 1, (1, 0)) == ((((2, 5),), 1),)


def test_the_device_itself_comes_before_its_host_and_that_before_the_rest() -> None:
    holders = index((((0, 4),), 2), (((4, 8),), 2), (((0, 4),), 1), (((4, 8),), 0))
    assert holders.cover(((0, 8),), 0, (0, 1, 2)) == ((((4, 8),), 3), (((0, 4),), 2))


def test_among_equally_near_holders_the_lowest_tile_gives() -> None:
    assert index((((0, 8),), 1), (((0, 8),), 2)).cover(((0, 3),), 0, (0, 1, 1)) == ((((0, 3),), 0),)


def test_a_region_over_a_grid_takes_one_piece_from_every_cell_that_it_meets() -> None:
    grid = [((r, r + 4), (c, c + 4)) for r in (0, 4) for c in (0, 4)]
    pieces = index(*[(box, 1) for box in grid]).cover(((3, 5), (2, 8)), 0, (0, 1))
    assert pieces == ((((3, 4), (2, 4)), 0), (((3, 4), (4, 8)), 1), (((4, 5), (2, 4)), 2), (((4, 5), (4, 8)), 3))


def test_a_scalar_comes_from_its_nearest_holder() -> None:
    assert index(((), 1), ((), 2)).cover((), 0, (0, 2, 1)) == (((), 1),)


def test_what_no_tile_computes_is_reported_as_a_defect_of_the_rule() -> None:
    with pytest.raises(ModelError, match=r"region \(\(4, 6\),\) of tensor 't' is computed by no tile"):
        index((((0, 4),), 0)).cover(((2, 6),), 1, (1, 0))


@given(st.lists(st.tuples(boxes(2), st.integers(0, 2)), min_size=1, max_size=6), boxes(2), st.integers(0, 2))
def test_any_holders_even_overlapping_ones(held: list[tuple[Box, int]], wanted: Box, device: int) -> None:
    points = [((r, r + 1), (c, c + 1)) for r in range(*wanted[0]) for c in range(*wanted[1])]
    holders = index(*held)
    distances = [0 if d == device else 1 for d in range(3)]
    if not all(any(contains(box, point) for box, _ in held) for point in points):
        with pytest.raises(ModelError):
            holders.cover(wanted, device, distances)
        return
    pieces = holders.cover(wanted, device, distances)
    assert all(contains(held[holder][0], box) for box, holder in pieces)
    assert sum(volume(box) for box, _ in pieces) == volume(wanted)
    assert all(intersect(a, b) is None for i, (a, _) in enumerate(pieces) for b, _ in pieces[:i])
    for box, holder in pieces:  # nothing is moved that lies here already
        assert held[holder][1] == device or all(intersect(box, own) is None for own, d in held if d == device)
