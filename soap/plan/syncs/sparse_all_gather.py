"""Sparse all-gather: every device of a shard gives each other one the rows of its gradient, adds up what comes, and updates its copy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from soap.plan.plan import Plan, ShardSync, sync_name
from soap.plan.row_counts import most_rows, row_bytes
from soap.plan.syncs.amounts import COPIES, INDEX_BYTES, Amounts, moving_rounds
from soap.plan.syncs.seam import SUM, Asked, Hold, Phase, ShardUpdate, SyncMethod, SyncStep
from soap.strategy.methods import named


class SparseAllGather(SyncMethod):
    """Of sparse parameters; the answer of each reader is as large as the rows that it looks up."""

    def steps(self, plan: Plan, sync: ShardSync, *, pull_together: bool = True) -> Sequence[SyncStep]:
        """All to all: rows and their indices."""
        amounts = Amounts(plan, sync, by_rows=True)
        sent = {device: amounts.values((device,), sync.box) + amounts.indices((device,), sync.box) for device in sync.readers}
        rounds = moving_rounds(([(source, target, size) for source, size in sent.items() for target in sync.readers], 0))
        return (SyncStep(Phase.AFTER_BACKWARD, SUM, self.name(sync), rounds, large=True),) if rounds else ()

    def updates(self, plan: Plan, sync: ShardSync) -> Sequence[ShardUpdate]:
        """Of all rows that anybody touches."""
        amounts, several = Amounts(plan, sync, by_rows=True), len(sync.readers) > 1
        added = sum(amounts.values((device,), sync.box) for device in sync.readers) if several else 0
        rows = sum(amounts.rows((device,), sync.box) for device in sync.readers) if several else 0
        return [ShardUpdate(number, added, rows, amounts.values(sync.readers, sync.box), by_rows=True) for number in sync.shards]

    def asked(self, plan: Plan, sync: ShardSync, *, pull_together: bool = True) -> Asked:
        """Each tells each."""
        return (), [(reader, owner) for reader in sync.readers for owner in sync.readers]

    def buffers(self, plan: Plan, sync: ShardSync) -> Iterable[tuple[int, int]]:
        """Rows that all give, received apart from where they are used, and copied to be sent."""
        return [(device, COPIES * self.gathered_bytes(plan, sync)) for device in sync.readers]

    def holds(self, plan: Plan, sync: ShardSync) -> Iterator[Hold]:
        """What is gathered stays for the update."""
        for device in sync.readers:
            yield Hold(device, self.gathered_bytes(plan, sync), since=self.name(sync))

    @staticmethod
    def name(sync: ShardSync) -> str:
        """Of the task."""
        return sync_name(sync, "gather")

    @staticmethod
    def gathered_bytes(plan: Plan, sync: ShardSync) -> int:
        """Rows that all devices give together at most, with their indices."""
        rows = most_rows(plan, sync.parameter, sync.box, sync.uses)
        return sum(rows.values()) * (row_bytes(plan.graph, sync.parameter, sync.box) + INDEX_BYTES)


METHOD = SparseAllGather(named("sparse_all_gather"))
