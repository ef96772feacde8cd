"""Parameter servers of sparse parameters: readers pull the rows that a step looks up, and push gradients of these rows alone.

Kim et al., "Parallax: Sparsity-aware Data Parallel Training of Deep Neural Networks", EuroSys 2019.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from soap.model.regions import Box
from soap.plan.memory_kinds import MemoryKind
from soap.plan.plan import Plan, ShardSync, sync_name
from soap.plan.row_counts import most_rows, row_bytes
from soap.plan.syncs.amounts import COPIES, INDEX_BYTES
from soap.plan.syncs.parameter_server import ParameterServer
from soap.plan.syncs.seam import Hold, Phase
from soap.strategy.config import SyncConfig
from soap.strategy.sync_contracts import named


class RowServer(ParameterServer):
    """Servers hold the only copy; readers get rows for one step."""

    pull_phase = Phase.BEFORE_FORWARD

    def serves_region(self, readers: Sequence[int], peers: Collection[int], sync: SyncConfig) -> bool:
        """Every region, even with one reader: that saves the reader the memory for the table."""
        return True

    def copies(self, plan: Plan, sync: ShardSync) -> Mapping[int, int]:
        """The rows that each reader looks up, as if no look-up repeated a row."""
        size = row_bytes(plan.graph, sync.parameter, sync.box)
        return {device: rows * size for device, rows in most_rows(plan, sync.parameter, sync.box, sync.uses).items()}

    def holds(self, plan: Plan, sync: ShardSync) -> Iterator[Hold]:
        """Readers hold the rows and their gradients from the pull to the push; servers hold what they receive."""
        for device, size in self.copies(plan, sync).items():
            for kind in (MemoryKind.VALUES, MemoryKind.GRADIENTS):
                yield Hold(device, size, since=sync_name(sync, "pull"), until=sync_name(sync, "push"), with_uses=True, kind=kind)
        yield from self.server_holds(plan, sync)

    def received_bytes(self, plan: Plan, sync: ShardSync, box: Box, given: Sequence[int]) -> int:
        """Gradients received, rows to be sent, and the indices of both."""
        return COPIES * sum(given) + 2 * INDEX_BYTES * sum(most_rows(plan, sync.parameter, box, sync.uses).values())


METHOD = RowServer(named("row_server"))
