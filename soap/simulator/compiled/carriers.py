"""Assigns the pieces that must move to messages and collectives (compiled). The counterpart of ``delivery.Carriers``."""

from __future__ import annotations

from soap.simulator.compiled.arrays import sort
from soap.simulator.compiled.fetches import identify, is_remote, same_piece
from soap.simulator.compiled.hashing import hash_place
from soap.simulator.compiled.jit import compiled
from soap.simulator.compiled.scratch import CARRIERS, FULL, PARTS, PIECES, STAMP, Scratch
from soap.simulator.compiled.variants import CELLS, GRIDS
from soap.simulator.compiled.variants import PARTS as PARTS_OF
from soap.simulator.compiled.world import World

MESSAGE, ALL_GATHER, ALL_TO_ALL, BROADCAST = range(4)
"""Patterns of carriers."""

DTYPES = 1 << 6
"""More dtypes than torch has."""


@compiled
def carry(W: World, op: int) -> None:
    """Assign every remote piece to a carrier, noted in ``p_carrier``."""
    G, V, C, S = W.graph, W.variants, W.state, W.scratch
    S.count[CARRIERS] = 0
    S.count[PARTS] = 0
    S.k_part[0] = 0
    first = G.output_ptr[op]
    for out in range(G.output_ptr[op + 1] - first):
        count = 0
        for piece in range(S.count[PIECES]):
            if S.f_out[S.p_fetch[piece]] == out and is_remote(S, piece):
                count += 1
        if count >= 2:
            rank = V.data[V.data[V.rows[C.variant[op], GRIDS] + out]]
            identify(V, S, out, rank)
            row = V.rows[C.variant[op]]
            own = row[CELLS] // row[PARTS_OF]
            for micro_batch in range(row[PARTS_OF]):
                among = (out, micro_batch, row[CELLS], own)
                if count >= 6:
                    _gathers(V, S, among, rank)
                    _all_to_alls(C, S, among, G.output_routed[first + out])
                _broadcasts(C, S, among)
    _messages(W, op)


@compiled
def _is_free(S, piece, among):  # type: ignore[no-untyped-def]
    """Whether a piece is left, of one output and micro-batch. ``among``: these, the tiles of a replica, and those of a micro-batch."""
    out, micro_batch, cells, own = among
    if S.p_carrier[piece] >= 0 or S.f_out[S.p_fetch[piece]] != out or not is_remote(S, piece):
        return False
    return S.h_tile[S.p_hold[piece]] % cells // own == micro_batch


@compiled
def open_carrier(S: Scratch, pattern: int) -> int:
    """Open a carrier without parts; returns its number."""
    n = S.count[CARRIERS]
    if n + 2 > len(S.k_pattern):
        raise MemoryError(FULL)
    S.k_pattern[n], S.k_task[n] = pattern, -1
    S.k_part[n + 1] = S.count[PARTS]
    S.count[CARRIERS] = n + 1
    return n


@compiled
def add_part(S: Scratch, piece: int) -> None:
    """Add a part to the last carrier."""
    n = S.count[PARTS]
    if n + 2 > len(S.part):
        raise MemoryError(FULL)
    S.part[n] = piece
    S.p_carrier[piece] = S.count[CARRIERS] - 1
    S.count[PARTS] = n + 1
    S.k_part[S.count[CARRIERS]] = n + 1


@compiled
def _is_complete(S, pieces):  # type: ignore[no-untyped-def]
    """Whether at least three devices take part, and each sends something to every other."""
    S.count[STAMP] += 1
    members = 0
    for piece in pieces:
        for device in (S.h_dev[S.p_hold[piece]], S.f_dev[S.p_fetch[piece]]):
            if S.mark[device] != S.count[STAMP]:
                S.mark[device] = S.count[STAMP]
                members += 1
    return members >= 3 and len(pieces) >= members * (members - 1) and _pairs(S, pieces) == members * (members - 1)


