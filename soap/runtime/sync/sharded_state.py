"""Sharded optimizer states: gradients are reduce-scattered to the readers that own parts, updated values are all-gathered from them.

A rank collects its gradients of a synchronization in one buffer, ordered by owner, so that each owner's part is sent as it lies there. The
buffer exists from the first gradient of a step until it has left. Owners add up what they get in the order of the readers, so that equal
runs give equal bits. Both exchanges are messages between all pairs: gloo's own reduce-scatter moves twice the bytes. Between accelerators
both are collectives of equal parts (``plan.syncs.even_parts``), which add up on the way: the buffer then has room for as much of each
owner as of the one that owns most.

If each host has a copy in parts, both stay inside hosts, and the holders of the same parts all-reduce their sums in between: ``collect``
scatters, ``synchronize`` sums.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import ClassVar

import torch

from soap.model.regions import lengths, volume
from soap.plan.plan import Plan, ReadRegion, ShardSync, sync_name
from soap.plan.syncs.even_parts import is_even
from soap.plan.syncs.sharded_state import sum_name
from soap.plan.syncs.sharing import copies_of, holders
from soap.runtime.comm.even_parts import all_gather_parts, reduce_scatter_parts
from soap.runtime.comm.packing import land, pack
from soap.runtime.comm.redistribute import Pending, cut
from soap.runtime.program.actions import ActionKind
from soap.runtime.step.micro_batch import MicroBatch
from soap.runtime.sync.roles import pieces_read
from soap.runtime.sync.seam import Gradient, RankSync, SyncContext
from soap.runtime.trace import Watch
from soap.simulator.memory.transit import SENT_BYTES, SENT_TENSORS
from soap.simulator.tasks import TaskKind


@dataclass(slots=True)
class Exchanged:
    """An exchange of synchronization ``number`` that is under way. ``buffer``: what is received. ``taken``: by reader, its part of the
    buffer. ``own``: this rank's own part, which is not in the buffer. ``sent``: what is sent.

    Of a collective, ``buffer`` is what it reads or fills, ``own`` what a reduce-scatter leaves; nothing is ``taken`` or ``sent`` apart."""

    number: int
    pending: Pending
    buffer: torch.Tensor
    taken: Sequence[slice]
    own: torch.Tensor
    sent: torch.Tensor


class Layout:
    """Where the parts of a synchronization lie in a rank's buffer: one owner after the other, each owner's in the order of the shards.

    ``readers``: those of this rank's copy. ``holders``: the devices that own the same parts as this rank, itself included; this rank alone
    if there is one copy. ``owned``: reader -> its shards. ``places``: shard -> its elements in the buffer. ``spans``: reader -> the
    elements that it owns. ``room``: elements of each reader's place in the buffer, if all have as many; else 0.
    """

    def __init__(self, plan: Plan, sync: ShardSync, rank: int) -> None:
        self.readers = next(group for group in copies_of(sync) if rank in group)
        self.holders = next((group for group in holders(sync) if rank in group), (rank,))
        self.owned: dict[int, list[int]] = {reader: [] for reader in self.readers}
        for shard in sync.shards:
            (owner,) = {*plan.shards[shard].devices} & self.owned.keys()
            self.owned[owner].append(shard)
        sizes = {reader: [volume(plan.shards[shard].box) for shard in own] for reader, own in self.owned.items()}
        most = max(map(sum, sizes.values()))
        self.room = most if is_even(plan, sync) else 0
        self.spans, self.places, self.size = dict[int, slice](), dict[int, slice](), 0
        for reader, own in self.owned.items():
            for shard, part in zip(own, in_a_row(sizes[reader], self.size), strict=True):
                self.places[shard] = part
            self.spans[reader] = slice(self.size, self.size + sum(sizes[reader]))
            self.size += self.room or sum(sizes[reader])

    def sent_to(self, rank: int) -> list[slice]:
        """What ``rank`` sends of its buffer, by reader."""
        return [slice(0, 0) if reader == rank else span for reader, span in self.spans.items()]

    def of_others(self, rank: int) -> list[int]:
        """The shards that others own, one owner after the other."""
        return [shard for reader, own in self.owned.items() if reader != rank for shard in own]


def in_a_row(sizes: Sequence[int], first: int = 0) -> list[slice]:
    """Slices of these sizes, one after the other."""
    return [slice(a, b) for a, b in pairwise(accumulate(sizes, initial=first))]


class ShardedState(RankSync):
    """A rank's part as reader and as owner. A reader's copy of a region is a leaf of the ``ShardStore``; the parts that it owns are views
    of it."""

    gives: ClassVar[str] = "scatter"
    brings: ClassVar[str] = "gather"

    def __init__(self, context: SyncContext, syncs: Mapping[int, ShardSync]) -> None:
        super().__init__(context, syncs)
        read = pieces_read(self.plan)
        self._layouts = {number: Layout(self.plan, sync, self.rank) for number, sync in syncs.items()}
        self._leaves = {number: [self.store.leaves[piece] for piece in read[number]] for number in syncs}
        trained = {number for number, sync in syncs.items() if not self.plan.is_frozen(sync)}
        self._owned = {shard: number for number in trained for shard in self._layouts[number].owned[self.rank]}
        self._buffers: dict[int, torch.Tensor] = {}
        self._filled: dict[int, set[int]] = {number: set() for number in syncs}
        self._scattering: deque[Exchanged] = deque()
        self._gathering: deque[Exchanged] = deque()
        self._summing: list[Pending] = []
        self._totals: dict[int, torch.Tensor] = {}
        for number in trained:
            for place, leaf in enumerate(self._leaves[number]):
                self.take_gradients(leaf, number, ShardedState._collect, number, place)

    @classmethod
    def groups(cls, sync: ShardSync) -> Iterable[tuple[int, ...]]:
        """The readers of each copy, and the holders of each part."""
        return (*copies_of(sync), *holders(sync))

    @classmethod
    def after_update(cls, sync: ShardSync) -> tuple[ActionKind, ...]:
        """Readers get the values of the others' parts."""
        return (ActionKind.BRING,)

    @classmethod
    def task_name(cls, sync: ShardSync, kind: ActionKind) -> str:
        """Sums among holders have names of their own."""
        if kind is ActionKind.COLLECT:
            return sync_name(sync, cls.gives)
        return sync_name(sync, "sum") if kind is ActionKind.SYNC and sync.aggregated else super().task_name(sync, kind)

    @property
    def shards(self) -> Iterable[int]:
        """The parts that this rank owns and updates."""
        return self._owned

    def begin(self, part: MicroBatch, watch: Watch) -> None:
        """Drop the last step's gradients before the first micro-batch; the optimizer has left its own on what it has updated."""
        super().begin(part, watch)
        if part.first:
            self._totals.clear()
            self._buffers.clear()
            for filled in self._filled.values():
                filled.clear()
            for tensor in (*(self.store.tensors[shard] for shard in self._owned), *(leaf for own in self._leaves.values() for leaf in own)):
                tensor.grad = None

    def synchronize(self, number: int) -> None:
        """Send each owner its part of this rank's gradients; or, if there are several copies, begin to sum what has come for this rank's
        own part over its holders."""
        sync, layout = self.syncs[number], self._layouts[number]
        if not sync.aggregated:
            self._scatter(number, ActionKind.SYNC)
            return
        while number not in self._totals:
            self._add_up(self._scattering.popleft())
        total = self._totals[number]
        if total.numel():
            pending = self.comm.all_reduce(total, layout.holders)
            self.comm.traffic.synchronized_bytes += total.nbytes
            self.watch(sum_name(sync, layout.holders), TaskKind.SYNC, pending)
            self._summing.append(pending)

    def collect(self, number: int) -> None:
        """Send each owner of this rank's copy its part of this rank's gradients."""
        self._scatter(number, ActionKind.COLLECT)

    def _scatter(self, number: int, kind: ActionKind) -> None:
        """Send the owners their parts, and begin to receive the others' gradients of this rank's own part."""
        layout, sync = self._layouts[number], self.syncs[number]
        for place in range(len(sync.regions)):
            self._fill(number, place)
        buffer = self._buffers.pop(number)
        if layout.room:
            own, moved = buffer.new_empty(layout.room), 2 * (buffer.nbytes - buffer.nbytes // len(layout.readers))
            pending = reduce_scatter_parts(self.comm, buffer, own, layout.readers)
            self._under_way(number, kind, Exchanged(number, pending, buffer, (), own, buffer[:0]), moved)
            return
        own = buffer[layout.spans[self.rank]].clone()
        taken = in_a_row([0 if reader == self.rank else own.numel() for reader in layout.readers])
        received = buffer.new_empty((len(layout.readers) - 1) * own.numel())
        pending = self.comm.slices_to_all(buffer, layout.sent_to(self.rank), received, taken, layout.readers)
        moved = buffer.nbytes - own.nbytes + received.nbytes
        self._under_way(number, kind, Exchanged(number, pending, received, taken, own, buffer), moved)

    def _under_way(self, number: int, kind: ActionKind, scattered: Exchanged, moved_bytes: int) -> None:
        """Note a scatter that has begun; add up the oldest where too much is under way."""
        self.comm.traffic.pushed_bytes += moved_bytes
        self.named(kind, number, scattered.pending)
        self._scattering.append(scattered)
        while self._too_much():
            self._add_up(self._scattering.popleft())

    def end(self, part: MicroBatch) -> None:
        """Wait for all gradients. After the last micro-batch they are complete."""
        while self._scattering:
            self._add_up(self._scattering.popleft())
        while self._summing:
            self._summing.pop().wait()

    def gradient(self, shard: int) -> Gradient:
        """The sum over all readers, which is complete already."""
        number = self._owned[shard]
        layout = self._layouts[number]
        place, first = layout.places[shard], layout.spans[self.rank].start
        return self._totals[number][place.start - first : place.stop - first].view(lengths(self.plan.shards[shard].box))

    def gradients(self, shards: Sequence[int]) -> Mapping[int, Gradient]:
        """The sums, which are complete already: no threads are needed."""
        return {shard: self.gradient(shard) for shard in shards}

    def bring(self, number: int) -> None:
        """Send this rank's values to all other readers, and begin to receive theirs."""
        shards = self._layouts[number].of_others(self.rank)
        if self._layouts[number].room:
            coming = self._gather_values(number, ActionKind.BRING)
            finish: Callable[[], None] | None = partial(self._put, number, coming.buffer, shards)
        else:
            received, finish = self._landing(number, shards)
            coming = self._send_values(number, ActionKind.BRING, received)
        if finish is not None:
            coming.pending.then(finish)
        self._gathering.append(coming)
        while _too_much(self._gathering):
            self._gathering.popleft().pending.wait()

    def _send_values(self, number: int, kind: ActionKind, received: torch.Tensor) -> Exchanged:
        """Send this rank's values to all other readers of its copy, and begin to receive theirs, one owner after the other."""
        layout, readers = self._layouts[number], self._layouts[number].readers
        values = [self.store.tensors[shard] for shard in layout.owned[self.rank]]
        own = pack(values) if values else received.new_empty(0)
        given = [slice(0, 0 if reader == self.rank else own.numel()) for reader in readers]
        taken = in_a_row([0 if reader == self.rank else span.stop - span.start for reader, span in layout.spans.items()])
        pending = self.named(kind, number, self.comm.slices_to_all(own, given, received, taken, readers))
        self.comm.traffic.pulled_bytes += (len(readers) - 1) * own.nbytes + received.nbytes
        return Exchanged(number, pending, received, taken, own, own)

    def _gather_values(self, number: int, kind: ActionKind) -> Exchanged:
        """Begin to gather all values of this rank's copy, in a buffer with equal places for all owners."""
        layout = self._layouts[number]
        buffer = self._leaves[number][0].detach().new_empty(layout.size)
        for shard in layout.owned[self.rank]:
            buffer[layout.places[shard]].copy_(self.store.tensors[shard].detach().reshape(-1))
        pending = self.named(kind, number, all_gather_parts(self.comm, buffer, layout.readers))
        self.comm.traffic.pulled_bytes += 2 * (buffer.nbytes - buffer.nbytes // len(layout.readers))
        return Exchanged(number, pending, buffer, (), buffer, buffer[:0])

    def _put(self, number: int, buffer: torch.Tensor, shards: Sequence[int]) -> None:
        """Copy the values of these shards out of a buffer to their places in this rank's copies."""
        layout, places = self._layouts[number], self._places(number)
        for shard in shards:
            places[shard].copy_(buffer[layout.places[shard]].view(places[shard].shape))

    def arrived(self) -> None:
        """Wait for all values."""
        while self._gathering:
            self._gathering.popleft().pending.wait()

    def _landing(self, number: int, shards: Sequence[int]) -> tuple[torch.Tensor, Callable[[], None] | None]:
        """Where the values of these shards are received, and what then copies them to their places in this rank's copies."""
        if not shards:
            return self._leaves[number][0].detach().new_empty(0), None
        places = self._places(number)
        return land([places[shard] for shard in shards])

    def _places(self, number: int) -> Mapping[int, torch.Tensor]:
        """Shard -> its place in this rank's copies."""
        places = {}
        for region, leaf in zip(self.syncs[number].regions, self._leaves[number], strict=True):
            places.update({shard: cut(leaf.detach(), region.box, self.plan.shards[shard].box) for shard in region.shards})
        return places

    def _too_much(self) -> bool:
        """Whether more gradients are under way than may be at a time."""
        return _too_much(self._scattering)

    def _add_up(self, scattered: Exchanged) -> None:
        """Wait for the others' gradients of this rank's parts, and add up all of them in the order of the readers, unless that is done."""
        scattered.pending.wait()
        if not scattered.taken:
            span = self._layouts[scattered.number].spans[self.rank]
            self._totals[scattered.number] = scattered.own[: span.stop - span.start]
            return
        readers, total = self._layouts[scattered.number].readers, scattered.own
        parts = [total if r == self.rank else scattered.buffer[own] for r, own in zip(readers, scattered.taken, strict=True)]
        for part in parts[1:]:
            parts[0].add_(part)
        if parts[0] is not total:
            total.copy_(parts[0])
        self._totals[scattered.number] = total

    def _collect(self, number: int, place: int, gradient: torch.Tensor) -> None:
        """Add a segment's gradient of a region to the buffer, part by part."""
        region, filled = self.syncs[number].regions[place], self._filled[number]
        given = [cut(gradient, region.box, self.plan.shards[shard].box) for shard in region.shards]
        if place in filled:
            torch._foreach_add_(self._parts(number, region), given)
        else:
            torch._foreach_copy_(self._parts(number, region), given)
        filled.add(place)

    def _fill(self, number: int, place: int) -> None:
        """Zero a region's parts of the buffer if it got no gradient on this rank."""
        if place not in self._filled[number]:
            torch._foreach_zero_(self._parts(number, self.syncs[number].regions[place]))
            self._filled[number].add(place)

    def _parts(self, number: int, region: ReadRegion) -> list[torch.Tensor]:
        """A region's parts of the buffer, which is made if there is none yet."""
        layout, buffer = self._layouts[number], self._buffers.get(number)
        if buffer is None:
            buffer = self._buffers[number] = self._leaves[number][0].detach().new_empty(layout.size)
        return [buffer[layout.places[shard]].view(lengths(self.plan.shards[shard].box)) for shard in region.shards]


def _too_much(under_way: Sequence[Exchanged]) -> bool:
    """Whether more is received than may be at a time: then the oldest is waited for, by the rule for what is sent (``transit``)."""
    return len(under_way) > SENT_TENSORS or (len(under_way) > 1 and sum(one.buffer.nbytes for one in under_way) > SENT_BYTES)


METHOD = ShardedState
