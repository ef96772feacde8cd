"""Where each pass stands among those of its device, and what a device's passes certainly come behind (compiled).

With micro-batches every device runs its passes one after the other, in the order of ``State.follow``: its *places*. Those of one action
(``plan.pass_order``) that follow each other are a *node*. A pass that reads what another device makes comes behind that pass, and behind
what that one comes behind. So for each node it is known how many passes of every other device are over when it ends, however long
anything takes.
"""

from __future__ import annotations

from typing import NamedTuple

from soap.simulator.compiled.arrays import fill
from soap.simulator.compiled.fetches import is_remote
from soap.simulator.compiled.graph_arrays import Ints, Longs
from soap.simulator.compiled.jit import compiled
from soap.simulator.compiled.machine_code import entry
from soap.simulator.compiled.pass_order import BACKWARD, FORWARD, WEIGHTS
from soap.simulator.compiled.scratch import FETCHES
from soap.simulator.compiled.second_runs import weights_slot
from soap.simulator.compiled.state import BACKWARD_TILE, FORWARD_TILE, SLOTS
from soap.simulator.compiled.variants import CELLS, PARTS
from soap.simulator.compiled.world import World

NOWHERE = -1
"""In place of a place: the pass is in no order, or does not take place."""

FOREVER = 1 << 30
"""A place behind all others: until the step ends."""


class PlaceTables(NamedTuple):
    """Places and nodes, and what ``ordered_memory`` works out of them.

    ``sizes``: (slots in use, actions that an order of so many groups may have). ``rank``: [group, micro-batch], the place of an action in
    the order; that of the epilogue last. ``place``: by slot. ``base``: by device, its first place; behind its last one is a place without a
    pass. ``node_base``: by device, its first node. Both end with one more. By node: ``node_rank``, and ``node_first``, its first place. By
    place: ``node``. ``done``: [node, device], how many of the device's passes are over when the node ends; empty if that would take too
    much memory, and then nothing is known of other devices. ``next``: by device, the next node.

    ``change``: by place, bytes that are held from there on, beyond those held before. ``steady``: by device, bytes that are held all the
    time. ``ordered``: by device, the bound, in bytes.
    """

    sizes: Longs
    rank: Ints
    place: Ints
    base: Ints
    node_base: Ints
    node_rank: Ints
    node_first: Ints
    node: Ints
    done: Ints
    next: Ints
    change: Longs
    steady: Longs
    ordered: Longs


@entry
def count_passes(W: World, L: PlaceTables) -> None:
    """Fill ``sizes``; and ``base`` and ``node_base`` with each device's number of passes, and of nodes."""
    A, C = W.order, W.state
    L.sizes[0], L.sizes[1] = C.used[SLOTS], (len(A.ptr) - 1) * A.count[0]
    for device in range(len(C.busy)):
        passes = nodes = 0
        before, slot = NOWHERE, C.head[device]
        while slot > 0:
            action = _action(W, slot)
            nodes += action != before
            before, slot, passes = action, C.follow[slot], passes + 1
        L.base[device], L.node_base[device] = passes, nodes


@compiled
def _action(W, slot):  # type: ignore[no-untyped-def]
    """The number, as an index of ``rank``, of the action to which a pass belongs."""
    A, V, C = W.order, W.variants, W.state
    op, kind, count = C.owner[slot], C.kind[slot], A.count[0]
    own = FORWARD if kind == FORWARD_TILE else BACKWARD if kind == BACKWARD_TILE else WEIGHTS
    group = A.group_of[own * len(A.divided) + op]
    if group < 0:
        return (len(A.ptr) - 1) * count
    cells, parts = V.rows[C.variant[op], CELLS], V.rows[C.variant[op], PARTS]
    part = (C.index[slot] % cells) // (cells // parts)
    if parts == 1:
        part = 0 if own == FORWARD else count - 1
    return group * count + part


@compiled
def find_places(W: World, L: PlaceTables) -> None:
    """Fill ``rank``, ``place``, ``node`` and what belongs to nodes. ``base`` and ``node_base`` say where each device's begin."""
    A, C = W.order, W.state
    count = A.count[0]
    for action in range(len(A.part)):
        L.rank[A.group[action] * count + A.part[action]] = action
    L.rank[(len(A.ptr) - 1) * count] = len(A.part)
    fill(L.place, 0, C.used[SLOTS], NOWHERE)
    for device in range(len(C.busy)):
        place, node, before, slot = L.base[device], L.node_base[device] - 1, NOWHERE, C.head[device]
        while slot > 0:
            action = _action(W, slot)
            if action != before:
                node += 1
                L.node_rank[node], L.node_first[node] = L.rank[action], place
            L.place[slot], L.node[place] = place, node
            before, slot, place = action, C.follow[slot], place + 1


@compiled
def forward_place(W: World, L: PlaceTables, op: int, tile: int) -> int:
    """Of a tile's forward pass."""
    return L.place[W.state.tile_slot[op] + tile]


@compiled
def backward_place(W: World, L: PlaceTables, op: int, tile: int) -> int:
    """Of a tile's backward pass, the first half if it is in two; NOWHERE if it has none."""
    C = W.state
    slot = C.tile_slot[op] + C.tiles[op] + tile
    return L.place[slot] if C.alive[slot] else NOWHERE


