"""Sparse all-gather: every reader owns a copy of the table and sends all others the gradients of the rows that it has looked up."""

from __future__ import annotations

import torch

from soap.runtime.sync.sparse_rows import RowSync


class GatheredRows(RowSync):
    """Each member is its own leader and an owner. It looks rows up in its own copy."""

    def values(self, number: int) -> torch.Tensor:
        """The rows that this rank looks up, from its own copy."""
        (shard,) = self.syncs[number].shards
        start, _ = self.plan.shards[shard].box[0]
        return self.store.tensors[shard].detach().index_select(0, self.rows(number) - start)

    def count_given(self, moved_bytes: int) -> None:
        """Count the row gradients as gathered."""
        self.comm.traffic.gathered_bytes += moved_bytes


METHOD = GatheredRows
