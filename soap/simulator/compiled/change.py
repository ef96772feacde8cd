"""Changes operators' configurations and parameters' synchronization in a state, and undoes such a change (compiled).

A change gives the operators' tiles new slots. It makes new blocks for these operators and for those whose outputs they read. It overwrites
only pointers and the numbers of tasks that slots wait for; ``Undo`` saves these. New blocks come after all others, so undoing a change
frees them at once.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from soap.simulator.compiled.arrays import copy
from soap.simulator.compiled.graph_arrays import GraphTables, Ints, Longs
from soap.simulator.compiled.jit import compiled
from soap.simulator.compiled.marks import is_needed, row_count
from soap.simulator.compiled.operator_lowering import count_edges, lower_operator, place_tiles
from soap.simulator.compiled.pass_order import link_passes, note_order, unlink_passes
from soap.simulator.compiled.rows import is_sparse
from soap.simulator.compiled.scratch import STAMP
from soap.simulator.compiled.second_runs import slots_of_a_tile, weights_slot
from soap.simulator.compiled.state import ARENA, DEVICES, NEVER, PULLS, SLOTS, SYNCS, State
from soap.simulator.compiled.synchronization import count_backward, synchronize
from soap.simulator.compiled.syncs.asking import make_pulls
from soap.simulator.compiled.syncs.codes import BY_ROWS, COMPRESSED, GATHERED, first_with
from soap.simulator.compiled.syncs.exchange import count_rows
from soap.simulator.compiled.syncs.gathering import reads_gathered
from soap.simulator.compiled.task_keys import STATE_FULL
from soap.simulator.compiled.variants import CELLS, PARTS
from soap.simulator.compiled.world import World

UNDER_WAY, CHANGED, SYNCHRONIZED, OLD_SLOTS, OLD_ARENA, OLD_DEVICES, OLD_SYNCS, OLD_SYNC_SLOT, ALIVE_SAVED, LIST_SAVED = range(10)
REPLACED, RESYNCED, REPULLED, OLD_PULLS, OLD_PULL_SLOT, OLD_PREFETCH = 10, 11, 12, 13, 14, 15
"""Places in ``Undo.what``. ``UNDER_WAY``: whether a change was made. ``CHANGED``: number of changed blocks. ``SYNCHRONIZED``: whether the
sums of gradients were made anew (2: completely). ``OLD_``: the values before the change. ``ALIVE_SAVED``, ``LIST_SAVED``: how much of
``alive`` and ``rows`` is used. ``REPLACED``: how many of the blocks (the first ones) belong to operators with new tiles. ``RESYNCED``:
number of parameters with another synchronization. ``REPULLED``: whether the pulls were made anew (2: completely)."""

OPERATORS, EDIT_DEVICES, PARAMETERS, REPLACED_OPERATORS, PREFETCH = range(5)
"""Places in ``Edit.count``: the number of each. ``REPLACED_OPERATORS``: number of operators that get new tiles. After the operators with
another configuration, ``evaluate`` adds those whose tiles take another time because a parameter is synchronized differently. ``PREFETCH``:
no number, but the strategy's ``prefetch``, or ``KEEP``."""


KEEP = -1
"""In place of an operator's mark, or the prefetch: as it is."""


class Edit(NamedTuple):
    """A change: operators (``operator``, each once; ``variant``, ``replicas``, devices ``dev[dev_ptr[i]:dev_ptr[i + 1]]``) and parameters
    (``parameter``, each once; ``sync``: as in ``State``). ``marked``: as in ``State``; ``KEEP``: as it was."""

    count: Longs  # type: ignore[assignment]  # not tuple's method
    operator: Ints
    variant: Ints
    replicas: Ints
    dev_ptr: Ints
    dev: Ints
    marked: Ints
    parameter: Ints
    sync: Ints


