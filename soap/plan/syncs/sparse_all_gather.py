"""Sparse all-gather: every reader sends the others the rows of its gradient, adds up the rows that it gets, and updates its copy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from soap.plan.plan import Plan, ShardSync, sync_name
from soap.plan.row_counts import most_rows, row_bytes
from soap.plan.syncs.amounts import INDEX_BYTES, Group
from soap.plan.syncs.parameter_server import added_updates
from soap.plan.syncs.seam import SUM, Amount, Hold, How, Of, Phase, Row, Setting, ShardUpdate, SyncMethod, Template
from soap.strategy.sync_contracts import named


class SparseAllGather(SyncMethod):
    """Gathers the gradients of sparse parameters. What a reader sends is as large as the rows that it looks up."""

    def template(self, readers: Group, leaders: Group, how: Setting) -> Template:
        """One round in which every reader sends all others its rows and their indices; and tells all which it looks up."""
        own = [Amount(Of.ROWS, (reader,)) for reader in readers]
        flows = [(source, target, amount) for source, amount in zip(readers, own, strict=True) for target in readers if target != source]
        gather = Row(Phase.AFTER_BACKWARD, SUM, "gather", How.EXCHANGE, rounds=((flows, False),), large=True)
        return Template((gather,) if flows else (), asked=[(reader, owner) for reader in readers for owner in readers])

    def updates(self, plan: Plan, sync: ShardSync) -> Sequence[ShardUpdate]:
        """Each owner adds up the rows of all readers, and updates the rows that any of them touches."""
        return list(added_updates(plan, sync))

    def holds(self, plan: Plan, sync: ShardSync) -> Iterator[Hold]:
        """The gathered rows, from the gathering on: the update needs them."""
        for device in sync.readers:
            yield Hold(device, self.gathered_bytes(plan, sync), since=self.name(sync))

    @staticmethod
    def name(sync: ShardSync) -> str:
        """Name of the task that gathers."""
        return sync_name(sync, "gather")

    @staticmethod
    def gathered_bytes(plan: Plan, sync: ShardSync) -> int:
        """The most bytes that all readers send together: rows with their indices."""
        rows = most_rows(plan, sync.parameter, sync.box, sync.uses)
        return sum(rows.values()) * (row_bytes(plan.graph, sync.parameter, sync.box) + INDEX_BYTES)


METHOD = SparseAllGather(named("sparse_all_gather"))
