"""Where a sum of partial results goes: whole to every device of its group (all-reduce), or one cell to each (reduce-scatter).

A reduce-scatter is possible where the readers on each device need only a part of the sum. It is chosen if the busiest device then receives
fewer bytes. With B bytes on n devices, a ring all-reduce makes each device receive 2(n-1)/n * B. A reduce-scatter makes it receive n-1
partial results of its cell, and then what its readers need outside of the cell. The backward pass moves the same bytes as the forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, pairwise

from soap.model.regions import Box, Interval, intersect, volume


def choose_cells(box: Box, reads: Sequence[Sequence[Box]]) -> tuple[Box, ...]:
    """One cell per device; the cells are disjoint and cover ``box``. () if an all-reduce is better, or no cells are found.

    ``reads[i]``: the regions of the sum that tiles on the group's i-th device read.
    """
    if not box or len(reads) < 2:
        return ()
    inside = [[part for read in own if (part := intersect(read, box)) is not None] for own in reads]
    hulls = [_hull(own) for own in inside]
    cells = _as_they_are(box, hulls) or _cut_along_one_dimension(box, hulls)
    if not cells:
        return ()
    count = len(reads)
    received = [
        (count - 1) * volume(cell) + sum(volume(read) - _common(read, cell) for read in own)
        for cell, own in zip(cells, inside, strict=True)
    ]
    return cells if count * max(received) < 2 * (count - 1) * volume(box) else ()


def _hull(boxes: Sequence[Box]) -> Box | None:
    """The smallest box that contains them all."""
    if not boxes:
        return None
    return tuple((min(start for start, _ in dim), max(stop for _, stop in dim)) for dim in zip(*boxes, strict=True))


def _common(a: Box, b: Box) -> int:
    found = intersect(a, b)
    return 0 if found is None else volume(found)


def _as_they_are(box: Box, hulls: Sequence[Box | None]) -> tuple[Box, ...]:
    """What the devices read, if these regions are disjoint and together make up the box; else ()."""
    found = [hull for hull in hulls if hull is not None]
    if sum(map(volume, found)) != volume(box) or any(intersect(a, b) is not None for a, b in combinations(found, 2)):
        return ()
    return tuple(_empty(box) if hull is None else hull for hull in hulls)


def _cut_along_one_dimension(box: Box, hulls: Sequence[Box | None]) -> tuple[Box, ...]:
    """Cells along one dimension, in the order in which devices read it. Borders are in the middle of overlaps (halos) and gaps."""
    found = {device: hull for device, hull in enumerate(hulls) if hull is not None}
    if not found:
        return ()
    dim = max(range(len(box)), key=lambda d: (len({hull[d] for hull in found.values()}), -d))
    order = sorted(found, key=lambda device: found[device][dim])
    intervals = [found[device][dim] for device in order]
    if any(a[0] >= b[0] or a[1] >= b[1] for a, b in pairwise(intervals)):
        return ()
    cells = [_empty(box)] * len(hulls)
    for device, cell in zip(order, _borders(box[dim], intervals), strict=True):
        cells[device] = (*box[:dim], cell, *box[dim + 1 :])
    return tuple(cells)


def _borders(whole: Interval, intervals: Sequence[Interval]) -> list[Interval]:
    edges = [whole[0], *((a[1] + b[0]) // 2 for a, b in pairwise(intervals)), whole[1]]
    return list(pairwise(edges))


def _empty(box: Box) -> Box:
    return tuple((start, start) for start, _ in box)
