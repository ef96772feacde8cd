"""Until when values are held for their readers. A value that waits for its gradient alone has no memory (``execute.leaf_and_value``)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from soap.plan.plan import Plan
from soap.simulator.memory.derived import Derived
from soap.simulator.memory.grouped import Bools, Longs, any_of, least, most, rows_of
from soap.simulator.memory.plan_arrays import PlanArrays
from soap.simulator.memory.spans import NEVER, Spans


class ReadUntil(NamedTuple):
    """By holding, in nanoseconds: until when it is held for its readers, NEVER if it has none; of a recomputed tile until when what its
    first run has made is held (``first``), and what its second run makes (``second``)."""

    first: Longs
    second: Longs


def read_until(plan: Plan, arrays: PlanArrays, spans: Spans, times: Derived) -> ReadUntil:
    """``ReadUntil`` of all holdings."""
    pieces, count = arrays.pieces, len(arrays.holdings.tile)
    made_again = ((arrays.holdings.sum < 0) & times.again[arrays.holdings.tile]) | _summed_again(arrays, spans)
    linked = made_again[pieces.holding] & ~arrays.fetches.remote[pieces.fetch] & ~spans.light[arrays.holdings.tile[pieces.holding]]
    dropped, gathered = _dropped(plan, arrays, spans, times)[pieces.holding], _gathered(arrays, spans)
    over = _read(arrays, spans, times, linked & dropped)
    remade = made_again[pieces.holding] & dropped
    first, second = most(pieces.holding, np.maximum(over, np.where(remade, 0, gathered)), count, NEVER), np.zeros(count, np.int64)
    if made_again.any():
        own = made_again[pieces.holding]
        second = most(pieces.holding[own], gathered[own], count, 0)
        second = np.maximum(second, _read_again(arrays, spans, times, np.flatnonzero(linked)))
    return ReadUntil(first, second)


def _read(arrays: PlanArrays, spans: Spans, times: Derived, linked: Bools) -> Longs:
    """By piece: when its holding is read for the last time. It is sent, or put together with others for the first reader and kept so, or
    read by tiles; those that run again read a ``linked`` piece not once more, but what its tile's second run makes."""
    pieces, readers, size = arrays.pieces, arrays.readers, len(arrays.fetches.device)
    ends, again = _ends(arrays, spans, times), times.again[readers.tile]
    read = most(readers.fetch, ends, size, 0)[pieces.fetch]
    if linked.any():
        apart = most(readers.fetch, np.where(again, times.passed, ends), size, 0)
        read = np.where(linked, apart[pieces.fetch], read)
    joined = least(readers.fetch, spans.forward_start[readers.tile], size, 0)
    read = np.where(arrays.fetches.remote[pieces.fetch], joined[pieces.fetch], read)
    return np.where(pieces.carrier >= 0, np.append(spans.brought_end, NEVER)[pieces.carrier], read)


def _ends(arrays: PlanArrays, spans: Spans, times: Derived) -> Longs:
    """By reader: until when it needs what its fetch is of; of several pieces it makes a region, and then needs that alone."""
    tile = arrays.readers.tile
    several = np.diff(arrays.fetches.pieces)[arrays.readers.fetch] > 1
    read = np.where(spans.weights_start[tile] != NEVER, times.last[tile], times.run_end[tile])
    return np.where(several, read, times.needed)


def _read_again(arrays: PlanArrays, spans: Spans, times: Derived, linked: Longs) -> Longs:
    """By holding: when second runs read for the last time what its tile's second run makes. ``linked``: the pieces of which they do."""
    pieces, readers, held = arrays.pieces, arrays.readers, arrays.holdings
    place, reader = rows_of(arrays.fetches.readers, pieces.fetch[linked])
    again = times.again[readers.tile[reader]]
    holding, reader = pieces.holding[linked[place[again]]], reader[again]
    here = spans.segment[readers.tile[reader]] == spans.segment[held.tile[holding]]
    over = np.where(here, times.used[reader], _ends(arrays, spans, times)[reader])
    return most(holding, over, len(held.tile), 0)


def _summed_again(arrays: PlanArrays, spans: Spans) -> Bools:
    """By holding, whether it is a sum that is made a second time."""
    again: Bools = np.append(spans.again_summed_start, NEVER)[arrays.holdings.sum] != NEVER
    return again


def _gathered(arrays: PlanArrays, spans: Spans) -> Longs:
    """By piece: until when its holding is there to be gathered again, for other devices or its own; 0 if it is not."""
    pieces, size = arrays.pieces, len(arrays.fetches.device)
    end = np.append(spans.gathered_end, NEVER)[pieces.carrier]
    end = np.where(pieces.carrier >= 0, end, NEVER)
    return np.maximum(most(pieces.fetch, end, size, 0)[pieces.fetch], 0)


def _dropped(plan: Plan, arrays: PlanArrays, spans: Spans, times: Derived) -> Bools:
    """By holding: whether it is gone between its last reader in the forward pass and its tile's second run
    (``plan.recomputation.dropped_holdings``)."""
    held, pieces, readers = arrays.holdings, arrays.pieces, arrays.readers
    if not plan.recomputed_operators:
        return np.zeros(len(held.tile), np.bool_)
    active = times.goes_back | (spans.unread & (spans.begun != NEVER))
    twice = active & np.isin(arrays.tiles.operator, list(plan.recomputed_operators))
    once = (active & ~twice)[readers.tile] & ~arrays.fetches.remote[readers.fetch]
    kept = any_of(readers.fetch[once], len(arrays.fetches.device))[pieces.fetch]
    light = np.isin(arrays.tiles.operator[held.tile], list(plan.light_operators))
    dropped: Bools = _summed_again(arrays, spans)
    dropped |= (held.sum < 0) & twice[held.tile] & ~light & ~any_of(pieces.holding[kept], len(held.tile))
    return dropped
