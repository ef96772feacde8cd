"""Buckets: which parameter shards have their gradients summed together, and when. Pure data, no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from soap.regions import volume
from soap.simulator.plan import Plan, Shard


@dataclass(frozen=True, slots=True)
class Bucket:
    """Shards with one owner set and dtype whose gradients lie in one buffer, in this order.

    ``start``: place in the global order of the segment with whose backward pass the last of these gradients is complete.
    """

    shards: tuple[int, ...]
    devices: tuple[int, ...]
    start: int


def shards_without_gradient(plan: Plan, buckets: Sequence[Bucket]) -> tuple[int, ...]:
    """Trainable shards to which nothing flows although other parts of their parameter have a gradient: theirs is zero, not None."""
    found = {shard for bucket in buckets for shard in bucket.shards}
    parameters = {plan.shards[shard].parameter for shard in found}
    return tuple(i for i, shard in enumerate(plan.shards) if shard.trainable and shard.parameter in parameters and i not in found)


def make_buckets(
    plan: Plan, active: Set[int], start_of: Mapping[int, int], places: Sequence[int], bucket_bytes: int, first_bytes: int
) -> tuple[Bucket, ...]:
    """Group the shards that get a gradient, in the order in which their gradients become complete.

    ``active``: tiles that have a backward pass. ``start_of``: tile -> start of its segment. ``places``: tile -> its place in the order,
    by which a segment's backward pass goes downwards. Shards on a single device stay alone: there is nothing to send. The first bucket
    of a set of devices is closed at ``first_bytes``. ``bucket_bytes`` 0 gives every shard its own bucket.
    """
    complete = {i: start for i, shard in enumerate(plan.shards) if (start := _last_backward(shard, active, start_of)) is not None}
    used = {i: min(places[tile] for tile, _ in plan.shards[i].uses if tile in active) for i in complete}
    begun: set[tuple[tuple[int, ...], str]] = set()
    open_buckets: dict[tuple[tuple[int, ...], str], list[int]] = {}
    finished: list[Bucket] = []

    def close(shards: list[int]) -> None:
        finished.append(Bucket(tuple(shards), plan.shards[shards[0]].devices, min(complete[i] for i in shards)))

    for i in sorted(complete, key=lambda i: (-complete[i], -used[i], i)):
        key = (plan.shards[i].devices, plan.graph.tensors[plan.shards[i].parameter].dtype)
        shards = open_buckets.setdefault(key, [])
        shards.append(i)
        limit = bucket_bytes if key in begun else min(first_bytes, bucket_bytes)
        if len(key[0]) == 1 or sum(shard_bytes(plan, j) for j in shards) >= limit:
            begun.add(key)
            close(open_buckets.pop(key))
    for shards in open_buckets.values():
        close(shards)
    return tuple(sorted(finished, key=lambda bucket: (-bucket.start, -min(used[i] for i in bucket.shards), bucket.shards)))


def rescheduled(buckets: Sequence[Bucket], plan: Plan, active: Set[int], start_of: Mapping[int, int]) -> tuple[Bucket, ...]:
    """The same buckets, under the same numbers, for another plan with the same shards. What gets no gradient there is summed as zeros."""
    complete = {i: start for i, shard in enumerate(plan.shards) if (start := _last_backward(shard, active, start_of)) is not None}
    return tuple(
        Bucket(bucket.shards, bucket.devices, min((complete[i] for i in bucket.shards if i in complete), default=0)) for bucket in buckets
    )


def shard_bytes(plan: Plan, shard: int) -> int:
    """Size of one copy of a shard in bytes, in the model's own dtype."""
    return volume(plan.shards[shard].box) * plan.graph.tensors[plan.shards[shard].parameter].itemsize


def _last_backward(shard: Shard, active: Set[int], start_of: Mapping[int, int]) -> int | None:
    """Start of the segment that runs backward last among the shard's uses; None if the shard gets no gradient."""
    if not shard.trainable:
        return None
    return min((start_of[tile] for tile, _ in shard.uses if tile in active), default=None)
