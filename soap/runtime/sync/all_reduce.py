"""All-reduces of gradients: one buffer per synchronization, which lives for the whole training, and into which hooks move each contribution
at once. The gradient of a shard that one device owns stays where autograd adds it up."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar

import torch

from soap.plan.plan import ShardSync
from soap.runtime.comm.redistribute import Pending
from soap.runtime.program.actions import ActionKind, MicroBatch
from soap.runtime.sync.seam import Gradient, RankSync, SyncContext
from soap.runtime.trace import Watch


class BucketedSum(RankSync):
    """Collects and sums the gradients of all-reduced shards. Only one object may exist for the shards: it hooks into their backward passes.

    ``buffers``: synchronization with several readers -> its shards' gradients, flat, one after the other.
    """

    collective: ClassVar[bool] = True

    def __init__(self, context: SyncContext, syncs: Mapping[int, ShardSync]) -> None:
        super().__init__(context, syncs)
        self._tensors = context.shards.tensors
        self._gradients: dict[int, torch.Tensor] = {}
        self.buffers: dict[int, torch.Tensor] = {}
        self._places: dict[int, torch.Tensor] = {}
        self._alone: list[int] = []
        self._fresh: set[int] = set()
        self._pending: list[Pending] = []
        for number, sync in syncs.items():
            if len(sync.readers) == 1:  # nothing is summed: autograd's own tensors will do
                self._alone.extend(sync.shards)
            else:
                self._make_buffer(number, sync)

    def _make_buffer(self, number: int, sync: ShardSync) -> None:
        shards = [self._tensors[i] for i in sync.shards]
        buffer = torch.zeros(sum(shard.numel() for shard in shards), dtype=shards[0].dtype, device=shards[0].device)
        self.buffers[number] = buffer
        first = 0
        for i, shard in zip(sync.shards, shards, strict=True):
            self._places[i] = self._gradients[i] = buffer[first : first + shard.numel()].view(shard.shape)
            first += shard.numel()
            self.take_gradients(self._tensors[i], number, BucketedSum._collect, i)

    def begin(self, part: MicroBatch, watch: Watch) -> None:
        """Drop ``.grad`` before the first micro-batch: the last update has used it, but did not clear it."""
        super().begin(part, watch)
        if part.first:
            self._fresh = set(self._places)
            for shard in self._places:
                self._tensors[shard].grad = None
            for shard in self._alone:
                self._tensors[shard].grad = None
                self._gradients.pop(shard, None)

    def own_gradients(self) -> Iterable[torch.Tensor]:
        """This rank's own gradients, complete before they are synchronized; a change in place is what is sent."""
        for shard in tuple(self._fresh):
            self._fill(shard)
        return self.buffers.values()

    def synchronize(self, number: int) -> None:
        """Begin summing a buffer over its devices."""
        for shard in self.syncs[number].shards:
            self._fill(shard)
        self._pending.append(self.named(ActionKind.SYNC, number, self.start_sum(number, self.buffers[number])))

    def start_sum(self, number: int, buffer: torch.Tensor) -> Pending:
        """Begin summing a buffer of this synchronization in place."""
        self.comm.traffic.synchronized_bytes += buffer.nbytes
        return self.comm.all_reduce(buffer, self.syncs[number].readers)

    def end(self, part: MicroBatch) -> None:
        """Wait for the sums. After the last micro-batch the gradients are complete."""
        for pending in self._pending:
            pending.wait()
        self._pending.clear()
        for shard in tuple(self._fresh):
            self._fill(shard)
        for shard in self._alone:
            gradient = self._tensors[shard].grad
            if gradient is None:
                self._gradients[shard] = torch.zeros_like(self._tensors[shard], requires_grad=False)
            else:  # optimizers read complex numbers as pairs in memory; that fails on numbers that are only marked as conjugated
                self._gradients[shard] = gradient.resolve_conj().resolve_neg()

    @property
    def shards(self) -> Iterable[int]:
        """Every device that takes part owns all shards that it reads."""
        return (*self._places, *self._alone)

    def gradient(self, shard: int) -> Gradient:
        """The sum, which is complete already."""
        return self._gradients[shard]

    def gradients(self, shards: Sequence[int]) -> Mapping[int, Gradient]:
        """The sums, which are complete already: no threads are needed."""
        return {shard: self._gradients[shard] for shard in shards}

    def _collect(self, shard: int, gradient: torch.Tensor) -> None:
        """Add a segment's gradient of a shard to the buffer."""
        if shard in self._fresh:
            self._fresh.discard(shard)
            self._places[shard].copy_(gradient)
        else:
            self._places[shard].add_(gradient)

    def _fill(self, shard: int) -> None:
        """Zero the place of a shard that got no gradient on this rank."""
        if shard in self._fresh:
            self._fresh.discard(shard)
            self._places[shard].zero_()


METHOD = BucketedSum
