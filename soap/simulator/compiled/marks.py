"""What marks of operators (``State.marked``, ``strategy.marks``) add to their tiles (``plan.marks``), as arrays for compiled code.

An operator's tiles have blocks of slots, a slot for each tile: their forward passes, their backward passes, and those of the rows that its
mark adds, row by row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from soap.plan.marks.seam import FORWARD, Amount, On, Takes, all_marked
from soap.simulator.communication.offloading import DOWN, UP
from soap.simulator.compiled.graph_arrays import IntRows, Ints
from soap.simulator.compiled.jit import inlined
from soap.simulator.compiled.tile_times import OF_ROWS

if TYPE_CHECKING:
    from soap.simulator.compiled.state import State

BACKWARD_BLOCK, ROW_BLOCKS = 1, 2
"""The blocks of backward passes, and of the first row."""

STAGE, IN_BACKWARD, ON, PRICE, WAITS, AGAIN = range(6)
"""Columns of ``MarkTables.rows``: see ``plan.marks.seam.Row``. ON: ``NOTHING``, ``DEVICE``, or ``DEVICE`` and one more than the place among
what lifts (``communication.offloading``). PRICE: ``MOMENT``, ``COPY``, or a pass of ``tile_times``. WAITS: for how many of the forward pass
and other rows it waits."""
NOTHING, DEVICE = 0, 1
MOMENT, COPY = -2, -1


class MarkTables(NamedTuple):
    """By mark: its rows ``ptr[mark]:ptr[mark + 1]`` of ``rows[row, column]``; for how many of them a backward pass waits
    (``backward_waits``); whether its first row waits for a need (``needed``); the block of second runs, or 0 (``again_block``); by mark of
    a reader, whether both are needed at once (``together``); whether operands are gathered again (``gathers``), and whether what a tile
    keeps is gone until then (``lets_go``); how often devices, and hosts, hold each ``Amount`` (``held``, ``on_host``).
    ``tells``, from ``tells_ptr`` on, for each mark's forward passes and rows: the
    blocks of what waits for these."""

    ptr: Ints
    rows: IntRows
    backward_waits: Ints
    needed: Ints
    again_block: Ints
    together: IntRows
    gathers: Ints
    lets_go: Ints
    held: IntRows
    on_host: IntRows
    tells_ptr: Ints
    tells: Ints


_ON = {On.NOTHING: NOTHING, On.DEVICE: DEVICE, On.TO_HOST: DEVICE + 1 + DOWN, On.FROM_HOST: DEVICE + 1 + UP}


def _price(takes: Takes) -> int:
    return MOMENT if takes is Takes.MOMENT else COPY if takes is Takes.COPY else OF_ROWS[takes]


def _held(*, on_host: bool) -> IntRows:
    holds = [[hold.amount for hold in own.holds if hold.on_host == on_host] for own in all_marked()]
    return np.array([[amounts.count(amount) for amount in Amount] for amounts in holds], np.int32)


def mark_tables() -> MarkTables:
    """The tables of all marks."""
    marked, ints = all_marked(), lambda values: np.array([*values], np.int32)
    rows, tells, tells_ptr, ptr, together = list[list[int]](), list[int](), [0], [0], np.zeros((len(marked), len(marked)), np.int32)
    for mark, own in enumerate(marked):
        ptr.append(ptr[-1] + len(own.rows))
        together[mark, list(own.together)] = 1
        for source in range(FORWARD, len(own.rows)):
            tells += [ROW_BLOCKS + place for place, row in enumerate(own.rows) if source in row.after]
            tells += [BACKWARD_BLOCK] * (source != FORWARD and own.rows[source].before_backward)
            tells_ptr.append(len(tells))
        rows += ([row.stage, row.backward, _ON[row.on], _price(row.takes), len(row.after), row.again] for row in own.rows)
    return MarkTables(
        ptr=ints(ptr),
        rows=np.array(rows, np.int32),
        backward_waits=ints(sum(row.before_backward for row in own.rows) for own in marked),
        needed=ints(own.needed for own in marked),
        again_block=ints(0 if own.again is None else ROW_BLOCKS + own.again for own in marked),
        together=together,
        gathers=ints(own.gathers for own in marked),
        lets_go=ints(bool(own.kept_until) for own in marked),
        held=_held(on_host=False),
        on_host=_held(on_host=True),
        tells_ptr=ints(tells_ptr),
        tells=ints(tells),
    )


@inlined
def row_count(C: State, mark: int) -> int:
    """How many rows a mark adds to each tile."""
    return C.marks.ptr[mark + 1] - C.marks.ptr[mark]


@inlined
def runs_again(C: State, op: int) -> bool:
    """Whether an operator's tiles run a second time."""
    return C.marks.again_block[C.marked[op]] > 0


@inlined
def is_made_again(C: State, op: int) -> bool:
    """Whether an operator's tiles run a second time, and do not keep their outputs until then."""
    return runs_again(C, op) and C.marks.together[C.marked[op], C.marked[op]] > 0


@inlined
def is_needed(C: State, op: int) -> bool:
    """Whether something of an operator's tiles waits until the backward pass needs what these have made: their first row."""
    return C.marks.needed[C.marked[op]] > 0


@inlined
def needed_together(C: State, op: int, reader: int) -> bool:
    """Whether an operator's tiles are needed as soon as those of a reader."""
    return C.marks.together[C.marked[op], C.marked[reader]] > 0


@inlined
def gathers(C: State, op: int) -> bool:
    """Whether operands of an operator's tiles are gathered again."""
    return C.marks.gathers[C.marked[op]] > 0


@inlined
def marked_bytes(C: State, op: int, made: int, product: int, away: int, is_host: int) -> int:
    """What an operator's mark lets a tile's device hold. ``made``, ``product``, ``away``: the tile's amounts (``plan.marks.seam.Amount``).
    ``is_host``: 1 if the device is its own host, else 0."""
    held, there = C.marks.held[C.marked[op]], C.marks.on_host[C.marked[op]]
    return (held[0] + is_host * there[0]) * made + (held[1] + is_host * there[1]) * product + (held[2] + is_host * there[2]) * away


@inlined
def holds_on_host(C: State, mark: int) -> bool:
    """Whether hosts hold something because of a mark."""
    return C.marks.on_host[mark, 0] + C.marks.on_host[mark, 1] + C.marks.on_host[mark, 2] > 0
