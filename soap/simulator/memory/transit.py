"""How a plan's values travel: in which buffers they are received, what may be on its way out, and what lies in one piece."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from soap.model.regions import Box, in_one_piece, lengths, volume
from soap.plan.delivery import Delivery
from soap.plan.plan import Part, Pattern


def received_apart(own: Delivery) -> set[Part]:
    """Parts of a delivery that are received into a buffer of their own and then copied into their region."""
    alone = {part for message in own.messages if len(message.parts) == 1 for part in message.parts}
    alone |= {part for exchange in own.exchanges if exchange.pattern is Pattern.BROADCAST for part in exchange.parts}
    found: set[Part] = set()
    for number, fetch in enumerate(own.fetches):
        pieces = enumerate(fetch.pieces)
        remote = {(number, k) for k, (_, holding) in pieces if own.holdings[holding].device != fetch.device}
        if len(fetch.pieces) > 1 or not alone.issuperset(remote):
            found |= remote
    return found


SENT_BYTES = 64 * 2**20
SENT_TENSORS = 64
"""At most this many bytes, in this many tensors, may be on their way out; then the runtime waits for the oldest send."""
NO_STAY = -(2**62)
"""In place of the least number of what is sent from where it lies (``ArrayLedger.stay``), if nothing is: of equal sends it is first."""


def lies_in_one_piece(part: Box, box: Box) -> bool:
    """Whether a part of a region is contiguous in the memory of the region, which lies there row by row."""
    return in_one_piece(tuple((a - o, b - o) for (a, b), (o, _) in zip(part, box, strict=True)), lengths(box))


def cells_land_in_place(box: Box, cells: Sequence[Box]) -> bool:
    """Whether the cells of a sum of ``box``, in the order of its devices, lie one behind the other in the memory of all of it."""
    starts = [start for start, _ in box]
    inside = [tuple((a - o, b - o) for (a, b), o in zip(cell, starts, strict=True)) for cell in cells if volume(cell)]
    return all(one < other for one, other in pairwise(inside)) and all(in_one_piece(cell, lengths(box)) for cell in inside)