def make_edit(operators: int, parameters: int, devices: int) -> Edit:
    """Room for a change of any operators and parameters, with this many devices in all."""
    ints = lambda n: np.zeros(n + 1, np.int32)  # noqa: E731
    return Edit(
        count=np.array([0, 0, 0, 0, KEEP], np.int64),
        operator=ints(operators),
        variant=ints(operators),
        replicas=ints(operators),
        dev_ptr=ints(operators + 1),
        dev=ints(devices),
        marked=np.full(operators + 1, KEEP, np.int32),
        parameter=ints(parameters),
        sync=ints(parameters),
    )


FIELDS = 14

DONE, MARKED = 12, 13
"""Places in ``Undo.fields``: whether the new block is complete (it is not if an exception has stopped its lowering); how the operator was
marked."""


class Undo(NamedTuple):
    """What a change has overwritten.

    ``fields``: for each changed block, its old values (operator, row, own_slot, own_count, block, block_end, tile_slot, tiles, variant,
    replicas, dev_ptr, where its ``back_row`` and ``need_row`` begin in ``rows``, ``DONE``, ``MARKED``). ``alive``: of the changed
    operators' backward tiles, from ``alive_ptr`` on; ``claim``: of their needs. ``sync_row`` (by operator), ``update_ns``,
    ``update_alive``, ``update_row`` (by device): of all. ``dirty``: stamps of operators to be lowered. ``gather_row``: by operator, if
    pulls and gathers were made anew. ``entry``: which of the changed blocks is an operator's; ``saved``: stamps of the operators that have
    one. ``parameter``, ``sync``: changed parameters, and how they were synchronized. ``follow``, ``head``: the order of passes, of all.
    """

    what: Longs
    fields: Ints
    rows: Ints
    alive: Ints
    claim: Longs
    alive_ptr: Ints
    sync_row: Ints
    gather_row: Ints
    update_ns: Longs
    update_alive: Ints
    update_row: Ints
    dirty: Longs
    entry: Ints
    saved: Longs
    parameter: Ints
    sync: Ints
    follow: Ints
    head: Ints


def make_undo(operators: int, readers: int, parameters: int, devices: int, slots: int) -> Undo:
    """Room for undoing any change."""
    longs, ints = (lambda n: np.zeros(n, np.int64)), (lambda n: np.zeros(n, np.int32))
    return Undo(
        what=longs(16),
        fields=ints(FIELDS * operators),
        rows=ints(2 * readers + 2),
        alive=ints(slots),
        claim=longs(slots),
        alive_ptr=ints(operators + 1),
        sync_row=ints(operators),
        gather_row=ints(operators),
        update_ns=longs(devices),
        update_alive=ints(devices),
        update_row=ints(devices),
        dirty=longs(operators),
        entry=ints(operators),
        saved=longs(operators),
        parameter=ints(parameters),
        sync=ints(parameters),
        follow=ints(slots),
        head=ints(devices),
    )


@compiled
def old_tile_slots(C: State, U: Undo, at: int) -> int:
    """The number of slots that the tiles of a changed operator had. ``at``: where its old values begin in ``fields``."""
    return (slots_of_a_tile(C, U.fields[at + MARKED]) + C.divided[U.fields[at]]) * U.fields[at + 7]


@compiled
def find_replaced(G: GraphTables, C: State, E: Edit) -> None:
    """Add to the edit the operators whose tiles become sparse lookups, or cease to be. They keep their configurations."""
    replaced = E.count[OPERATORS]
    for i in range(E.count[PARAMETERS]):
        parameter = E.parameter[i]
        if not is_sparse(G, parameter) or C.sync[parameter] & BY_ROWS == E.sync[i] & BY_ROWS:
            continue
        for use in range(G.user_ptr[parameter], G.user_ptr[parameter + 1]):
            known = False
            for k in range(replaced):
                known |= E.operator[k] == G.user[use]
            if not known:
                E.operator[replaced] = G.user[use]
                replaced += 1
    E.count[REPLACED_OPERATORS] = replaced


