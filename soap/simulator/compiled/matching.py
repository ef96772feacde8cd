"""Which new slot replaces which old one after a change, so that the next simulation can follow an earlier one's order (compiled)."""

from __future__ import annotations

from soap.simulator.compiled.change import (
    CHANGED,
    FIELDS,
    OLD_PULL_SLOT,
    OLD_PULLS,
    OLD_SLOTS,
    OLD_SYNC_SLOT,
    OLD_SYNCS,
    REPULLED,
    SYNCHRONIZED,
    Undo,
    old_tile_slots,
)
from soap.simulator.compiled.hashing import hash_join, hash_place
from soap.simulator.compiled.jit import compiled
from soap.simulator.compiled.scratch import FULL, STAMP
from soap.simulator.compiled.second_runs import tile_slots
from soap.simulator.compiled.state import PULLS, SLOTS, SYNCS, State
from soap.simulator.compiled.trial import Trial
from soap.simulator.compiled.world import World

NOWHERE = -1


@compiled
def match_slots(W: World, P: Trial) -> None:
    """Give each new slot the place that the old slot with the same key has in the earlier simulation ``P``."""
    C, S, U = W.state, W.scratch, W.undo
    for slot in range(U.what[OLD_SLOTS], C.used[SLOTS]):
        C.alias[slot] = slot
        P.place[slot] = NOWHERE
    for n in range(U.what[CHANGED]):
        at = n * FIELDS
        op = U.fields[at]
        if C.tile_slot[op] != U.fields[at + 6]:
            _match(C, S, P, U.fields[at + 6], old_tile_slots(C, U, at), C.tile_slot[op], tile_slots(C, op))
        _match(C, S, P, U.fields[at + 2], U.fields[at + 3], C.own_slot[op], C.own_count[op])
    if U.what[REPULLED]:
        _match(C, S, P, U.what[OLD_PULL_SLOT], U.what[OLD_PULLS], C.pull_slot[0], C.used[PULLS])


@compiled
def match_sums(W: World, P: Trial) -> None:
    """``match_slots`` for the sums of gradients, once they have been made anew."""
    C, S, U = W.state, W.scratch, W.undo
    for slot in range(C.sync_slot[0], C.used[SLOTS]):
        C.alias[slot] = slot
        P.place[slot] = NOWHERE
    _match(C, S, P, U.what[OLD_SYNC_SLOT], U.what[OLD_SYNCS], C.sync_slot[0], C.used[SYNCS])


@compiled
def _match(C, S, P, old, olds, new, news):  # type: ignore[no-untyped-def]
    """Match a block's old slots with its new ones by key. Equal beginnings and ends are matched first, without the hash table."""
    while olds > 0 and news > 0 and _is_same(C, old, new):
        _stand_for(C, P, old, new)
        old, new, olds, news = old + 1, new + 1, olds - 1, news - 1
    while olds > 0 and news > 0 and _is_same(C, old + olds - 1, new + news - 1):
        olds, news = olds - 1, news - 1
        _stand_for(C, P, old + olds, new + news)
    if 2 * news > len(S.hash_key):
        raise MemoryError(FULL)
    S.count[STAMP] += 1
    mask = len(S.hash_key) - 1
    for slot in range(new, new + news):
        place = _place(C, slot, mask)
        while S.hash_stamp[place] == S.count[STAMP]:
            place = (place + 1) & mask
        S.hash_stamp[place], S.hash_value[place] = S.count[STAMP], slot
    for slot in range(old, old + olds):
        place = _place(C, slot, mask)
        while S.hash_stamp[place] == S.count[STAMP] and not _is_same(C, slot, S.hash_value[place]):
            place = (place + 1) & mask
        C.alias[slot] = NOWHERE
        if S.hash_stamp[place] == S.count[STAMP]:
            _stand_for(C, P, slot, S.hash_value[place])


@compiled
def _is_same(C, one, other):  # type: ignore[no-untyped-def]
    return C.key[one] == C.key[other] and C.subkey[one] == C.subkey[other]


@compiled
def _place(C, slot, mask):  # type: ignore[no-untyped-def]
    return hash_place(hash_join(C.key[slot], C.subkey[slot]), mask)


@compiled
def _stand_for(C, P, old, new):  # type: ignore[no-untyped-def]
    C.alias[old] = new
    P.place[new], P.ready[new] = P.place[old], P.ready[old]


@compiled
def forget_matches(C: State, U: Undo) -> None:
    """Let old slots stand for themselves again. Call it before ``undo``."""
    for n in range(U.what[CHANGED]):
        at = n * FIELDS
        for slot in range(U.fields[at + 6], U.fields[at + 6] + old_tile_slots(C, U, at)):
            C.alias[slot] = slot
        for slot in range(U.fields[at + 2], U.fields[at + 2] + U.fields[at + 3]):
            C.alias[slot] = slot
    if U.what[REPULLED]:
        for slot in range(U.what[OLD_PULL_SLOT], U.what[OLD_PULL_SLOT] + U.what[OLD_PULLS]):
            C.alias[slot] = slot
    if U.what[SYNCHRONIZED]:
        for slot in range(U.what[OLD_SYNC_SLOT], U.what[OLD_SYNC_SLOT] + U.what[OLD_SYNCS]):
            C.alias[slot] = slot
