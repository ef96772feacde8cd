"""Stores with calls of their own for what servers are asked by messages."""

from __future__ import annotations

from torch import Tensor

from soap.elastic import store
from soap.elastic.layout import Lookups
from soap.elastic.messages import Kind, Message
from soap.elastic.snapshots import Gradient, ShardState, Snapshotter
from soap.runtime.sync.row_update import RowGradient


class Store(store.Store):
    def push(self, partition: int, lease: int, gradient: Gradient) -> int:
        """Returns the version."""
        if isinstance(gradient, RowGradient):
            return self._count(Message.of(Kind.PUSH_ROWS, partition, gradient, lease=lease))
        return self._count(Message.of(Kind.PUSH, partition, [gradient], lease=lease))

    def push_outputs(self, partition: int, lease: int, lookups: Lookups, grad_out: Tensor) -> int:
        """The gradient of the sums that these look-ups gave."""
        return self._count(Message.of(Kind.PUSH_OUTPUTS, partition, (grad_out, *lookups.tensors()), lease=lease))

    def state(self) -> tuple[ShardState, ...]:
        """A copy of all partitions, each by itself at one version."""
        found = []
        for own in self._shards:
            with own.shard.lock:
                found.append(own.shard.state())
        return tuple(found)

    def save(self) -> None:
        """Take a snapshot of all partitions that have changed, and wait for it."""
        self._snapshotter.ask(*range(len(self._shards)))
        settle(self._snapshotter)


def settle(snapshotter: Snapshotter) -> None:
    """Wait until all that was asked for is written, or was found not to be possible."""
    with snapshotter._wake:
        snapshotter._wake.wait_for(lambda: not (snapshotter._asked or snapshotter._busy) or snapshotter._closing)
