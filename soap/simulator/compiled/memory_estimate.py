"""An estimate of each device's peak memory in the order that was played, where the bounds of ``compiled.memory`` do not decide (compiled).

The exact answer (``memory.residency``) takes Python a second for a model on 16 devices. This one follows the same order tile by tile: what
a tile keeps is there from its forward to its backward pass; of a recomputed one only what others read, and the rest again from its second
run on; of one that offloads only what it makes, and the rest again from its copy back on; the gradients that a backward pass makes are
there while it runs; if it is in two, the outputs' and all that is kept stay in between. What is brought from other devices and summed
stays. So it is near the exact peak, but may be above or below it.

So nobody takes it for an answer. It is compared with what the exact model has said of strategies that were asked about: up to the highest
share of the limit at which one fits, others are likely to fit; from the lowest at which one does not, they are unlikely to.
"""

from __future__ import annotations

from soap.simulator.compiled.arrays import fill
from soap.simulator.compiled.jit import compiled
from soap.simulator.compiled.machine_code import entry
from soap.simulator.compiled.marks import needed_together, runs_again
from soap.simulator.compiled.memory_tables import (
    ACTIVATIONS,
    ASKED_AT,
    FIT_UP_TO,
    GRADIENTS,
    HELD,
    KEPT,
    LACKED_FROM,
    LARGEST_SHARD,
    LEAVING,
    LIKELY,
    MADE,
    PARAMETER_GRADIENTS,
    PRODUCTS,
    READ,
    SLACK,
    TRAINABLE,
    UNKNOWN,
    UNLIKELY,
    USUALLY_GIVEN,
    WHOLE,
    MemoryTables,
)
from soap.simulator.compiled.state import AGAIN_TILE, BACKWARD_TILE, COPY_AWAY, COPY_BACK, FORWARD_TILE
from soap.simulator.compiled.trial import TAKEN, Trial
from soap.simulator.compiled.variants import AWAY, CELLS
from soap.simulator.compiled.world import World
from soap.strategy.kept import OFFLOADED
from soap.strategy.recomputation import LIGHT, STAYS


@entry
def estimate_memory(W: World, M: MemoryTables, T: Trial, better: bool) -> int:
    """LIKELY, UNLIKELY or UNKNOWN: whether the strategy fits whose simulation ``T`` is, with all its tasks, and whose bounds ``M`` has.
    ``better``: whether it would be the best so far, about which it is worth asking once more than else."""
    return judge_by_estimate(W, M, T, better)


@compiled
def judge_by_estimate(W: World, M: MemoryTables, T: Trial, better: bool) -> int:
    """As ``estimate_memory``. The share of the limit that it finds is left in ``guess[ASKED_AT]``."""
    share = _share(W, M, T)
    guess = M.guess
    guess[ASKED_AT] = share
    if share <= guess[FIT_UP_TO]:
        return LIKELY
    if share >= guess[LACKED_FROM] + (guess[SLACK] if better else 0):
        return UNLIKELY
    return UNKNOWN


