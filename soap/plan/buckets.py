"""Buckets: which parameter shards have their gradients summed together. The graph and the shards say so, without costs or order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from soap.model.graph import OperatorGraph
from soap.model.regions import volume
from soap.plan.plan import Bucket, Plan, Shard
from soap.plan.tiling import Tile
from soap.strategy.config import SyncConfig

BUCKET_BYTES = 25 * 2**20
"""Gradients are summed in buffers of about this size, so that summing overlaps with the rest of the backward pass. The figure is
DistributedDataParallel's default."""
FIRST_BUCKET_BYTES = 2**20
"""Size of the first buffer: the sooner summing begins, the more of it overlaps. DistributedDataParallel's as well."""


def make_buckets(
    graph: OperatorGraph, tiles: Sequence[Tile], shards: Sequence[Shard], elsewhere: Sequence[int] = ()
) -> tuple[Bucket, ...]:
    """Group the shards that may get a gradient, in the order in which a backward pass through all operators completes their gradients.

    A shard's gradient is complete once the lowest operator that uses it has run backward. Shards are taken by that operator's position,
    highest first, then by parameter and index. Each joins the open bucket of its devices and dtype, which is closed at ``BUCKET_BYTES``,
    the first one at ``FIRST_BUCKET_BYTES``. What a single device keeps stays alone: nothing is sent. Buckets are listed by the lowest
    operator that any of their shards needs, highest first, then by their first shard. Shards whose gradients go ``elsewhere`` are in none.
    """
    others = set(elsewhere)
    users = {number: _lowest_user(graph, tiles, shard) for number, shard in enumerate(shards) if number not in others}
    lowest = {number: position for number, position in users.items() if position is not None}
    begun: set[tuple[tuple[int, ...], str]] = set()
    open_buckets: dict[tuple[tuple[int, ...], str], list[int]] = {}
    filled: dict[tuple[tuple[int, ...], str], int] = {}
    finished: list[list[int]] = []
    for number in sorted(lowest, key=lambda number: (-lowest[number], number)):
        shard = shards[number]
        key = (shard.devices, graph.tensors[shard.parameter].dtype)
        open_buckets.setdefault(key, []).append(number)
        filled[key] = filled.get(key, 0) + shard_bytes(graph, shard)
        if len(shard.devices) == 1 or filled[key] >= (BUCKET_BYTES if key in begun else FIRST_BUCKET_BYTES):
            begun.add(key)
            finished.append(open_buckets.pop(key))
            filled[key] = 0
    finished += open_buckets.values()
    finished.sort(key=lambda numbers: (-lowest[numbers[-1]], numbers[0]))
    return tuple(Bucket(tuple(numbers), shards[numbers[0]].devices) for numbers in finished)


def find_gathered(
    graph: OperatorGraph, tiles: Sequence[Tile], shards: Sequence[Shard], syncs: Mapping[str, SyncConfig]
) -> tuple[int, ...]:
    """The shards that get a gradient and whose parameter is synchronized by giving each other rows of it."""
    wanted = {name for name, sync in syncs.items() if sync.method == "allgather"}
    candidates = (number for number, shard in enumerate(shards) if wanted and shard.parameter in wanted)
    return tuple(number for number in candidates if _lowest_user(graph, tiles, shards[number]) is not None)


def idle_shards(plan: Plan) -> tuple[int, ...]:
    """Trainable shards to which nothing flows although other parts of their parameter have a gradient: theirs is zero, and updates them."""
    found = {
        *(number for bucket in plan.buckets for number in bucket.shards),
        *plan.gathered,
        *(number for own in plan.served for number in own.shards),
    }
    parameters = {plan.shards[number].parameter for number in found}
    return tuple(i for i, shard in enumerate(plan.shards) if shard.trainable and shard.parameter in parameters and i not in found)


def shard_bytes(graph: OperatorGraph, shard: Shard) -> int:
    """Size of one copy of a shard, in the model's own dtype."""
    return volume(shard.box) * graph.tensors[shard.parameter].itemsize


def bucket_bytes(plan: Plan, bucket: Bucket) -> int:
    """Size of one copy of all its gradients."""
    return sum(shard_bytes(plan.graph, plan.shards[number]) for number in bucket.shards)


def _lowest_user(graph: OperatorGraph, tiles: Sequence[Tile], shard: Shard) -> int | None:
    """The lowest operator that may give the shard a gradient; None if there is none."""
    if not shard.trainable:
        return None
    users = (tiles[tile].operator for tile, _ in shard.uses)
    return min((position for position in users if position in graph.backward_operators), default=None)