@compiled
def change(W: World, E: Edit) -> None:
    """Carry out an edit, except for the sums of gradients: call ``change_sums`` if ``needs_sums``."""
    G, C, U = W.graph, W.state, W.undo
    what = U.what
    what[UNDER_WAY], what[CHANGED], what[SYNCHRONIZED], what[ALIVE_SAVED], what[LIST_SAVED] = 1, 0, 0, 0, 0
    what[REPLACED] = what[RESYNCED] = what[REPULLED] = 0
    what[OLD_SLOTS], what[OLD_ARENA], what[OLD_DEVICES] = C.used[SLOTS], C.used[ARENA], C.used[DEVICES]
    what[OLD_PREFETCH] = C.prefetch[0]
    note_order(W)
    pulls = False
    for i in range(E.count[PARAMETERS]):
        parameter = E.parameter[i]
        either = C.sync[parameter] | E.sync[i]
        pulls |= (is_sparse(G, parameter) and either & BY_ROWS != 0) or either & GATHERED != 0
        U.parameter[i], U.sync[i] = parameter, C.sync[parameter]
        C.sync[parameter] = E.sync[i]
        what[RESYNCED] = i + 1
    if E.count[PREFETCH] != KEEP and E.count[PREFETCH] != C.prefetch[0]:
        C.prefetch[0] = E.count[PREFETCH]
        pulls |= first_with(C, GATHERED) >= 0
    for i in range(E.count[REPLACED_OPERATORS]):
        for k in range(G.parameter_ptr[E.operator[i]], G.parameter_ptr[E.operator[i] + 1]):
            pulls |= is_sparse(G, G.parameter[k]) and C.sync[G.parameter[k]] & BY_ROWS != 0
    if E.count[REPLACED_OPERATORS] > 0:
        unlink_passes(W)
        _change_operators(W, E)
        link_passes(W)
        pulls |= _gathers_change(W)
    if pulls:
        what[REPULLED], what[OLD_PULLS], what[OLD_PULL_SLOT] = 1, C.used[PULLS], C.pull_slot[0]
        for op in range(len(G.backward)):
            U.gather_row[op] = C.gather_row[op]
        count_rows(C, C.pull_slot[0], C.used[PULLS], -1)
        make_pulls(W)
        count_rows(C, C.pull_slot[0], C.used[PULLS], 1)
        what[REPULLED] = 2


@compiled
def _gathers_change(W):  # type: ignore[no-untyped-def]
    """Whether gathers have to be made anew: operators that use gathered values have new tiles, or other backward passes, or operators are
    marked that were not, or the other way round."""
    C, U = W.state, W.undo
    remarked = False
    for n in range(U.what[REPLACED]):
        remarked |= U.fields[n * FIELDS + MARKED] != C.marked[U.fields[n * FIELDS]]
    found = remarked and first_with(C, GATHERED) >= 0
    for n in range(U.what[CHANGED]):
        found |= reads_gathered(W, U.fields[n * FIELDS]) and (n < U.what[REPLACED] or _alive_changed(C, U, n))
    return found


@compiled
def _change_operators(W, E):  # type: ignore[no-untyped-def]
    """Place all tiles first, because blocks have edges to readers' tiles. Then make the blocks, readers first."""
    G, V, C, S, U = W.graph, W.variants, W.state, W.scratch, W.undo
    S.count[STAMP] += 1
    stamp = S.count[STAMP]
    last = 0
    for i in range(E.count[REPLACED_OPERATORS]):
        op = E.operator[i]
        _mark(G, U, op, stamp)
        U.dirty[op] = stamp
        _save(W, op, stamp)
        last = max(last, op)
    U.what[REPLACED] = E.count[REPLACED_OPERATORS]
    for i in range(E.count[OPERATORS]):
        op, parts = E.operator[i], V.rows[E.variant[i], PARTS]
        count = parts * (E.dev_ptr[i + 1] - E.dev_ptr[i])
        if C.used[DEVICES] + count > len(C.dev):
            raise MemoryError(STATE_FULL)
        C.variant[op], C.replicas[op], C.dev_ptr[op] = E.variant[i], E.replicas[i], C.used[DEVICES]
        C.tiles[op] = V.rows[E.variant[i], CELLS] * E.replicas[i]
        if E.marked[i] != KEEP:
            C.marked[op] = E.marked[i]
        own = count // (parts * E.replicas[i])
        for replica in range(E.replicas[i]):
            for _ in range(parts):  # each micro-batch has its tiles on the same devices
                copy(C.dev, C.used[DEVICES], E.dev, E.dev_ptr[i] + replica * own, E.dev_ptr[i] + (replica + 1) * own)
                C.used[DEVICES] += own
    for i in range(E.count[REPLACED_OPERATORS]):
        place_tiles(W, E.operator[i])
    for position in range(last, -1, -1):
        if U.dirty[position] != stamp:
            continue
        if U.saved[position] != stamp:
            _save(W, position, stamp)
        if lower_operator(W, position):
            _mark(G, U, position, stamp)
        count_backward(G, C, position, 1)
        U.fields[U.entry[position] * FIELDS + DONE] = 1


