"""All-reduce: shards with equal owners sum their gradients in common buckets, and every owner updates its copy.

Buckets as in Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from soap.model.graph import OperatorGraph
from soap.plan.plan import Plan, Shard, ShardSync, sync_name
from soap.plan.syncs.bucketing import make_buckets, wire_bytes
from soap.plan.syncs.seam import SUM, Hold, Phase, SyncMethod, SyncStep
from soap.plan.tiling import Tile
from soap.strategy.sync_contracts import named
from soap.strategy.wrapped import Wrapped


class BucketedSum(SyncMethod):
    """Sums dense gradients in buckets. Each element travels in ``Contract.wire_bits`` bits."""

    def groups(
        self, graph: OperatorGraph, tiles: Sequence[Tile], shards: Sequence[Shard], syncs: Sequence[ShardSync], wrapped: Wrapped
    ) -> Sequence[ShardSync]:
        """Joined into buckets: one synchronization per buffer."""
        return make_buckets(graph, tiles, shards, syncs, wrapped=wrapped)

    def steps(self, plan: Plan, sync: ShardSync, *, pull_together: bool = True) -> Sequence[SyncStep]:
        """One all-reduce, if there are several readers."""
        if len(sync.readers) < 2:
            return ()
        size = wire_bytes(plan, sync)
        return (SyncStep(Phase.AFTER_BACKWARD, SUM, sync_name(sync), summed_bytes=size, among=sync.readers, large=True),)

    def buffers(self, plan: Plan, sync: ShardSync) -> Iterable[tuple[int, int]]:
        """If gradients travel in another format, each reader needs a buffer for that format."""
        if self.contract.wire_bits is None or len(sync.readers) < 2:
            return ()
        return [(device, wire_bytes(plan, sync)) for device in sync.readers]

    def holds(self, plan: Plan, sync: ShardSync) -> Iterator[Hold]:
        """The buffers, for the whole step: they are made once."""
        for device, size in self.buffers(plan, sync):
            yield Hold(device, size)


METHOD = BucketedSum(named("all_reduce"))