@compiled
def _each_gives_each(S, pieces, devices, apart):  # type: ignore[no-untyped-def]
    """Whether at least three devices send, at least three receive, and each of the former sends something to each of the latter; if they
    may not be ``apart``, the same ones do."""
    S.count[STAMP] += 1
    sources, targets, both = 0, 0, 0
    for piece in pieces:
        source, target = S.h_dev[S.p_hold[piece]], S.f_dev[S.p_fetch[piece]]
        if S.mark[source] != S.count[STAMP]:
            S.mark[source] = S.count[STAMP]
            sources += 1
            both += 1 if S.mark[devices + source] == S.count[STAMP] else 0
        if S.mark[devices + target] != S.count[STAMP]:
            S.mark[devices + target] = S.count[STAMP]
            targets += 1
            both += 1 if S.mark[target] == S.count[STAMP] else 0
    if not apart and not sources == targets == both:
        return False
    count = sources * targets - both
    return min(sources, targets) >= 3 and len(pieces) >= count and _pairs(S, pieces) == count


@compiled
def _pairs(S, pieces):  # type: ignore[no-untyped-def]
    """How many pairs of a source and a target pieces have."""
    S.count[STAMP] += 1
    pairs, mask = 0, len(S.hash_key) - 1
    for piece in pieces:
        key = S.h_dev[S.p_hold[piece]] * (1 << 24) + S.f_dev[S.p_fetch[piece]]
        place = hash_place(key, mask)
        while S.hash_stamp[place] == S.count[STAMP] and S.hash_key[place] != key:
            place = (place + 1) & mask
        if S.hash_stamp[place] != S.count[STAMP]:
            S.hash_stamp[place], S.hash_key[place] = S.count[STAMP], key
            pairs += 1
    return pairs


@compiled
def _gathers(V, S, among, rank):  # type: ignore[no-untyped-def]
    """Make an all-gather where several devices each hold a part of one region and all need the whole."""
    n = 0
    for piece in range(S.count[PIECES]):
        if _is_free(S, piece, among):
            if n >= len(S.work):
                raise MemoryError(FULL)
            S.work[n] = S.f_box[S.p_fetch[piece]] * S.count[PIECES] + piece
            n += 1
    equal = S.work[:n]
    sort(equal, 0, n)
    start = 0
    while start < n:
        own = equal[start : _end_of_equal(S, equal, start)]
        if len(own) > 3 and _is_complete(S, own) and _all_get_the_same(V, S, own, rank):
            open_carrier(S, ALL_GATHER)
            for piece in own:
                add_part(S, piece)
        start += len(own)


@compiled
def _end_of_equal(S, sorted_pieces, start):  # type: ignore[no-untyped-def]
    """Where the pieces end that have the same key as the one at ``start``. Of (key, piece) the key is dropped."""
    stop, key = start, sorted_pieces[start] // S.count[PIECES]
    while stop < len(sorted_pieces) and sorted_pieces[stop] // S.count[PIECES] == key:
        sorted_pieces[stop] %= S.count[PIECES]
        stop += 1
    return stop


@compiled
def _all_get_the_same(V, S, pieces, rank):  # type: ignore[no-untyped-def]
    """Whether the fetches of these pieces consist of the same pieces, in whatever order."""
    first = S.p_fetch[pieces[0]]
    size = S.f_piece[first + 1] - S.f_piece[first]
    before = first
    for piece in pieces:
        fetch = S.p_fetch[piece]
        if fetch == before:
            continue
        before = fetch
        if S.f_piece[fetch + 1] - S.f_piece[fetch] != size:
            return False
        for a in range(S.f_piece[fetch], S.f_piece[fetch + 1]):
            found = False
            for b in range(S.f_piece[first], S.f_piece[first + 1]):
                found |= same_piece(V, S, a, b, rank)
            if not found:
                return False
    return True


@compiled
def _root(S, device):  # type: ignore[no-untyped-def]
    while S.mark_value[device] != device:
        S.mark_value[device] = S.mark_value[S.mark_value[device]]
        device = S.mark_value[device]
    return device


@compiled
def _all_to_alls(C, S, among, apart):  # type: ignore[no-untyped-def]
    """Make an all-to-all of pieces whose sources and targets are connected by pieces, if each source sends something to each target.
    ``apart``: whether others may send than receive."""
    S.count[STAMP] += 1
    count, devices = 0, len(C.busy)
    for piece in range(S.count[PIECES]):
        if _is_free(S, piece, among):
            source, target = S.h_dev[S.p_hold[piece]], devices + S.f_dev[S.p_fetch[piece]]
            for end in range(2):
                device = target if end else source
                if S.mark[device] != S.count[STAMP]:
                    S.mark[device] = S.count[STAMP]
                    S.mark_value[device] = device
            S.mark_value[_root(S, source)] = _root(S, target)
            count += 1
    if count <= 3:
        return
    if 2 * count > len(S.work):
        raise MemoryError(FULL)
    n = 0
    for piece in range(S.count[PIECES]):
        if _is_free(S, piece, among):
            S.work[n] = _root(S, devices + S.f_dev[S.p_fetch[piece]]) * S.count[PIECES] + piece
            n += 1
    members = S.work[:n]
    sort(members, 0, n)
    start = 0
    while start < n:
        own = members[start : _end_of_equal(S, members, start)]
        if len(own) > 3 and _each_gives_each(S, own, devices, apart):
            open_carrier(S, ALL_TO_ALL)
            for piece in own:
                add_part(S, piece)
        start += len(own)


