"""All-reduce: shards with equal owners sum their gradients in common buckets, and every owner updates its copy.

Buckets as in Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020.
"""

from __future__ import annotations

from collections.abc import Iterator

from soap.plan.plan import Plan, ShardSync
from soap.plan.syncs.amounts import Group
from soap.plan.syncs.bucketing import wire_bytes
from soap.plan.syncs.seam import SUM, Hold, How, Phase, Row, Setting, SyncMethod, Template
from soap.strategy.sync_contracts import named


class BucketedSum(SyncMethod):
    """Sums dense gradients in buckets. Each element travels in ``Contract.wire_bits`` bits."""

    def template(self, readers: Group, leaders: Group, how: Setting) -> Template:
        """One all-reduce, if there are several readers."""
        return Template((Row(Phase.AFTER_BACKWARD, SUM, "sync", How.SUM, (readers,), large=True),) if len(readers) > 1 else ())

    def holds(self, plan: Plan, sync: ShardSync) -> Iterator[Hold]:
        """If gradients travel in another format, a buffer of each reader for that format, for the whole step: it is made once."""
        if self.contract.wire_bits is not None and len(sync.readers) > 1:
            yield from (Hold(device, wire_bytes(plan, sync)) for device in sync.readers)


METHOD = BucketedSum(named("all_reduce"))
