"""Sums of gradients in place: one buffer per synchronization, which lives for the whole training, and into which hooks move each
contribution at once. The gradient of a shard that one device owns stays where autograd adds it up.

A method whose rows move and sum whole buffers needs no more than these rows. They are begun one after the other: the first one or two as
actions of the backward pass, the others behind it, a row of all buffers before the next row of any, in the same order on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch

from soap.plan.plan import ShardSync
from soap.plan.syncs.seam import How, Phase, Row, method_for, row_name
from soap.runtime.comm.parcels import Parcels, bytes_of, start_exchange
from soap.runtime.comm.redistribute import Pending
from soap.runtime.program.actions import MicroBatch
from soap.runtime.sync.seam import Gradient, RankSync, SyncContext
from soap.runtime.trace import Watch
from soap.simulator.tasks import TaskKind


class BucketedSum(RankSync):
    """Collects gradients, and sums them as the rows say. Only one object may exist for the shards: it hooks into their backward passes.

    ``buffers``: synchronization with several readers -> its shards' gradients, flat, one after the other.
    """

    def __init__(self, context: SyncContext, syncs: Mapping[int, ShardSync]) -> None:
        super().__init__(context, syncs)
        self._tensors = context.shards.tensors
        self._gradients: dict[int, torch.Tensor] = {}
        self.buffers: dict[int, torch.Tensor] = {}
        self._places: dict[int, torch.Tensor] = {}
        self._alone: list[int] = []
        self._fresh: set[int] = set()
        self._under_way: dict[int, tuple[Iterator[Pending], Pending]] = {}
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

    def collect(self, number: int) -> None:
        """Begin the first row of a synchronization."""
        self._go_on(number)

    def synchronize(self, number: int) -> None:
        """Begin the next row, which is the first one if nothing was collected."""
        self._go_on(number)

    def _go_on(self, number: int) -> None:
        """Begin the next row once the one before it is over."""
        rows, before = self._under_way.pop(number, (None, None))
        if rows is None or before is None:
            rows = self._rows(number)
        else:
            before.wait()
        begun = next(rows, None)
        if begun is not None:
            self._under_way[number] = rows, begun

    def _rows(self, number: int) -> Iterator[Pending]:
        """Begin one row after the other, round by round, when asked for the next one; what has come is in the buffer then."""
        sync, buffer = self.syncs[number], self.buffers[number]
        for shard in sync.shards:
            self._fill(shard)
        for row in method_for(sync).template_of(self.plan, sync).rows:
            assert row.phase is Phase.AFTER_BACKWARD and row.how in (How.SUM, How.EXCHANGE), "such rows need a class of their own"
            if row.how is How.SUM:
                sums = self.rank in row.groups[0]
                yield self._watched(number, row, self.start_sum(number, row.groups[0])) if sums else Pending((), buffer)
            if row.how is How.EXCHANGE:
                ((flows, summed),) = row.rounds
                places = {source: [torch.empty_like(buffer) if summed else buffer] for source, target, _ in flows if target == self.rank}
                yield self._move(number, row, [buffer], places)
                for _, (given,) in sorted(places.items()) if summed else ():
                    buffer.add_(given)

    def start_sum(self, number: int, devices: tuple[int, ...]) -> Pending:
        """Begin summing a synchronization's buffer in place."""
        self.comm.traffic.synchronized_bytes += self.buffers[number].nbytes
        return self.comm.all_reduce(self.buffers[number], devices)

    def _move(self, number: int, row: Row, own: list[torch.Tensor], places: Parcels) -> Pending:
        """Begin to send what is this rank's ``own`` as a row of one round says, and to receive others' in ``places``."""
        ((flows, _),) = row.rounds
        parcels = {target: own for source, target, _ in flows if source == self.rank}
        self.comm.traffic.handed_bytes += bytes_of(parcels) + bytes_of(places)
        begun = start_exchange(self.comm, self.syncs[number].readers, parcels, places, self.buffers[number][:0])
        return self._watched(number, row, begun)

    def _watched(self, number: int, row: Row, pending: Pending) -> Pending:
        self.watch(row_name(self.syncs[number], row), TaskKind.SYNC, pending)
        return pending

    def end(self, part: MicroBatch) -> None:
        """Wait for the sums, row by row. After the last micro-batch the gradients are complete."""
        while self._under_way:
            for number in sorted(self._under_way):
                self._go_on(number)
        for shard in tuple(self._fresh):
            self._fill(shard)
        for shard in self._alone:
            gradient = self._tensors[shard].grad
            if gradient is None:
                self._gradients[shard] = torch.zeros_like(self._tensors[shard], requires_grad=False)
            else:  # optimizers read complex numbers as pairs in memory; that fails on numbers that are only marked as conjugated
                self._gradients[shard] = gradient.resolve_conj().resolve_neg()
        if part.last and any(sync.aggregated for sync in self.syncs.values()):
            self.comm.finish_sends()  # whoever updates may change the sums

    @property
    def shards(self) -> Iterable[int]:
        """Every device that takes part owns all shards that it reads."""
        return (*self._places, *self._alone)

    def gradient(self, shard: int) -> Gradient:
        """The sum, which is complete already."""
        return self._gradients[shard]

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
