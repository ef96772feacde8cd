"""Coverage: from which holdings a region of an activation is put together, preferring the nearest.

The holdings of one tensor form a grid (each dimension follows at most one factor), perhaps several times (replicas). So those
that meet a region are found by bisection per dimension; the work is in proportion to the overlaps, not to the tiles.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import pairwise, product
from math import prod

from soap.errors import ModelError
from soap.model.regions import Box, Interval, contains, intersect, subtract
from soap.plan.plan import Holding

LocalPiece = tuple[Box, int]
"""A region and the holding that it is taken from (position among the operator's own holdings)."""

REMEMBERED = 4096
"""Answers kept per index: enough for the consumers of a current strategy; proposals come and go."""


class HolderIndex:
    """The holdings of one tensor, found by region and device. ``positions``: their places among the operator's holdings."""

    def __init__(self, tensor: str, positions: Sequence[int], holdings: Sequence[Holding]) -> None:
        self._tensor = tensor
        self._holdings = {position: holdings[position] for position in positions}
        self._by_box: dict[Box, list[int]] = {}
        self._by_device: dict[int, list[int]] = {}
        for position in sorted(positions, key=lambda p: (holdings[p].tile, p)):
            self._by_box.setdefault(holdings[position].box, []).append(position)
            self._by_device.setdefault(holdings[position].device, []).append(position)
        self._grid = [_Cuts({box[dim] for box in self._by_box}) for dim in range(self._rank())]
        self._answers: dict[tuple[Box, int], tuple[LocalPiece, ...]] = {}

    def cover(self, box: Box, device: int, distances: Sequence[int]) -> tuple[LocalPiece, ...]:
        """Disjoint pieces that make up ``box`` on ``device``, from holders in the order of (distance, tile).

        ``distances``: from every device to ``device``; must be the same for the same device in all calls.
        """
        answer = self._answers.get((box, device))
        if answer is None:
            if len(self._answers) >= REMEMBERED:
                self._answers.clear()
            answer = self._answers[box, device] = self._cover(box, device, distances)
        return answer

    def _cover(self, box: Box, device: int, distances: Sequence[int]) -> tuple[LocalPiece, ...]:
        for position in self._by_device.get(device, ()):
            if contains(self._holdings[position].box, box):
                return ((box, position),)
        pieces: list[LocalPiece] = []
        missing = [box]
        for position in self._nearest_first(box, distances):
            rest: list[Box] = []
            for region in missing:
                common = intersect(region, self._holdings[position].box)
                if common is None:
                    rest.append(region)
                else:
                    pieces.append((common, position))
                    rest.extend(subtract(region, common))
            missing = rest
            if not missing:
                return tuple(pieces)
        raise ModelError(
            f"region {missing[0]} of tensor {self._tensor!r} is computed by no tile although tiles read it; "
            "expected its producer's tiles to cover it: this is a defect of that operator's rule, please report it"
        )

    def _nearest_first(self, box: Box, distances: Sequence[int]) -> list[int]:
        found = [position for held in self._meeting(box) for position in self._by_box.get(held, ())]
        return sorted(found, key=lambda p: (distances[self._holdings[p].device], self._holdings[p].tile, p))

    def _meeting(self, box: Box) -> list[Box]:
        """Distinct held boxes that meet ``box``: the product of the intervals met per dimension, or all if that is more."""
        ranges = [cuts.meeting(interval) for cuts, interval in zip(self._grid, box, strict=True)]
        if prod(map(len, ranges)) <= len(self._by_box):
            return list(product(*ranges))
        return list(self._by_box)

    def _rank(self) -> int:
        return len(next(iter(self._by_box), ()))


class _Cuts:
    """The distinct intervals that holdings have in one dimension, for search by position."""

    def __init__(self, intervals: set[Interval]) -> None:
        self._intervals = sorted(intervals)
        self._starts = [start for start, _ in self._intervals]
        self._stops = [stop for _, stop in self._intervals]
        self._disjoint = all(a[1] <= b[0] for a, b in pairwise(self._intervals))

    def meeting(self, interval: Interval) -> Sequence[Interval]:
        if not self._disjoint:
            return self._intervals
        return self._intervals[bisect_right(self._stops, interval[0]) : bisect_left(self._starts, interval[1])]
