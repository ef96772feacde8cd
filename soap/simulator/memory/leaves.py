"""Gradients that autograd copies when it brings them to a leaf, from which a segment starts.

The first one is taken as it is if it lies row by row in memory of its own, as the leaf does (``Footprint.in_rows``). Others are copied:
that of a shortcut is the gradient of what it is added to as well, that of a mean is one number repeated, that of a part is a view.
Footprints know such gradients as made once, as within a segment they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from soap.plan.delivery import box_bytes
from soap.simulator.memory.leaving import lies_in_rows
from soap.simulator.memory.task_spans import Span, TaskSpans


class Leaves:
    """Collects who reads leaves, and what is then copied."""

    def __init__(self, spans: TaskSpans) -> None:
        self._spans, self._plan = spans, spans.plan
        self._reads: dict[tuple[str, int], tuple[int, list[_Read]]] = {}  # leaf -> (bytes, its reads)
        self._spread: dict[int, bool] = {}  # holding -> whether only its segment reads it, once, and gives it a few numbers repeated

    def read_region(self, number: int) -> None:
        """Note the readers of a region with parts from elsewhere: it is one leaf, row by row."""
        plan, fetch = self._plan, self._plan.fetches[number]
        self._spread.update(dict.fromkeys((piece.holding for piece in fetch.pieces), False))
        for tile, place in fetch.consumers:
            self._note(("fetch", number), box_bytes(plan, fetch.tensor, fetch.box), tile, place in self._in_rows(tile))

    def read_pieces(self, number: int) -> None:
        """Note the readers of holdings that other segments have made, or that are sums. Of several pieces each gets a view."""
        plan, segment = self._plan, self._spans.segment
        fetch = plan.fetches[number]
        for holding in (piece.holding for piece in fetch.pieces):
            held, sole = plan.holdings[holding], len(fetch.pieces) == 1
            for tile, place in fetch.consumers:
                if tile not in self._spans.backward:
                    continue
                if held.reduction is not None or segment.get(held.tile) != segment[tile]:
                    taken = sole and place in self._in_rows(tile) and lies_in_rows(plan, holding)
                    self._note(("holding", holding), box_bytes(plan, held.tensor, held.box), tile, taken)
                    self._spread[holding] = False
                else:
                    spread = sole and place in self._spans.sizes[tile].shares.spread
                    self._spread[holding] = spread and holding not in self._spread

    def copied(self) -> Iterator[tuple[int, Span, int]]:
        """(device, when, bytes) of copies beside what they are made of: the last reader in the first segment to go back brings a leaf's
        gradient, added up. A copy may take the place of a gradient that it is made of, which counts, but takes hardly any memory."""
        copies: dict[int, int] = {}
        for size, reads in self._reads.values():
            own = [read for read in reads if read.segment == min(reads).segment]
            if not all(read.taken for read in own):
                tile = max(own).tile
                copies[tile] = copies.get(tile, 0) + size
        spare: dict[int, int] = {}
        for holding, spread in self._spread.items():
            held = self._plan.holdings[holding]
            if spread:
                spare[held.tile] = spare.get(held.tile, 0) + box_bytes(self._plan, held.tensor, held.box)
        for tile, size in copies.items():
            yield self._plan.tiles[tile].device, self._spans.backward[tile], max(0, size - spare.get(tile, 0))

    def _note(self, leaf: tuple[str, int], size: int, tile: int, taken: bool) -> None:
        if tile in self._spans.backward:
            read = _Read(self._spans.backward[tile], self._spans.segment[tile], tile, taken)
            self._reads.setdefault(leaf, (size, []))[1].append(read)

    def _in_rows(self, tile: int) -> frozenset[int]:
        return self._spans.sizes[tile].shares.in_rows


class _Read(NamedTuple):
    """A tile that reads a leaf goes back. ``taken``: its gradient may be the leaf's."""

    span: Span
    segment: int
    tile: int
    taken: bool
