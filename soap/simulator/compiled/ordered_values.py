"""How long devices hold what operators make for others, sums, and gradients of both, in an order of passes (compiled): the counterpart of
what ``memory.sweep`` says of holdings. A part of ``ordered_memory``.

Working memory in the scratch, by holding, one array after the other: the first backward pass of its readers, FOREVER if there is none;
whether parts of its gradient come separately; the last pass that reads it, 0 if none does, and the first one of its own device.
"""

from __future__ import annotations

from soap.simulator.compiled.jit import compiled
from soap.simulator.compiled.marks import runs_again
from soap.simulator.compiled.pass_places import FOREVER, NOWHERE, backward_place, forward_place, hold, last_place
from soap.simulator.compiled.scratch import FULL, HOLDINGS, REDUCTIONS, Scratch
from soap.simulator.compiled.variants import CELLS
from soap.simulator.compiled.world import World

ANSWERED, APART, READ_LAST, READ_FIRST = range(4)
ARRAYS = 4


@compiled
def clear_holdings(W: World) -> None:
    """Make room for the holdings of the scratch's delivery. Nobody reads them yet."""
    S = W.scratch
    count = S.count[HOLDINGS]
    if ARRAYS * count > len(S.work):
        raise MemoryError(FULL)
    for i in range(count):
        S.work[ANSWERED * count + i] = S.work[READ_FIRST * count + i] = FOREVER
        S.work[APART * count + i] = S.work[READ_LAST * count + i] = 0


@compiled
def note_read(S: Scratch, holding: int, first: int, last: int) -> None:
    """A holding is read by passes of its own device from place ``first`` to ``last``; or by others until ``last``."""
    count = S.count[HOLDINGS]
    S.work[READ_FIRST * count + holding] = min(S.work[READ_FIRST * count + holding], first)
    S.work[READ_LAST * count + holding] = max(S.work[READ_LAST * count + holding], last)


@compiled
def note_answer(S: Scratch, holding: int, back: int, apart: bool) -> None:
    """A holding gets a gradient, from the backward pass at place ``back`` of its own device on, or in parts that come separately."""
    count = S.count[HOLDINGS]
    S.work[ANSWERED * count + holding] = min(S.work[ANSWERED * count + holding], back)
    if apart:
        S.work[APART * count + holding] = 1


@compiled
def hold_values(W: World, L, op: int) -> None:  # type: ignore[no-untyped-def]
    """What tiles make: beyond their last passes, while others read it (``ordered_memory`` counts it until then); and its gradient."""
    G, V, S = W.graph, W.variants, W.scratch
    count = S.count[HOLDINGS]
    for i in range(count):
        if S.h_red[i] >= 0:
            continue
        device, tile, out = S.h_dev[i], S.h_tile[i], G.output_ptr[op] + S.h_out[i]
        size = V.box_volume[S.h_box[i]] * G.output_itemsize[out]
        last, read = last_place(W, L, op, tile), S.work[READ_LAST * count + i]
        if read > last:
            hold(L, device, last, read, size * (1 + runs_again(W.state, op)))
        answered, apart = S.work[ANSWERED * count + i], S.work[APART * count + i]
        if G.output_gradient[out] == 0 or (answered == FOREVER and apart == 0):
            continue
        back = backward_place(W, L, op, tile)
        if back < 0:
            hold(L, device, min(answered, forward_place(W, L, op, tile)), FOREVER, (1 + apart) * size)
            continue
        begun = L.node_first[L.node[back]]
        hold(L, device, min(answered, begun), last, size)
        hold(L, device, begun, back, apart * size)  # in which the parts are added up


@compiled
def hold_sums(W: World, L, op: int) -> None:  # type: ignore[no-untyped-def]
    """Sums of partial results, or their cells, what is summed, and the gradients of sums."""
    G, V, S = W.graph, W.variants, W.scratch
    count = S.count[HOLDINGS]
    for red in range(S.count[REDUCTIONS]):
        out, answered, first = G.output_ptr[op] + S.r_out[red], False, S.r_dev_ptr[red]
        for i in range(S.r_hold[red], S.r_hold[red + 1]):
            answered |= S.work[ANSWERED * count + i] < FOREVER or S.work[APART * count + i] > 0
        for k in range(S.r_dev_ptr[red + 1] - first):
            own = NOWHERE
            for i in range(S.r_hold[red], S.r_hold[red + 1]):
                own = i if S.h_dev[i] == S.r_dev[first + k] else own
            whole = V.box_volume[S.r_box[red]]
            cell = S.cell_volume[S.r_cells[red] + k] if S.r_cells[red] >= 0 else -1
            _hold_sum(W, L, op, red, S.r_dev[first + k], own, whole, cell, out, answered and G.output_gradient[out] != 0)


@compiled
def _hold_sum(W, L, op, red, device, own, whole, cell, out, answered):  # type: ignore[no-untyped-def]
    """One device's share of a sum. ``own``: its holding, or NOWHERE. ``cell``: elements of its cell, below 0 if it gets the whole."""
    G, S = W.graph, W.scratch
    count, members = S.count[HOLDINGS], S.r_dev_ptr[red + 1] - S.r_dev_ptr[red]
    first, made, last, back, tiles = _own_passes(W, L, op, red, device)
    read_last = S.work[READ_LAST * count + own] if own >= 0 else 0
    read_first = S.work[READ_FIRST * count + own] if own >= 0 else FOREVER
    until = max(last if back >= 0 else 0, read_last)
    until = until if until > 0 else FOREVER
    itemsize = G.output_partial_itemsize[out]
    hold(L, device, first, until, (whole if cell < 0 else cell) * itemsize)
    hold(L, device, first, max(made, min(until, read_first)), tiles * whole * itemsize)  # others may get to the sum later
    if cell >= 0:  # it is over before its first reader begins
        hold(L, device, first, min(until, read_first), (whole + members * cell) * itemsize)
    if answered:
        answers = S.work[ANSWERED * count + own] if own >= 0 else FOREVER
        apart = S.work[APART * count + own] if own >= 0 else 0
        size, begun = whole * G.output_itemsize[out], answers if answers < FOREVER else first
        hold(L, device, begun, last if back >= 0 else FOREVER, size)
        hold(L, device, begun, back if back >= 0 else FOREVER, (1 + apart + (cell >= 0)) * size)  # what is summed; over before that pass


@compiled
def _own_passes(W, L, op, red, device):  # type: ignore[no-untyped-def]
    """(first and last forward pass, last pass, first backward pass or NOWHERE, number) of the tiles of a sum on one of its devices."""
    V, C, S = W.variants, W.state, W.scratch
    cells, group = V.rows[C.variant[op], CELLS], S.r_group[red]
    first, made, last, back, tiles = FOREVER, 0, 0, FOREVER, 0
    for i in range(S.member_ptr[group], S.member_ptr[group + 1]):
        tile = S.r_rep[red] * cells + S.member[i]
        if C.dev[C.dev_ptr[op] + tile] == device:
            first, made = min(first, forward_place(W, L, op, tile)), max(made, forward_place(W, L, op, tile))
            last = max(last, last_place(W, L, op, tile))
            own = backward_place(W, L, op, tile)
            back = min(back, own if own >= 0 else FOREVER)
            tiles += 1
    return first, made, last, back if back < FOREVER else NOWHERE, tiles
