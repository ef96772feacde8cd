from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from soap.model.regions import contains, intersect, volume
from soap.runtime.checkpoint.storage import halved
from tests.strategies import boxes


@given(box=st.integers(0, 3).flatmap(boxes), limit=st.integers(1, 100))
def test_halves_partition_a_box_and_lie_in_one_piece_of_memory(box: tuple[tuple[int, int], ...], limit: int) -> None:
    pieces = halved(box, 4, limit)
    assert sum(volume(piece) for piece in pieces) == volume(box)
    for i, piece in enumerate(pieces):
        assert contains(box, piece)
        assert volume(piece) * 4 <= max(limit, 4)
        assert all(intersect(piece, other) is None for other in pieces[:i])
        cut = [own != full for own, full in zip(piece, box, strict=True)]
        last = max((i for i, c in enumerate(cut) if c), default=0)
        assert all(stop - start == 1 for start, stop in piece[:last])  # before the last dimension that is cut, one element each


def test_a_small_box_stays_whole() -> None:
    assert halved(((0, 4), (2, 6)), 4, 64) == [((0, 4), (2, 6))]
    assert halved((), 8, 1) == [()]
