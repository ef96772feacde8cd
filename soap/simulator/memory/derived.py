"""Until when tiles need what they read, and when gradients are wanted and taken: several parts of an iteration's memory ask for that."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from soap.simulator.memory.grouped import Bools, Longs, least, most, owners
from soap.simulator.memory.plan_arrays import PlanArrays
from soap.simulator.memory.spans import NEVER, Spans


class Derived(NamedTuple):
    """Times in nanoseconds, of a plan's arrays and when everything takes place.

    By tile: ``goes_back``, ``again``: whether it has a backward pass and a second run; ``run_end``, ``work_end``: the end of its last run
    forward, and when that has computed; ``weighed``: when it begins to make its parameters' gradients, NEVER if it has no backward pass;
    ``last``: the end of its last task, which makes them then (weight gradients, backward pass, or forward pass); ``left``: until when it
    holds what it keeps, but for what comes back from its host. By row of ``Readers``: ``needed``: until when the tile needs its region of
    the operand, ``used``: of what its segment makes by itself, ``passed``: in its first run. By holding: ``wanted_start``: when its
    gradient is added up, ``wanted_end``: until when it is held. By fetch: ``taken``: when the last part of its gradient has been taken. By
    row of ``SumDevices``: ``sum_begun``: when the first segment of the tiles there begins to go back, ``sum_last``: the last end of these
    tiles, both NEVER if none goes back. ``member_row``, ``holding_row``: for each of ``Sums.member`` and each holding of a sum the row of
    ``SumDevices`` of its device; -1 for other holdings.
    """

    goes_back: Bools
    again: Bools
    run_end: Longs
    work_end: Longs
    weighed: Longs
    last: Longs
    left: Longs
    needed: Longs
    used: Longs
    passed: Longs
    wanted_start: Longs
    wanted_end: Longs
    taken: Longs
    member_row: Longs
    holding_row: Longs
    sum_begun: Longs
    sum_last: Longs


def derived(arrays: PlanArrays, spans: Spans) -> Derived:
    """All of them."""
    goes_back, again = spans.backward_start != NEVER, spans.again_start != NEVER
    run_end = np.where(again, spans.again_end, spans.forward_end)
    work_end = np.where(again, spans.again_work_end, spans.forward_end)
    weighed = np.where(spans.weights_start != NEVER, spans.weights_start, spans.backward_start)
    last = np.where(spans.weights_start != NEVER, spans.weights_end, np.where(goes_back, spans.backward_end, spans.forward_end))
    left = np.where(spans.let_go != NEVER, spans.let_go, last)
    tile, keeps = arrays.readers.tile, arrays.readers.keeps
    waits = (spans.weights_start[tile] != NEVER) & arrays.fetches.gradient[arrays.readers.fetch]
    needed = np.where(waits, last[tile], np.where(keeps, left[tile], run_end[tile]))
    used = np.where(keeps, left[tile], work_end[tile])
    rows = _rows_of_sums(arrays)
    begun, ended = _of_sums(arrays, spans, goes_back, last, rows[0])
    wanted = _wanted(arrays, spans, goes_back, last, rows[1], begun, ended)
    taken = _taken(arrays, spans, wanted[0])
    passed = spans.forward_end[tile]
    return Derived(goes_back, again, run_end, work_end, weighed, last, left, needed, used, passed, *wanted, taken, *rows, begun, ended)


def _rows_of_sums(arrays: PlanArrays) -> tuple[Longs, Longs]:
    """``member_row`` and ``holding_row``."""
    own, held, tiles = arrays.sum_devices, arrays.holdings, arrays.tiles
    size = int(max(own.device.max(initial=0), tiles.device.max(initial=0))) + 1
    keys, of_sum = own.sum * size + own.device, np.flatnonzero(held.sum >= 0)
    holding_row = np.full(len(held.tile), -1)
    holding_row[of_sum] = np.searchsorted(keys, held.sum[of_sum] * size + held.device[of_sum])
    return np.searchsorted(keys, owners(arrays.sums.members) * size + tiles.device[arrays.sums.member]), holding_row


def _of_sums(arrays: PlanArrays, spans: Spans, goes_back: Bools, last: Longs, member_row: Longs) -> tuple[Longs, Longs]:
    """``sum_begun`` and ``sum_last``."""
    back, size = goes_back[arrays.sums.member], len(arrays.sum_devices.sum)
    tile, row = arrays.sums.member[back], member_row[back]
    return least(row, spans.begun[tile], size, NEVER), most(row, last[tile], size, NEVER)


def _wanted(
    arrays: PlanArrays, spans: Spans, goes_back: Bools, last: Longs, holding_row: Longs, begun: Longs, ended: Longs
) -> tuple[Longs, Longs]:
    """(when holdings' gradients are added up, until when they are held)."""
    held = arrays.holdings
    start = np.where(goes_back[held.tile], spans.begun[held.tile], spans.end)
    end = np.where(goes_back[held.tile], last[held.tile], spans.end)
    own = np.flatnonzero(held.sum >= 0)
    row, back = holding_row[own], spans.summed_back_start[held.sum[own]]
    start[own] = np.where(back != NEVER, back, np.where(begun[row] == NEVER, spans.end, begun[row]))
    end[own] = np.where(back != NEVER, back, np.where(ended[row] == NEVER, spans.end, ended[row]))
    return start, end


def _taken(arrays: PlanArrays, spans: Spans, wanted: Longs) -> Longs:
    pieces = arrays.pieces
    returned = np.append(spans.returned_start, NEVER)[pieces.carrier]  # the last one is for those that nothing brings
    over = np.where(pieces.remote, returned, wanted[pieces.holding])
    there = over != NEVER
    return most(pieces.fetch[there], over[there], len(arrays.fetches.device), 0)
