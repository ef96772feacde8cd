"""Sparse all-gather: readers all own a copy, and give each other the gradients of the rows that they have looked up."""

from __future__ import annotations

from typing import ClassVar

import torch

from soap.runtime.sync.sparse_rows import RowSync


class GatheredRows(RowSync):
    """Each member is its own leader, and an owner. It looks rows up in its copy."""

    gives: ClassVar[str] = "gather"

    def values(self, number: int) -> torch.Tensor:
        """From this rank's copy."""
        (shard,) = self.syncs[number].shards
        start, _ = self.plan.shards[shard].box[0]
        return self.store.tensors[shard].detach().index_select(0, self.rows(number) - start)

    def count_given(self, moved_bytes: int) -> None:
        """Rows that readers give each other."""
        self.comm.traffic.gathered_bytes += moved_bytes


METHOD = GatheredRows
