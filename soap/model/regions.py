"""Boxes: axis-aligned regions of a tensor, in global element coordinates.

A ``Box`` is one half-open interval ``(start, stop)`` per dimension; a scalar's box is ``()``. Everything that moves between
devices (tiles, halos, parameter shards) is a box, so lowering and runtime agree on what is where.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise

Interval = tuple[int, int]
Box = tuple[Interval, ...]


def whole(shape: Sequence[int]) -> Box:
    """The box that covers a tensor of this shape."""
    return tuple((0, size) for size in shape)


def lengths(box: Box) -> tuple[int, ...]:
    """The shape of the tensor that holds exactly this box."""
    return tuple(stop - start for start, stop in box)


def volume(box: Box) -> int:
    """Number of elements in the box; 1 for a scalar's box, 0 if any interval is empty."""
    size = 1
    for start, stop in box:
        if stop <= start:
            return 0
        size *= stop - start
    return size


def intersect(a: Box, b: Box) -> Box | None:
    """The common region, or None if it is empty. Scalars' boxes intersect in themselves."""
    common = tuple((max(a0, b0), min(a1, b1)) for (a0, a1), (b0, b1) in zip(a, b, strict=True))
    return None if any(start >= stop for start, stop in common) else common


def in_one_piece(box: Box, shape: Sequence[int]) -> bool:
    """Whether the box's elements are contiguous in a row-major tensor of this shape. An empty box's are."""
    cut = False
    for (start, stop), size in zip(reversed(box), reversed(shape), strict=True):
        if cut and stop - start > 1:
            return volume(box) == 0
        cut = cut or stop - start < size
    return True


def contains(outer: Box, inner: Box) -> bool:
    """Whether every element of ``inner`` lies in ``outer``."""
    return all(o0 <= i0 and i1 <= o1 for (o0, o1), (i0, i1) in zip(outer, inner, strict=True))


def subtract(box: Box, hole: Box) -> list[Box]:
    """``box`` without ``hole``, as disjoint boxes in a deterministic order."""
    common = intersect(box, hole)
    if common is None:
        return [box]
    pieces: list[Box] = []
    rest = list(box)
    for dim, (start, stop) in enumerate(common):
        low, high = rest[dim]
        if low < start:
            pieces.append((*rest[:dim], (low, start), *rest[dim + 1 :]))
        if stop < high:
            pieces.append((*rest[:dim], (stop, high), *rest[dim + 1 :]))
        rest[dim] = (start, stop)
    return pieces


def cells(boxes: Iterable[Box]) -> list[Box]:
    """The coarsest grid cells such that each input box is a union of cells.

    Cut positions are the union of all box borders per dimension; cells outside every box are left out. Sorted.
    """
    distinct = sorted(set(boxes))
    if len(distinct) <= 1:
        return distinct
    result: set[Box] = set()
    cuts = [sorted({edge for box in distinct for edge in box[dim]}) for dim in range(len(distinct[0]))]
    for box in distinct:
        parts: list[Box] = [()]
        for dim, (start, stop) in enumerate(box):
            inside = [c for c in cuts[dim] if start <= c <= stop]
            parts = [(*part, (a, b)) for part in parts for a, b in pairwise(inside)]
        result.update(parts)
    return sorted(result)


def relative(box: Box, origin: Box) -> tuple[slice, ...]:
    """Slices that select ``box`` from a tensor that holds ``origin``."""
    return tuple(slice(a - o, b - o) for (a, b), (o, _) in zip(box, origin, strict=True))


def balanced(size: int, parts: int) -> list[Interval]:
    """``size`` elements in ``parts`` contiguous pieces; the first ``size % parts`` are one longer."""
    return proportional(size, (1,) * parts)


def proportional(size: int, weights: Sequence[int]) -> list[Interval]:
    """``size`` elements in contiguous pieces in proportion to positive ``weights``. Each has its share rounded down; what is left goes one
    by one to those that lost most by that, of equal ones to the first."""
    total = sum(weights)
    lengths = [size * weight // total for weight in weights]
    lost = sorted(range(len(weights)), key=lambda part: -(size * weights[part] % total))
    for part in lost[: size - sum(lengths)]:
        lengths[part] += 1
    stops = list(accumulate(lengths, initial=0))
    return list(pairwise(stops))
