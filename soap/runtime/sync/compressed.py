"""Compressed gradients on a rank: the local gradient is collected as for an all-reduce; what travels is what the compressor makes of it.

A bucket's first messages leave as soon as its gradients are complete; all that comes later waits for the end of the backward pass, where
buckets go on in one order on all ranks. With local aggregation only peers do that (``ShardSync.peers``), for the sums of their hosts.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from itertools import cycle

import torch

from soap.plan.compression.seam import ExchangeKind
from soap.plan.plan import ShardSync, sync_name
from soap.plan.syncs.compressed import EXCHANGES
from soap.plan.syncs.seam import Row, method_for
from soap.runtime.comm.parcels import Parcels
from soap.runtime.comm.redistribute import Pending
from soap.runtime.compression.peer import CompressedTraining, Joint, Peer, in_order, joined
from soap.runtime.compression.seam import State, kept_dtype
from soap.runtime.program.actions import MicroBatch
from soap.runtime.sync.seam import Gradient, SyncContext
from soap.runtime.sync.sums import BucketedSum
from soap.runtime.trace import Watch
from soap.simulator.tasks import TaskKind

Exchanges = Generator[tuple[ExchangeKind, torch.Tensor, str, Sequence[int]], torch.Tensor, list[torch.Tensor]]
"""A bucket's course whose exchanges are all-gathers and all-to-alls, with the names of the simulator's tasks, and the sizes of ragged
messages. Returns the sum of each shard."""


class CompressedSum(BucketedSum):
    """Buffers have the rank's local gradients. ``peers``: shard -> this rank's part and state, if it is a peer. ``local``: if it is a dict,
    each step leaves a copy of the local gradients there, for a check."""

    def __init__(self, context: SyncContext, syncs: Mapping[int, ShardSync]) -> None:
        super().__init__(context, syncs)
        self.peers: dict[int, Peer] = {}
        self.local: dict[int, torch.Tensor] | None = None
        self._courses: dict[int, tuple[Exchanges, Pending]] = {}
        self._totals: dict[int, torch.Tensor] = {}
        self._inside: dict[int, tuple[Row, Row]] = {}
        self._collecting: dict[int, tuple[Pending, Parcels]] = {}
        self._of_host: dict[int, list[torch.Tensor]] = {}
        for number, sync in syncs.items():
            if sync.aggregated:
                collect, *_, hand_on = method_for(sync).template_of(self.plan, sync).rows
                self._inside[number] = collect, hand_on
        for sync in syncs.values():
            for shard in sync.shards if self.rank in sync.peers else ():
                tensor = context.shards.tensors[shard]
                self.peers[shard] = peer_of(sync, self.rank, tensor.shape, tensor.dtype, context.compressing, tensor.device)

    def begin(self, part: MicroBatch, watch: Watch) -> None:
        """Forget the last step's sums."""
        super().begin(part, watch)
        if part.first:
            self._totals = {}

    def collect(self, number: int) -> None:
        """Send this rank's gradients to its host's peer; as the peer, begin to receive the others'."""
        self._complete(number)
        buffer, (collect, _) = self.buffers[number], self._inside[number]
        places = {member: [torch.empty_like(buffer)] for member, peer, _ in collect.rounds[0][0] if peer == self.rank}
        self._collecting[number] = self._move(number, collect, [buffer], places), places

    def synchronize(self, number: int) -> None:
        """Select what is sent of a bucket's shards, and begin to send it."""
        if number not in self._inside:
            self._complete(number)
            self._select(number, [self._places[shard] for shard in self.syncs[number].shards])
        elif self.rank in self.syncs[number].peers:
            self._select(number, self._sums_of_host(number))
            del self._of_host[number]

    def end(self, part: MicroBatch) -> None:
        """After the last micro-batch: exchange what is left, restore the sums, and give them to other readers of the host."""
        while self._courses:
            for number in sorted(self._courses):
                course, pending = self._courses.pop(number)
                self._advance(number, course, pending.wait())
        if part.last:
            self._hand_on()
        super().end(part)

    def _select(self, number: int, gradients: Sequence[torch.Tensor]) -> None:
        courses = [self.peers[shard].course(own) for shard, own in zip(self.syncs[number].shards, gradients, strict=True)]
        self._advance(number, self._apart(number, joined(courses)), None)

    def _complete(self, number: int) -> None:
        """Complete this rank's gradients in a buffer."""
        for shard in self.syncs[number].shards:
            self._fill(shard)
            if self.local is not None:
                self.local[shard] = self._places[shard].clone()

    def own_gradients(self) -> Iterable[torch.Tensor]:
        """Shard by shard, so that their norm has the same bits in whichever buckets they travel."""
        super().own_gradients()
        return [self._places[shard] for shard in sorted(self._places)]

    def hosts_gradients(self) -> list[torch.Tensor]:
        """As a peer: the sums of the host's gradients, once they are collected. A change in place is what is compressed."""
        numbers = [number for number in self._inside if self.rank in self.syncs[number].peers]
        sums = [pair for number in numbers for pair in zip(self.syncs[number].shards, self._sums_of_host(number), strict=True)]
        return [own for _, own in sorted(sums, key=lambda pair: pair[0])]

    def _sums_of_host(self, number: int) -> list[torch.Tensor]:
        """For each shard of a bucket the sum of the gradients of this rank's host, in the order of the readers."""
        if number not in self._of_host:
            pending, places = self._collecting.pop(number)
            pending.wait()
            total = hosts_sum([given for _, (given,) in sorted({self.rank: [self.buffers[number]], **places}.items())])
            shapes = [self.store.tensors[shard].shape for shard in self.syncs[number].shards]
            parts = torch.split(total, [shape.numel() for shape in shapes])
            self._of_host[number] = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
        return self._of_host[number]

    def _hand_on(self) -> None:
        """As a peer, give the host's other readers the sums; as another reader, get them."""
        arriving = []
        for number, (_, hand_on) in self._inside.items():
            sync, places = self.syncs[number], Parcels()
            if self.rank not in sync.peers:
                self._totals |= {shard: torch.empty_like(self.store.tensors[shard], requires_grad=False) for shard in sync.shards}
                places[sync.leaders[sync.readers.index(self.rank)]] = [self._totals[shard] for shard in sync.shards]
            arriving.append(self._move(number, hand_on, [self._totals[shard] for shard in sync.shards], places))
        for pending in arriving:
            pending.wait()
        self._collecting.clear()

    def _advance(self, number: int, course: Exchanges, received: torch.Tensor | None) -> None:
        """Take a course to its next exchange, and begin that, or to its end."""
        try:
            kind, message, name, sizes = next(course) if received is None else course.send(received)
        except StopIteration as end:
            for shard, total in zip(self.syncs[number].shards, end.value, strict=True):
                self._totals[shard] = total.to(self.store.tensors[shard].dtype)
            return
        message, devices = message.detach().contiguous(), self.syncs[number].peers
        if kind == "ragged":
            pending = self.comm.gather_ragged(message, sizes, devices)
        else:
            pending = (self.comm.all_gather if kind == "all_gather" else self.comm.rows_to_all)(message, devices)
        self.watch(name, TaskKind.SYNC, pending)
        self._courses[number] = course, pending

    def _apart(self, number: int, course: Joint) -> Exchanges:
        """The same course with two exchanges for each sum: every rank adds up a part, in the order of the ranks, and gives it to all."""
        sync, traffic = self.syncs[number], self.comm.traffic
        count, received = len(sync.peers), None
        for _, verb in cycle(EXCHANGES):
            try:
                kind, message, sizes = next(course) if received is None else course.send(received)
            except StopIteration as end:
                totals: list[torch.Tensor] = end.value
                return totals
            name = sync_name(sync, verb)
            if kind == "ragged":
                traffic.compressed_bytes += sum(sizes) + (count - 2) * message.nbytes
                received = yield kind, message, name, sizes
                continue
            if kind != "sum":
                traffic.compressed_bytes += 2 * (count - 1) * (message if kind == "all_gather" else message[0]).nbytes
                received = yield kind, message, name, ()
                continue
            traffic.synchronized_bytes += message.nbytes
            size, part = message.numel(), -(-message.numel() // count)
            parts = yield "all_to_all", torch.nn.functional.pad(message, (0, count * part - size)).view(count, part), name, ()
            received = (yield "all_gather", in_order(parts.unbind()), name, ()).reshape(-1)[:size]
        raise AssertionError  # ``cycle`` has no end

    def gradient(self, shard: int) -> Gradient:
        """What all ranks have sent, added up in their order."""
        return self._totals[shard]

    @property
    def states(self) -> Mapping[int, State]:
        """Shard -> what this rank keeps of it."""
        return {shard: self.peers[shard].state for shard in sorted(self.peers)}


def peer_of(
    sync: ShardSync,
    rank: int,
    shape: Sequence[int],
    dtype: torch.dtype,
    training: CompressedTraining,
    device: torch.device | str = "cpu",
) -> Peer:
    """The part of one of ``sync.peers``. With local aggregation it gets its host's gradient as ``hosts_sum`` makes it."""
    assert sync.compression is not None  # the method compresses
    summed = kept_dtype(dtype) if sync.aggregated else dtype
    return Peer(sync.compression, shape, summed, sync.peers.index(rank), len(sync.peers), training, device)


def hosts_sum(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of gradients of one host, in this order, at least in float32."""
    return in_order([gradient.to(kept_dtype(gradient.dtype)) for gradient in gradients])


METHOD = CompressedSum
