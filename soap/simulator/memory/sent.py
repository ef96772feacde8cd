"""How long what devices send to others in the forward pass is there, over arrays.

A part in one piece of memory leaves from where it lies, without a copy, and keeps all of what it is a part of.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from soap.plan.departures import PASSES_UNDER_WAY
from soap.plan.pass_order import PassOrder
from soap.plan.plan import Plan
from soap.simulator.memory.array_ledger import ArrayLedger
from soap.simulator.memory.derived import Derived
from soap.simulator.memory.grouped import Bools, Longs, any_of, least, most, owners, rows_of, total
from soap.simulator.memory.plan_arrays import BROADCAST, MESSAGE, PlanArrays
from soap.simulator.memory.rank_order import pass_ranks
from soap.simulator.memory.spans import NEVER, Spans
from soap.simulator.memory.values import Gone


def send_values(plan: Plan, arrays: PlanArrays, spans: Spans, times: Derived, ledger: ArrayLedger, gone: Gone, left: Longs) -> None:
    """Write into a ledger what devices send in the forward pass, until it has left. ``left``: see ``left_by``."""
    carriers, pieces, holdings = arrays.carriers, arrays.pieces, arrays.holdings
    if not len(carriers.pattern):
        return
    own = _parcels(arrays)
    _, first, send, several = np.unique(
        own.carrier * len(ledger.is_accelerator) + own.source, return_index=True, return_inverse=True, return_counts=True
    )
    together = (several[send] > 1) & ledger.is_accelerator[own.source]
    lies = (own.parts == 1) & pieces.in_holding[own.piece] & ~together
    count, device, carrier = len(first), own.source[first], own.carrier[first]
    start = spans.brought_start[carrier]
    over = np.where(carriers.pattern[carrier] == BROADCAST, spans.brought_end[carrier], ledger.arrived(device, spans.brought_end[carrier]))
    over = np.where(carriers.pattern[carrier] == MESSAGE, _told(arrays, spans, times, left)[carrier], over)
    size, copied = total(send, own.bytes, count), total(send, np.where(lies, 0, own.bytes), count)
    numbers = ledger.send(device, start, over, size, held=copied, copied=True)
    again = np.flatnonzero(spans.gathered_start[carrier] != NEVER)
    if len(again):
        ends, done = ledger.arrived(device[again], spans.gathered_end[carrier[again]]), spans.gathered_end[carrier[again]]
        ends = np.where(carriers.pattern[carrier[again]] == MESSAGE, np.maximum(over[again], done), ends)  # known as of the first time
        ledger.send(device[again], spans.gathered_start[carrier[again]], ends, size[again], copied=True)
    of = pieces.holding[own.piece[lies]]
    since = np.where(holdings.sum[of] < 0, gone.outputs[holdings.output[of]], np.append(gone.sums, NEVER)[times.holding_row[of]])
    copy_bytes = np.where(holdings.in_rows[of], 0, own.bytes[lies])
    ledger.stay(numbers[send[lies]], of, since, holdings.bytes[of], copy_bytes)


class _Parcels(NamedTuple):
    """Parts of values that a device sends to one other, or to itself, at once: ``parts`` of them, in ``bytes``, ``piece`` one of them."""

    carrier: Longs
    source: Longs
    piece: Longs
    parts: Longs
    bytes: Longs


def _parcels(arrays: PlanArrays) -> _Parcels:
    """All that is sent, by carrier, source and target: of a broadcast the first part alone, because all devices receive that one."""
    carriers, pieces = arrays.carriers, arrays.pieces
    carrier = owners(carriers.parts)
    own = np.flatnonzero((carriers.pattern[carrier] != BROADCAST) | (np.arange(len(carrier)) == carriers.parts[carrier]))
    carrier, piece = carrier[own], carriers.part[own]
    to_itself = _given_to_itself(arrays, carrier, piece)
    carrier, piece = np.append(carrier, to_itself[0]), np.append(piece, to_itself[1])
    source, target = arrays.holdings.device[pieces.holding[piece]], arrays.fetches.device[pieces.fetch[piece]]
    devices = int(max(source.max(initial=0), target.max(initial=0))) + 1
    keys = (carrier * devices + source) * devices + target
    _, first, group, parts = np.unique(keys, return_index=True, return_inverse=True, return_counts=True)
    return _Parcels(carrier[first], source[first], piece[first], parts, total(group, pieces.bytes[piece], len(first)))


def _given_to_itself(arrays: PlanArrays, carrier: Longs, piece: Longs) -> tuple[Longs, Longs]:
    """(carrier, piece) of what devices send to themselves in exchanges: own pieces of the only region that comes, if they send these values
    to others as well and all pieces then arrive in their places (``Arrivals``). ``carrier``, ``piece``: what they send to others."""
    pieces, fetches = arrays.pieces, arrays.fetches
    own = arrays.carriers.pattern[carrier] > MESSAGE
    own &= arrays.carriers.pattern[carrier] != BROADCAST
    carrier, piece = carrier[own], piece[own]
    devices = int(fetches.device.max(initial=0)) + 1
    keys, group = np.unique(carrier * devices + fetches.device[pieces.fetch[piece]], return_inverse=True)
    lowest, fetch = (found(group, pieces.fetch[piece], len(keys), NEVER) for found in (least, most))
    scattered = any_of(pieces.fetch[~pieces.in_fetch], len(fetches.device))
    sole = np.flatnonzero((lowest == fetch) & ~scattered[fetch])
    place, row = rows_of(fetches.pieces, fetch[sole])
    local = ~pieces.remote[row]
    place, row = sole[place[local]], row[local]
    sent = carrier * len(arrays.holdings.tile) + pieces.holding[piece]
    shared = np.isin((keys[place] // devices) * len(arrays.holdings.tile) + pieces.holding[row], sent)
    given = ~any_of(place[~shared], len(keys))[place]
    return keys[place[given]] // devices, row[given]


def _told(arrays: PlanArrays, spans: Spans, times: Derived, left: Longs) -> Longs:
    """By carrier: when the sender of a message knows that it has left: when the first of its gradients is added up, or as it sends later
    ones."""
    carriers, pieces = arrays.carriers, arrays.pieces
    wanted = least(owners(carriers.parts), times.wanted_start[pieces.holding[carriers.part]], len(carriers.pattern), 0)
    return np.where(spans.returned_start != NEVER, np.maximum(spans.returned_end, wanted), np.where(left == NEVER, spans.end, left))


def left_by(plan: Plan, arrays: PlanArrays, spans: Spans) -> Longs:
    """By carrier: when the sender of a message, or of the gradients that return for one that they do, knows that it has left: it then sends
    for a later micro-batch. NEVER if it does not wait for that (``departures``), and for exchanges."""
    found = np.full(len(arrays.carriers.pattern), NEVER)
    own = np.flatnonzero(arrays.carriers.pattern == MESSAGE)
    if plan.order is None or not len(own):
        return found
    back = spans.returned_start[own] != NEVER
    route, place = _routes(arrays, own, back), _sending_passes(plan.order, arrays, own, back)
    scale = len(plan.order.actions) + 1
    keys, group = np.unique(route * scale + place, return_inverse=True)
    begun = least(group, np.where(back, spans.returned_start[own], spans.brought_start[own]), len(keys), NEVER)
    later = np.arange(len(keys)) + PASSES_UNDER_WAY
    same = keys[np.minimum(later, len(keys) - 1)] // scale == keys // scale
    waits = np.where((later < len(keys)) & same, begun[np.minimum(later, len(keys) - 1)], NEVER)[group]
    arrived = np.where(back, spans.returned_end[own], spans.brought_end[own])
    found[own] = np.where(waits == NEVER, NEVER, np.maximum(waits, arrived))
    return found


def _routes(arrays: PlanArrays, messages: Longs, back: Bools) -> Longs:
    """Numbers of messages' routes (source, target, whether gradients travel there). ``back``: whether it is that of the gradients."""
    piece = arrays.carriers.part[arrays.carriers.parts[messages]]
    source, target = arrays.holdings.device[arrays.pieces.holding[piece]], arrays.fetches.device[arrays.pieces.fetch[piece]]
    devices = int(max(source.max(), target.max())) + 1
    return (np.where(back, target, source) * devices + np.where(back, source, target)) * 2 + back


def _sending_passes(order: PassOrder, arrays: PlanArrays, messages: Longs, back: Bools) -> Longs:
    """The places in the order of the passes that send messages, or their gradients (``departures.sending_pass``)."""
    pieces, tiles, readers = arrays.pieces, arrays.tiles, arrays.readers
    piece = arrays.carriers.part[arrays.carriers.parts[messages]]
    maker = arrays.holdings.tile[pieces.holding[piece]]
    forward = pass_ranks(order, "F", tiles.operator[maker], tiles.part[maker])
    place, row = rows_of(arrays.fetches.readers, pieces.fetch[piece])
    reader = readers.tile[row]
    backward = most(place, pass_ranks(order, "B", tiles.operator[reader], tiles.part[reader]), len(messages), 0)
    return np.where(back, backward, forward)
