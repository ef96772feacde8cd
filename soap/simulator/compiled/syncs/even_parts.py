"""Collectives of equal parts between GPUs (compiled). The counterpart of ``plan.syncs.even_parts``.

What a bucket's readers own, and how many share a copy, is in ``owned`` and ``bucket_sharers`` (``syncs.sharded_state``).
"""

from __future__ import annotations

from soap.simulator.compiled.communication import parted_ns
from soap.simulator.compiled.jit import compiled
from soap.simulator.compiled.world import World


@compiled
def is_even(W: World) -> bool:
    """Whether all readers are accelerators. Call it after ``find_members``."""
    K, S = W.cluster, W.scratch
    for i in range(S.members[0]):
        if K.serves_itself[S.members[1 + i]]:
            return False
    return True


@compiled
def is_even_bucket(W: World, bucket: int) -> bool:
    """The same of a bucket's readers."""
    K, sets, group = W.cluster, W.groups.sets, W.scratch.t_res_n[bucket]
    for i in range(sets.ptr[group], sets.ptr[group + 1]):
        if K.serves_itself[sets.item[i]]:
            return False
    return True


@compiled
def largest_part(W: World, bucket: int) -> int:
    """Bytes of one reader's parts of a bucket, with padding."""
    S, largest = W.scratch, 0
    for i in range(S.owned_ptr[bucket], S.owned_ptr[bucket + 1]):
        largest = max(largest, S.owned[i])
    return largest


@compiled
def bucket_bytes(W: World, bucket: int) -> int:
    """Bytes of a reader's buffer of all gradients, or of all values that it gathers, with padding if its parts are even."""
    S = W.scratch
    return S.bucket_sharers[bucket] * largest_part(W, bucket) if is_even_bucket(W, bucket) else S.t_bytes[bucket]


@compiled
def collective_of(W: World, bucket: int) -> tuple[int, int]:
    """(duration in ns, bytes) of an all-gather or a reduce-scatter of a bucket in all copies at once; its links are added to ``res``. Call
    it after ``find_copies`` and ``begin_exchange``."""
    K, R, S = W.cluster, W.groups, W.scratch
    sharers, size, duration, moved = S.bucket_sharers[bucket], S.bucket_sharers[bucket] * largest_part(W, bucket), 0, 0
    entry = R.sets.missing[1 : 2 + sharers]  # built in place: it stays there if it is missing
    for first in range(S.members[0]):
        if S.leader[first] == first:
            entry[0] = len(K.device_type)
            for place in range(S.members[0]):
                if S.leader[place] == first:
                    entry[1 + S.inside[place]] = S.members[1 + place]
            duration = max(duration, parted_ns(R, S, entry, size))
            moved += (sharers - 1) * size
    return duration, moved