@compiled
def _share(W, M, T):  # type: ignore[no-untyped-def]
    """The estimated peak by the limit, in parts of ``WHOLE``, of the device that is filled most."""
    C, K, part = W.state, W.cluster, M.part
    devices, states = len(C.busy), M.fixed[1]
    _play_memory(W, M, T)
    highest = 0
    for device in range(devices):
        stays = part[TRAINABLE, device] - part[LEAVING, device]
        held = part[HELD, device] + states * part[TRAINABLE, device] + stays
        updating = 0
        if states > 1:
            updating = 3 * part[LARGEST_SHARD, device] if K.serves_itself[device] else stays
        estimate = held + M.fixed[USUALLY_GIVEN] + max(M.highest[device], updating)
        highest = max(highest, WHOLE * estimate // max(1, M.limit[device]))
    return highest


@compiled
def _play_memory(W, M, T):  # type: ignore[no-untyped-def]
    """Fill ``highest``: by device, the most bytes of activations and of gradients between operators at a time."""
    C = W.state
    devices = len(C.busy)
    fill(M.dropped, 0, devices, 0)
    for device in range(devices):
        M.level[device] = M.highest[device] = M.part[ACTIVATIONS, device]
    for op in range(len(W.graph.backward)):
        _leave_out(W, M, op)
    for device in range(devices):
        M.highest[device] = M.level[device]
    for place in range(T.size[TAKEN]):
        slot = T.order[place]
        kind = C.kind[slot]
        if FORWARD_TILE <= kind <= BACKWARD_TILE or kind in (COPY_AWAY, COPY_BACK):
            _pass(W, M, slot, kind)


@compiled
def _leave_out(W, M, op):  # type: ignore[no-untyped-def]
    """Take what an operator's tiles make out of the level, which then has what is brought and summed. Note whether operators with another
    mark read what it makes."""
    G, V, K, C = W.graph, W.variants, W.cluster, W.state
    row, mark = C.variant[op], C.marked[op]
    cells = V.rows[row, CELLS]
    kept, read, made = M.rows[row, KEPT], M.rows[row, READ], M.rows[row, MADE]
    for tile in range(C.tiles[op]):
        cell = tile % cells
        device = C.dev[C.dev_ptr[op] + tile]
        size = M.data[kept + cell] + M.data[read + cell] + M.data[made + cell] * (runs_again(mark) + C.divided[op])
        size += M.data[M.rows[row, PRODUCTS] + cell] if mark == LIGHT else 0
        size += V.away[V.rows[row, AWAY] + cell] * (1 + K.serves_itself[device]) if mark == OFFLOADED else 0
        M.level[device] -= size
    M.leaves[op] = 0
    for place in range(G.reader_ptr[op], G.reader_ptr[op + 1]):
        if not needed_together(mark, C.marked[G.reader[place]]):
            M.leaves[op] = 1


@compiled
def _pass(W, M, slot, kind):  # type: ignore[no-untyped-def]
    """Follow one pass of a tile, or copy of what it keeps."""
    V, K, C = W.variants, W.cluster, W.state
    op, tile = C.owner[slot], C.index[slot]
    row, mark = C.variant[op], C.marked[op]
    cell, device = tile % V.rows[row, CELLS], C.dev[C.dev_ptr[op] + tile]
    kept = M.data[M.rows[row, KEPT] + cell]
    made = M.data[M.rows[row, MADE] + cell]
    leaves = made if mark != STAYS and M.leaves[op] else 0
    if mark == LIGHT:
        leaves = made + M.data[M.rows[row, PRODUCTS] + cell]
    away = V.away[V.rows[row, AWAY] + cell] if mark == OFFLOADED else 0
    on_host = away if K.serves_itself[device] else 0
    if kind == FORWARD_TILE:
        M.level[device] += kept
        M.highest[device] = max(M.highest[device], M.level[device] + M.dropped[device])
        M.dropped[device] = 0
        if runs_again(mark) and C.alive[slot + C.tiles[op]]:
            M.level[device] -= kept - leaves
            M.dropped[device] = max(0, made - leaves)  # the next tile reads it
    elif kind == COPY_AWAY:
        M.highest[device] = max(M.highest[device], M.level[device] + on_host)
        M.level[device] += on_host - kept + leaves
    elif kind in (AGAIN_TILE, COPY_BACK):
        M.level[device] += kept if kind == AGAIN_TILE else away
        M.highest[device] = max(M.highest[device], M.level[device])
        M.level[device] -= on_host
    elif kind == BACKWARD_TILE and C.divided[op]:  # all stays, and so do gradients of outputs
        M.highest[device] = max(M.highest[device], M.level[device] + M.data[M.rows[row, GRADIENTS] + cell])
        M.level[device] += made
    else:
        gradients = M.data[M.rows[row, GRADIENTS] + cell] + M.data[M.rows[row, PARAMETER_GRADIENTS] + cell]
        waited = made if C.divided[op] else 0
        M.highest[device] = max(M.highest[device], M.level[device] - waited + gradients)
        M.level[device] -= (away if mark == OFFLOADED else kept) + leaves + waited
