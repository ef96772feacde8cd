"""Coverage: which holdings a region of an activation is assembled from, nearest first.

The holdings of one tensor form a grid, because each dimension follows at most one factor; replicas repeat the grid. So bisection in each
dimension finds the holdings that overlap a region, and the work grows with the overlaps, not with the number of tiles.
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
"""Answers that each index keeps: enough for all consumers in the current strategy. Proposals come and go."""


class HolderIndex:
    """Finds the holdings of one tensor by region and device. ``positions``: where they are in the operator's ``holdings``."""

    def __init__(self, tensor: str, positions: Sequence[int], holdings: Sequence[Holding]) -> None:
        self._tensor = tensor
        self._holdings = {position: holdings[position] for position in positions}
        self._by_box: dict[Box, list[int]] = {}
        for position in sorted(positions, key=lambda p: (holdings[p].tile, p)):
            self._by_box.setdefault(holdings[position].box, []).append(position)
        self._grid = [_Cuts({box[dim] for box in self._by_box}) for dim in range(self._rank())]
        self._answers: dict[tuple[Box, int], tuple[LocalPiece, ...]] = {}

    def cover(self, box: Box, device: int, distances: Sequence[int]) -> tuple[LocalPiece, ...]:
        """Disjoint pieces that make up ``box`` on ``device``, from holders in the order of (distance, tile).

        ``distances[d]``: the distance from device d to ``device``; all calls for one device must give the same. ModelError if the holdings
        do not cover ``box``.
        """
        answer = self._answers.get((box, device))
        if answer is None:
            if len(self._answers) >= REMEMBERED:
                self._answers.clear()
            answer = self._answers[box, device] = self._cover(box, device, distances)
        return answer

    def _cover(self, box: Box, device: int, distances: Sequence[int]) -> tuple[LocalPiece, ...]:
        around = (held for held in self._meeting(box) if held in self._by_box and contains(held, box))
        local = (p for held in around for p in self._by_box[held] if self._holdings[p].device == device)
        nearest = min(local, key=lambda p: (self._holdings[p].tile, p), default=None)
        if nearest is not None:
            return ((box, nearest),)
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
        """Candidates for overlap with ``box``: the product of the overlapping intervals per dimension, or all boxes if that is more."""
        ranges = [cuts.meeting(interval) for cuts, interval in zip(self._grid, box, strict=True)]
        if prod(map(len, ranges)) <= len(self._by_box):
            return list(product(*ranges))
        return list(self._by_box)

    def _rank(self) -> int:
        return len(next(iter(self._by_box), ()))


class _Cuts:
    """The distinct intervals of the holdings in one dimension, sorted so that bisection finds those that overlap another."""

    def __init__(self, intervals: set[Interval]) -> None:
        self._intervals = sorted(intervals)
        self._starts = [start for start, _ in self._intervals]
        self._stops = [stop for _, stop in self._intervals]
        self._disjoint = all(a[1] <= b[0] for a, b in pairwise(self._intervals))

    def meeting(self, interval: Interval) -> Sequence[Interval]:
        if not self._disjoint:
            return self._intervals
        return self._intervals[bisect_right(self._stops, interval[0]) : bisect_left(self._starts, interval[1])]
