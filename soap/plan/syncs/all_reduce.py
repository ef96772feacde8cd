"""All-reduce: shards with equal owners sum their gradients in common buckets, and every owner updates its copy.

Buckets as in Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020.
"""

from __future__ import annotations

from soap.plan.syncs.amounts import Group
from soap.plan.syncs.seam import SUM, How, Phase, Row, Setting, SyncMethod, Template
from soap.strategy.sync_contracts import named


class BucketedSum(SyncMethod):
    """Sums dense gradients in buckets."""

    def template(self, readers: Group, leaders: Group, how: Setting) -> Template:
        """One all-reduce, if there are several readers."""
        return Template((Row(Phase.AFTER_BACKWARD, SUM, "sync", How.SUM, (readers,), large=True),) if len(readers) > 1 else ())


METHOD = BucketedSum(named("all_reduce"))
