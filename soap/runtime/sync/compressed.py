"""Compressed gradients on a rank: the local gradient is collected as for an all-reduce; what travels is what the compressor makes of it.

A shard's selection runs as soon as its gradient is complete, and its first exchange starts. All that comes later (answers, sums) waits for
the end of the backward pass. There all shards go on in one order, which is the same on all ranks: each sends its second message before the
first one waits for its own.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from itertools import cycle
from typing import ClassVar

import torch

from soap.plan.compression.seam import ExchangeKind
from soap.plan.plan import ShardSync, sync_name
from soap.plan.syncs.compressed import EXCHANGES
from soap.runtime.comm.redistribute import Pending
from soap.runtime.compression.peer import Course, Peer
from soap.runtime.compression.seam import State
from soap.runtime.compression.together import in_order
from soap.runtime.step.micro_batch import MicroBatch
from soap.runtime.sync.all_reduce import BucketedSum
from soap.runtime.sync.seam import Gradient, SyncContext
from soap.runtime.trace import Watch
from soap.simulator.tasks import TaskKind

Exchanges = Generator[tuple[ExchangeKind, torch.Tensor, str], torch.Tensor, torch.Tensor]
"""A course whose exchanges are all-gathers and all-to-alls, with the names of the simulator's tasks."""


class CompressedSum(BucketedSum):
    """Each shard has a buffer of its own, with the rank's local gradient. ``peers``: shard -> this rank's part and state. ``local``: if it
    is a dict, each step leaves a copy of the local gradients there, for a check."""

    collective: ClassVar[bool] = False

    def __init__(self, context: SyncContext, syncs: Mapping[int, ShardSync]) -> None:
        super().__init__(context, syncs)
        self.peers: dict[int, Peer] = {}
        self.local: dict[int, torch.Tensor] | None = None
        self._courses: dict[int, tuple[Exchanges, Pending]] = {}
        self._totals: dict[int, torch.Tensor] = {}
        for sync in syncs.values():
            [shard] = sync.shards
            tensor, place = context.shards.tensors[shard], sync.readers.index(self.rank)
            assert sync.compression is not None  # the method compresses
            self.peers[shard] = Peer(
                sync.compression, tensor.shape, tensor.dtype, place, len(sync.readers), context.compressing, tensor.device
            )

    def begin(self, part: MicroBatch, watch: Watch) -> None:
        """Forget the last step's sums."""
        super().begin(part, watch)
        if part.first:
            self._totals = {}

    def synchronize(self, number: int) -> None:
        """Select what is sent of a shard, and begin to send it."""
        [shard] = self.syncs[number].shards
        self._fill(shard)
        gradient = self.buffers[number].view(self.store.tensors[shard].shape)
        if self.local is not None:
            self.local[shard] = gradient.clone()
        self._go_on(number, self._apart(number, self.peers[shard].course(gradient)), None)

    def end(self, part: MicroBatch) -> None:
        """After the last micro-batch: exchange what is left, and restore the sums."""
        while self._courses:
            for number in sorted(self._courses):
                course, pending = self._courses.pop(number)
                self._go_on(number, course, pending.wait())
        super().end(part)

    def _go_on(self, number: int, course: Exchanges, received: torch.Tensor | None) -> None:
        """Take a course to its next exchange, and begin that, or to its end."""
        try:
            kind, message, name = next(course) if received is None else course.send(received)
        except StopIteration as end:
            self._totals[self.syncs[number].shards[0]] = end.value
            return
        message, devices = message.detach().contiguous(), self.syncs[number].readers
        pending = (self.comm.all_gather if kind == "all_gather" else self.comm.rows_to_all)(message, devices)
        self.watch(name, TaskKind.SYNC, pending)
        self._courses[number] = course, pending

    def _apart(self, number: int, course: Course) -> Exchanges:
        """The same course with two exchanges for each sum: every rank adds up a part, in the order of the ranks, and gives it to all."""
        sync, traffic = self.syncs[number], self.comm.traffic
        count, received = len(sync.readers), None
        for _, verb in cycle(EXCHANGES):
            try:
                kind, message = next(course) if received is None else course.send(received)
            except StopIteration as end:
                total: torch.Tensor = end.value
                return total
            name = sync_name(sync, verb)
            if kind != "sum":
                traffic.compressed_bytes += 2 * (count - 1) * (message if kind == "all_gather" else message[0]).nbytes
                received = yield kind, message, name
                continue
            traffic.synchronized_bytes += message.nbytes
            size, part = message.numel(), -(-message.numel() // count)
            parts = yield "all_to_all", torch.nn.functional.pad(message, (0, count * part - size)).view(count, part), name
            received = (yield "all_gather", in_order(parts.unbind()), name).reshape(-1)[:size]
        raise AssertionError  # ``cycle`` has no end

    @property
    def shards(self) -> Iterable[int]:
        """Every reader owns the whole shard."""
        return self.peers

    def gradient(self, shard: int) -> Gradient:
        """What all ranks have sent, added up in their order."""
        return self._totals[shard]

    def gradients(self, shards: Sequence[int]) -> Mapping[int, Gradient]:
        """The sums, which are complete already."""
        return {shard: self._totals[shard] for shard in shards}

    @property
    def states(self) -> Mapping[int, State]:
        """Shard -> what this rank keeps of it."""
        return {shard: peer.state for shard, peer in self.peers.items()}


METHOD = CompressedSum
