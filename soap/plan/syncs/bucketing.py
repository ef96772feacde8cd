"""Buckets: which regions of parameters sum their gradients together. They follow from the graph and the shards, not from costs."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace

from soap.model.graph import OperatorGraph
from soap.model.regions import volume
from soap.plan.plan import Plan, Shard, ShardSync
from soap.strategy.compression import Compression
from soap.strategy.wrapped import USUAL, Wrapped

BUCKET_BYTES = 25 * 2**20
"""Approximate size of a bucket: several of them let sums overlap with the rest of the backward pass. DistributedDataParallel's default."""
FIRST_BUCKET_BYTES = 2**20
"""Size of the first bucket, smaller so that sums begin early. DistributedDataParallel's default as well."""


def usual_limits() -> tuple[int, int]:
    """Bytes at which the first bucket closes, and each later one."""
    return FIRST_BUCKET_BYTES, BUCKET_BYTES


GATHER_BYTES = 25 * 2**20
"""Approximate size of a group of values that are gathered together: large enough that latencies do not count, and less than a block of a
large model has."""
LEAST_GROUPS = 8
"""Into about so many groups at least all of a small model's values are divided: one group would be the whole model."""


def gather_limit(graph: OperatorGraph) -> int:
    """The size at which a group of values that are gathered together is full."""
    return min(GATHER_BYTES, -(-sum(tensor.bytes for tensor in graph.parameters) // LEAST_GROUPS))


_Key = tuple[tuple[int, ...], tuple[int, ...], bool, str, Compression | None, bool, int | None, int]
"""What the regions of a bucket have in common."""


def make_buckets(
    graph: OperatorGraph,
    first_tile: Sequence[int],
    shards: Sequence[Shard],
    syncs: Sequence[ShardSync],
    limits: tuple[int, int],
    wrapped: Wrapped = USUAL,
) -> tuple[ShardSync, ...]:
    """Join synchronizations of one region each into buckets, in the order in which the backward pass completes their gradients.

    A region's gradient is complete once the lowest operator that uses it has run backward. So regions are taken by that operator's
    position, highest first, then by their first shard. Each joins the open bucket of its readers, their leaders, dtype, compression,
    ``offload`` and ``part``. ``limits``: the bytes at which the first of these closes, and each later one. Those of a module that is
    ``wrapped`` have a bucket to themselves, which never closes. A region with a single reader gets a bucket of its own, because nothing is
    sent. Frozen regions are taken by the lowest operator that reads them, in buckets of their own. The result is ordered by the lowest
    operator that a bucket's regions need, highest first, then by the bucket's first shard.

    Bytes are those of gradients, however few of them travel. So buckets are complete at as many moments of the backward pass, and have as
    much to overlap with, whatever the density; a warm-up's denser messages travel in the same buckets.
    """
    first_limit, limit = limits
    trained = graph.backward_operators
    alone = {sync.shards[0]: sync for sync in syncs}
    lowest = {}
    for sync in syncs:
        users, is_frozen = {bisect_right(first_tile, tile) - 1 for tile, _ in sync.uses}, not shards[sync.shards[0]].trainable
        lowest[sync.shards[0]] = min(users if is_frozen else users & trained)
    module_of = {name: number for number, names in enumerate(wrapped.modules) for name in names}
    begun: set[_Key] = set()
    open_buckets: dict[_Key, list[int]] = {}
    filled: dict[_Key, int] = {}
    finished: list[list[int]] = []
    for number in sorted(lowest, key=lambda number: (-lowest[number], number)):
        own = alone[number]
        module, dtype = module_of.get(own.parameter, -1), graph.tensors[own.parameter].dtype
        key = (own.readers, own.leaders, shards[number].trainable, dtype, own.compression, own.offload, own.part, module)
        open_buckets.setdefault(key, []).append(number)
        filled[key] = filled.get(key, 0) + sum(shard_bytes(graph, shards[i]) for i in own.shards)
        if len(own.readers) == 1 or (module < 0 and filled[key] >= (limit if key in begun else first_limit)):
            begun.add(key)
            finished.append(open_buckets.pop(key))
            filled[key] = 0
    finished += open_buckets.values()
    finished.sort(key=lambda numbers: (-lowest[numbers[-1]], numbers[0]))
    return tuple(_joined([alone[number] for number in numbers]) for numbers in finished)


def _joined(syncs: Sequence[ShardSync]) -> ShardSync:
    """The synchronizations as one, named after the first."""
    return syncs[0] if len(syncs) == 1 else replace(syncs[0], regions=tuple(region for sync in syncs for region in sync.regions))


def idle_shards(plan: Plan) -> tuple[int, ...]:
    """Trainable shards that no gradient reaches while other parts of their parameter have one: they are updated with a gradient of zero."""
    found = plan.synchronized
    parameters = {plan.shards[number].parameter for number in found}
    return tuple(i for i, shard in enumerate(plan.shards) if shard.trainable and shard.parameter in parameters and i not in found)


def sums_of_one(plan: Plan) -> frozenset[int]:
    """Shards with a single reader that is also the owner: the gradient stays where autograd makes it, and nothing travels."""
    return frozenset(sync.shards[0] for sync in plan.syncs if sync.contract.sums_in_place and len(sync.readers) == 1)


def shard_bytes(graph: OperatorGraph, shard: Shard) -> int:
    """Size of one copy of a shard, in the model's own dtype."""
    return volume(shard.box) * graph.tensors[shard.parameter].itemsize


def gradient_bytes(plan: Plan, sync: ShardSync) -> int:
    """Size of one copy of all gradients that are synchronized together."""
    return sum(shard_bytes(plan.graph, plan.shards[number]) for number in sync.shards)