@compiled
def last_place(W: World, L: PlaceTables, op: int, tile: int) -> int:
    """Of a tile's last pass."""
    C = W.state
    place = max(forward_place(W, L, op, tile), backward_place(W, L, op, tile))
    if C.divided[op]:
        slot = weights_slot(C, op) + tile
        place = max(place, L.place[slot] if C.alive[slot] else NOWHERE)
    return place


@compiled
def last_of_node(L: PlaceTables, device: int, node: int) -> int:
    """The last place of a device's node."""
    return (L.node_first[node + 1] if node + 1 < L.node_base[device + 1] else L.base[device + 1] - 1) - 1


@compiled
def note_needs(W: World, L: PlaceTables, op: int) -> None:
    """Note in ``done`` which passes come directly behind which of other devices, because of what an operator makes. The scratch must hold
    its delivery."""
    G, S = W.graph, W.scratch
    for fetch in range(S.count[FETCHES]):
        answers = G.output_gradient[G.output_ptr[op] + S.f_out[fetch]]
        for piece in range(S.f_piece[fetch], S.f_piece[fetch + 1]):
            hold = S.p_hold[piece]
            red = S.h_red[hold]
            first, last = (S.r_hold[red], S.r_hold[red + 1]) if red >= 0 else (hold, hold + 1)
            if red < 0 and not is_remote(S, piece):
                continue
            for made in range(first, last):  # of a sum, all devices that add to it
                consumer = S.f_first[fetch]
                while consumer >= 0:
                    reader = G.reader[G.reader_ptr[op] + S.c_slot[consumer]]
                    _note(W, L, op, S.h_tile[made], S.h_dev[made], reader, S.c_tile[consumer], S.f_dev[fetch], answers)
                    consumer = S.c_next[consumer]


@compiled
def _note(W, L, maker, tile, source, reader, of_reader, target, answers):  # type: ignore[no-untyped-def]
    devices = len(W.state.busy)
    if source == target:
        return
    made, read = forward_place(W, L, maker, tile), forward_place(W, L, reader, of_reader)
    if made >= 0 and read >= 0:
        at = L.node[read] * devices + source
        L.done[at] = max(L.done[at], made - L.base[source] + 1)
    back, given = backward_place(W, L, maker, tile), backward_place(W, L, reader, of_reader)
    if answers and back >= 0 and given >= 0:
        at = L.node[back] * devices + target
        L.done[at] = max(L.done[at], given - L.base[target] + 1)


@compiled
def close_needs(W: World, L: PlaceTables) -> None:
    """From what nodes come directly behind to all that they come behind."""
    devices, actions = len(W.state.busy), len(W.order.part)
    for device in range(devices):
        L.next[device] = L.node_base[device]
    for rank in range(actions + 1):
        for device in range(devices):
            node = L.next[device]
            if node < L.node_base[device + 1] and L.node_rank[node] == rank:
                _close_node(L, devices, device, node)
                L.next[device] += 1


@compiled
def _close_node(L, devices, device, node):  # type: ignore[no-untyped-def]
    row, first = node * devices, node == L.node_base[device]
    for other in range(devices):
        count = L.done[row + other]
        if count == 0 or (not first and L.done[row - devices + other] >= count):
            continue
        own = L.node[L.base[other] + count - 1]
        if L.base[other] + count - 1 < last_of_node(L, other, own) or L.node_rank[own] >= L.node_rank[node]:
            own -= 1  # it may not be over, or is not known yet; the one before it is
        if own >= L.node_base[other]:
            for third in range(devices):
                L.done[row + third] = max(L.done[row + third], L.done[own * devices + third])
    if not first:
        for other in range(devices):
            L.done[row + other] = max(L.done[row + other], L.done[row - devices + other])
    L.done[row + device] = last_of_node(L, device, node) - L.base[device] + 1


@compiled
def earliest_arrival(L: PlaceTables, devices: int, target: int, source: int, made: int) -> int:
    """The last place of ``target`` that is certainly over when ``source`` ends its pass at place ``made``: nothing from there arrives
    before. The first place if none is."""
    first = L.base[target]
    if len(L.done) == 0 or made < 0:
        return first
    node = L.node[made] - 1
    if node < L.node_base[source]:
        return first
    return max(first, first + L.done[node * devices + target] - 1)


@compiled
def surely_over(L: PlaceTables, devices: int, device: int, begun: int, other: int, place: int) -> int:
    """The first place of ``device``, of those that end a node and are not before ``begun``, at which the pass of ``other`` at ``place`` is
    certainly over; FOREVER if there is none."""
    if len(L.done) == 0 or begun < 0 or place < 0:
        return FOREVER
    count = place - L.base[other] + 1
    low, high = L.node[begun], L.node_base[device + 1]
    while low < high:
        middle = (low + high) // 2
        if L.done[middle * devices + other] >= count:
            high = middle
        else:
            low = middle + 1
    return last_of_node(L, device, low) if low < L.node_base[device + 1] else FOREVER


@compiled
def hold(L: PlaceTables, device: int, first: int, last: int, size: int) -> None:
    """A device holds something from one of its places to another, and at the moment in which the next pass begins: it may be made from
    that."""
    end = L.base[device + 1] - 2  # the device's last pass
    if end < L.base[device]:
        L.steady[device] += size
        return
    L.change[max(L.base[device], min(first, last, end))] += size
    L.change[min(end, max(first, last) + 1) + 1] -= size