@compiled
def _broadcasts(C, S, among):  # type: ignore[no-untyped-def]
    """Make a broadcast where one piece goes to many devices. A device that needs it for a second region gets that by a message."""
    n = 0
    for piece in range(S.count[PIECES]):
        if _is_free(S, piece, among):
            if n >= len(S.work):
                raise MemoryError(FULL)
            S.work[n] = S.p_id[piece] * S.count[PIECES] + piece
            n += 1
    equal = S.work[:n]
    sort(equal, 0, n)
    start = 0
    while start < n:
        own = equal[start : _end_of_equal(S, equal, start)]
        if len(own) >= 3:
            S.count[STAMP] += 1
            targets = 0
            for piece in own:
                device = S.f_dev[S.p_fetch[piece]]
                if S.mark[device] != S.count[STAMP]:
                    S.mark[device] = S.count[STAMP]
                    targets += 1
            if tree_depth(targets + 1) < targets:
                open_carrier(S, BROADCAST)
                S.count[STAMP] += 1
                for piece in own:
                    device = S.f_dev[S.p_fetch[piece]]
                    if S.mark[device] != S.count[STAMP]:
                        S.mark[device] = S.count[STAMP]
                        add_part(S, piece)
        start += len(own)


@compiled
def tree_depth(devices: int) -> int:
    """Rounds of a binomial tree over this many devices."""
    rounds, reached = 0, 1
    while reached < devices:
        reached *= 2
        rounds += 1
    return rounds


@compiled
def _messages(W, op):  # type: ignore[no-untyped-def]
    """Join the pieces that are left into messages: those of equal source, target, ready time and dtype."""
    G, C, S = W.graph, W.state, W.scratch
    S.count[STAMP] += 1
    mask = len(S.hash_key) - 1
    first = S.count[CARRIERS]
    count = 0
    for piece in range(S.count[PIECES]):
        if S.p_carrier[piece] >= 0 or not is_remote(S, piece):
            continue
        hold, fetch = S.p_hold[piece], S.p_fetch[piece]
        red = S.h_red[hold]
        ready = 2 * S.h_tile[hold] if red < 0 else 2 * (S.r_rep[red] * (1 << 24) + S.r_group[red]) + 1
        key = (ready * len(C.busy) + S.h_dev[hold]) * len(C.busy) + S.f_dev[fetch]
        key = key * DTYPES + G.output_dtype[G.output_ptr[op] + S.f_out[fetch]]
        place = hash_place(key, mask)
        while S.hash_stamp[place] == S.count[STAMP] and S.hash_key[place] != key:
            place = (place + 1) & mask
        if S.hash_stamp[place] != S.count[STAMP]:
            S.hash_stamp[place], S.hash_key[place], S.hash_value[place] = S.count[STAMP], key, open_carrier(S, MESSAGE)
        S.p_carrier[piece] = S.hash_value[place]
        count += 1
    if count == 0:
        return
    messages = S.count[CARRIERS]
    if messages + 1 > len(S.work) or S.count[PARTS] + count + 1 > len(S.part):
        raise MemoryError(FULL)
    for carrier in range(first, messages):
        S.work[carrier] = 0
    for piece in range(S.count[PIECES]):
        if S.p_carrier[piece] >= first:
            S.work[S.p_carrier[piece]] += 1
    at = S.count[PARTS]
    for carrier in range(first, messages):
        size = S.work[carrier]
        S.k_part[carrier] = at
        S.work[carrier] = at
        at += size
    S.k_part[messages] = at
    S.count[PARTS] = at
    for piece in range(S.count[PIECES]):
        carrier = S.p_carrier[piece]
        if carrier >= first:
            S.part[S.work[carrier]] = piece
            S.work[carrier] += 1
