from __future__ import annotations

from collections import Counter
from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from soap.model.regions import Box, balanced, cells, contains, in_one_piece, intersect, lengths, relative, subtract, volume, whole
from tests.extent import MANY
from tests.strategies import boxes

DIMENSIONS = st.integers(0, 3)
PAIRS = DIMENSIONS.flatmap(lambda n: st.tuples(boxes(n, most=5), boxes(n, most=5)))
LISTS = DIMENSIONS.flatmap(lambda n: st.lists(boxes(n, most=5), max_size=4))


def points(box: Box) -> set[tuple[int, ...]]:
    """The elements of a box, one by one: the oracle."""
    return set(product(*(range(start, stop) for start, stop in box)))


def test_scalars_and_empty_boxes() -> None:
    assert whole(()) == ()
    assert whole((2, 0)) == ((0, 2), (0, 0))
    assert (volume(()), volume(((0, 3), (2, 4))), volume(((0, 3), (2, 2))), volume(((3, 1), (2, 0)))) == (1, 6, 0, 0)
    assert lengths(((1, 4), (2, 2))) == (3, 0)
    assert intersect((), ()) == ()
    assert subtract((), ()) == []
    assert intersect(((0, 2),), ((2, 4),)) is None
    assert cells([]) == []
    assert cells([(), ()]) == [()]


@given(boxes(3, most=4, allow_empty=True), st.tuples(*[st.integers(4, 5)] * 3))
@MANY
def test_in_one_piece_is_a_run_of_places(box: Box, shape: tuple[int, ...]) -> None:
    places = sorted((i * shape[1] + j) * shape[2] + k for i, j, k in points(box))
    assert in_one_piece(box, shape) == (not places or places == list(range(places[0], places[-1] + 1)))


def test_samples_are_in_one_piece_and_columns_are_not() -> None:
    assert in_one_piece(((1, 3), (0, 5)), (4, 5)) and in_one_piece(((1, 2), (2, 4)), (4, 5)) and in_one_piece((), ())
    assert not in_one_piece(((0, 4), (0, 4)), (4, 5)) and not in_one_piece(((1, 3), (0, 1)), (4, 5))


@given(PAIRS)
@MANY
def test_intersection_containment_and_difference_are_those_of_the_point_sets(pair: tuple[Box, Box]) -> None:
    a, b = pair
    common = intersect(a, b)
    assert (points(common) if common is not None else set()) == points(a) & points(b)
    assert contains(a, b) == (points(b) <= points(a))
    pieces = subtract(a, b)
    counted = Counter(point for piece in pieces for point in points(piece))
    assert set(counted) == points(a) - points(b)
    assert set(counted.values()) <= {1}
    assert all(volume(piece) > 0 for piece in pieces)


@given(LISTS)
@MANY
def test_cells_are_disjoint_and_make_up_every_box(several: list[Box]) -> None:
    grid = cells(several)
    counted = Counter(point for cell in grid for point in points(cell))
    assert set(counted) == set().union(*(points(box) for box in several))
    assert set(counted.values()) <= {1}
    assert grid == sorted(grid)
    for box in several:
        assert set().union(*(points(cell) for cell in grid if contains(box, cell))) == points(box)


def test_cells_are_no_finer_than_needed() -> None:
    assert cells([((0, 4),), ((0, 4),)]) == [((0, 4),)]
    assert cells([((0, 4),), ((2, 6),)]) == [((0, 2),), ((2, 4),), ((4, 6),)]
    assert cells([((0, 2), (0, 4)), ((2, 4), (0, 2))]) == [((0, 2), (0, 2)), ((0, 2), (2, 4)), ((2, 4), (0, 2))]


def test_relative_selects_a_box_from_what_holds_it() -> None:
    assert relative(((3, 5), (0, 1)), ((2, 6), (0, 4))) == (slice(1, 3), slice(0, 1))
    assert relative((), ()) == ()


@given(st.integers(0, 40), st.integers(1, 12))
def test_balanced_pieces_partition_with_the_longer_ones_first(size: int, parts: int) -> None:
    pieces = balanced(size, parts)
    assert [start for start, _ in pieces] == [0, *(stop for _, stop in pieces[:-1])]
    assert pieces[-1][1] == size
    assert [stop - start for start, stop in pieces] == [size // parts + 1] * (size % parts) + [size // parts] * (parts - size % parts)