@compiled
def _mark(G, U, op, stamp):  # type: ignore[no-untyped-def]
    """Mark the producers of what an operator reads as to be lowered."""
    for k in range(G.read_ptr[op], G.read_ptr[op + 1]):
        U.dirty[G.read_producer[k]] = stamp


@compiled
def _save(W, op, stamp):  # type: ignore[no-untyped-def]
    """Save an operator's block, and stop counting its edges and tiles."""
    G, C, U = W.graph, W.state, W.undo
    n = U.what[CHANGED]
    U.entry[op], U.saved[op] = n, stamp
    at = n * FIELDS
    U.fields[at], U.fields[at + 1], U.fields[at + 2], U.fields[at + 3] = op, C.row[op], C.own_slot[op], C.own_count[op]
    U.fields[at + 4], U.fields[at + 5], U.fields[at + 6], U.fields[at + 7] = C.block[op], C.block_end[op], C.tile_slot[op], C.tiles[op]
    U.fields[at + 8], U.fields[at + 9], U.fields[at + 10] = C.variant[op], C.replicas[op], C.dev_ptr[op]
    U.fields[at + 11] = U.what[LIST_SAVED]
    U.fields[at + DONE], U.fields[at + MARKED] = 0, C.marked[op]
    for place in range(G.reader_ptr[op], G.reader_ptr[op + 1]):
        U.rows[U.what[LIST_SAVED]], U.rows[U.what[LIST_SAVED] + 1] = C.back_row[place], C.need_row[place]
        U.what[LIST_SAVED] += 2
    count = C.tiles[op]
    U.alive_ptr[n] = U.what[ALIVE_SAVED]
    first = C.tile_slot[op] + count
    copy(U.alive, U.what[ALIVE_SAVED], C.alive, first, first + count)
    if is_needed(C, op):
        copy(U.claim, U.what[ALIVE_SAVED], C.claim, first + count, first + 2 * count)
    U.what[ALIVE_SAVED] += count
    U.what[CHANGED] = n + 1
    count_edges(C, op, -1)
    count_backward(G, C, op, -1)


@compiled
def needs_sums(W: World) -> bool:
    """Whether the change affects sums of gradients."""
    G, C, U = W.graph, W.state, W.undo
    if U.what[RESYNCED] > 0 or W.shards.clips[0] or first_with(C, COMPRESSED) >= 0:
        return True  # the norm and compressed sums wait for all backward passes
    for n in range(U.what[CHANGED]):
        op = U.fields[n * FIELDS]
        if G.parameter_ptr[op + 1] > G.parameter_ptr[op] and (n < U.what[REPLACED] or _alive_changed(C, U, n)):
            return True
    return False


@compiled
def _alive_changed(C, U, n):  # type: ignore[no-untyped-def]
    op = U.fields[n * FIELDS]
    first = C.tile_slot[op] + C.tiles[op]
    changed = False
    for tile in range(C.tiles[op]):
        changed |= C.alive[first + tile] != U.alive[U.alive_ptr[n] + tile]
    return changed


@compiled
def change_sums(W: World) -> None:
    """Make sums of gradients and updates anew."""
    G, C, U = W.graph, W.state, W.undo
    U.what[OLD_SYNCS], U.what[OLD_SYNC_SLOT] = C.used[SYNCS], C.sync_slot[0]
    for op in range(len(G.backward)):
        U.sync_row[op] = C.sync_row[op]
    for device in range(len(C.busy)):
        U.update_ns[device], U.update_alive[device], U.update_row[device] = C.duration[device], C.alive[device], C.index[device]
    count_rows(C, C.sync_slot[0], C.used[SYNCS], -1)
    U.what[SYNCHRONIZED] = 1
    synchronize(W)
    U.what[SYNCHRONIZED] = 2


@compiled
def undo(W: World) -> None:
    """Undo the last change, even if an exception has stopped it halfway."""
    G, C, U = W.graph, W.state, W.undo
    if not U.what[UNDER_WAY]:
        return
    for i in range(U.what[RESYNCED]):
        C.sync[U.parameter[i]] = U.sync[i]
    C.prefetch[0] = U.what[OLD_PREFETCH]
    if U.what[REPULLED] == 2:
        count_rows(C, C.pull_slot[0], C.used[PULLS], -1)
    unlink_passes(W)
    if U.what[SYNCHRONIZED]:
        if U.what[SYNCHRONIZED] == 2:
            count_rows(C, C.sync_slot[0], C.used[SYNCS], -1)
        C.sync_slot[0], C.used[SYNCS] = U.what[OLD_SYNC_SLOT], U.what[OLD_SYNCS]
        for op in range(len(G.backward)):
            C.sync_row[op] = U.sync_row[op]
        for device in range(len(C.busy)):
            if C.alive[device] != U.update_alive[device]:
                C.waits[device] += NEVER if C.alive[device] else -NEVER
            C.duration[device], C.alive[device], C.index[device] = U.update_ns[device], U.update_alive[device], U.update_row[device]
        count_rows(C, C.sync_slot[0], C.used[SYNCS], 1)
    for n in range(U.what[CHANGED] - 1, -1, -1):
        at = n * FIELDS
        op = U.fields[at]
        if U.fields[at + DONE]:
            count_edges(C, op, -1)
            count_backward(G, C, op, -1)
        C.row[op], C.own_slot[op], C.own_count[op] = U.fields[at + 1], U.fields[at + 2], U.fields[at + 3]
        C.block[op], C.block_end[op], C.tile_slot[op], C.tiles[op] = U.fields[at + 4], U.fields[at + 5], U.fields[at + 6], U.fields[at + 7]
        C.variant[op], C.replicas[op], C.dev_ptr[op] = U.fields[at + 8], U.fields[at + 9], U.fields[at + 10]
        C.marked[op] = U.fields[at + MARKED]
        for place in range(G.reader_ptr[op], G.reader_ptr[op + 1]):
            saved = U.fields[at + 11] + 2 * (place - G.reader_ptr[op])
            C.back_row[place], C.need_row[place] = U.rows[saved], U.rows[saved + 1]
        first = C.tile_slot[op] + C.tiles[op]
        for tile in range(C.tiles[op]):
            C.alive[first + tile] = U.alive[U.alive_ptr[n] + tile]
            if C.divided[op]:
                C.alive[weights_slot(C, op) + tile] = C.alive[first + tile]
            for row in range(1, row_count(C, C.marked[op]) + 1):
                C.alive[first + row * C.tiles[op] + tile] = C.alive[first + tile]
            if is_needed(C, op):
                C.claim[first + C.tiles[op] + tile] = U.claim[U.alive_ptr[n] + tile]
        count_edges(C, op, 1)
        count_backward(G, C, op, 1)
    C.used[SLOTS], C.used[ARENA], C.used[DEVICES] = U.what[OLD_SLOTS], U.what[OLD_ARENA], U.what[OLD_DEVICES]
    if U.what[REPULLED]:
        for op in range(len(G.backward)):
            C.gather_row[op] = U.gather_row[op]
        C.pull_slot[0], C.used[PULLS] = U.what[OLD_PULL_SLOT], U.what[OLD_PULLS]
        count_rows(C, C.pull_slot[0], C.used[PULLS], 1)
    link_passes(W)
    U.what[UNDER_WAY] = 0
