"""Sharded optimizer states: gradients are reduce-scattered to the readers that own parts, updated values are all-gathered from them.

Large parts travel from where they lie to where they belong; small ones are collected in a buffer, ordered by owner (``shards``). If each
host has a copy in parts, both stay inside hosts, and the holders of the same parts all-reduce their sums in between: ``collect`` scatters,
``synchronize`` sums. docs/internals/runtime.md (*Sharded states*) says more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import NamedTuple

import torch

from soap.model.regions import lengths
from soap.plan.plan import ReadRegion, ShardSync
from soap.plan.syncs.sharded_state import sum_name
from soap.runtime.comm.packing import pack
from soap.runtime.comm.parcels import all_gather_parts, exchange_pieces, reduce_scatter_parts
from soap.runtime.comm.redistribute import Pending
from soap.runtime.program.actions import ActionKind, MicroBatch
from soap.runtime.sync.roles import pieces_read
from soap.runtime.sync.seam import Gradient, RankSync, SyncContext
from soap.runtime.sync.shards import Layout
from soap.runtime.trace import Watch
from soap.simulator.memory.transit import SENT_BYTES, SENT_TENSORS
from soap.simulator.tasks import TaskKind


class Taken(NamedTuple):
    """Gradients that leave, all flat. ``buffer``: of small parts, as the ``Layout`` has them. ``large``: shard -> its gradient."""

    buffer: torch.Tensor
    large: dict[int, torch.Tensor]


class GradientParts:
    """The gradients of one synchronization. Small parts are collected in a buffer, ordered by owner; the buffer exists from the first of
    them on. Of a large region the gradient stays where autograd has made it. ``like``: a tensor of the dtype, on the device.

    Parts are cut by rows, so each is one piece of its region's memory. What can be known beforehand is: this runs for every gradient.
    """

    def __init__(self, sync: ShardSync, layout: Layout, like: torch.Tensor) -> None:
        self._layout, self._like = layout, like
        self._regions = [region.shards for region in sync.regions]
        self._shapes = [lengths(region.box) for region in sync.regions]
        self._is_large = [shards[0] in layout.large for shards in self._regions]
        self._sizes = [layout.sizes_of(shards) for shards in self._regions]
        self.forget()

    def forget(self) -> None:
        """Drop all."""
        self._buffer: torch.Tensor | None = None
        self._filled = set[int]()
        self._whole: dict[int, torch.Tensor] = {}

    def add(self, place: int, gradient: torch.Tensor) -> None:
        """Add a segment's gradient of region number ``place``. The tensor is ours from now on."""
        if self._is_large[place]:
            if place in self._whole:
                self._whole[place].add_(gradient)
            else:
                self._whole[place] = gradient.resolve_conj().resolve_neg().contiguous()
            return
        given = torch.split(gradient.reshape(-1), self._sizes[place])
        (torch._foreach_add_ if place in self._filled else torch._foreach_copy_)(self._places(place), given)
        self._filled.add(place)

    def take(self) -> Taken:
        """All gradients, which are forgotten here; zeros where there was none."""
        large: dict[int, torch.Tensor] = {}
        for place, shards in enumerate(self._regions):
            if self._is_large[place]:
                whole = self._whole.get(place)
                whole = self._like.new_zeros(self._shapes[place]) if whole is None else whole
                large.update(zip(shards, torch.split(whole.view(-1), self._sizes[place]), strict=True))
            elif place not in self._filled:
                torch._foreach_zero_(self._places(place))
        buffer = self._like.new_empty(0) if self._buffer is None else self._buffer
        self.forget()
        return Taken(buffer, large)

    def _places(self, place: int) -> list[torch.Tensor]:
        """A region's parts of the buffer, flat. The buffer is made if there is none yet."""
        if self._buffer is None:
            self._buffer = self._like.new_empty(self._layout.size)
        return [self._buffer[self._layout.places[shard]] for shard in self._regions[place]]


@dataclass(slots=True)
class Gathering:
    """Values of synchronization ``number`` that are on their way. ``buffer``: receives those that do not land in their places."""

    number: int
    pending: Pending
    buffer: torch.Tensor

    @property
    def size_bytes(self) -> int:
        """What is held for it."""
        return self.buffer.nbytes


@dataclass(slots=True)
class Scattering:
    """Gradients of synchronization ``number`` that are on their way. ``left``: waits until what this rank sends has left. ``parts``: by
    reader, its gradients of what this rank owns, piece by piece. ``total``: where their sum may be, flat; None if it needs memory of its
    own. ``sent_bytes``: what is sent, and this rank's own parts, which lie there, too. A collective leaves the sum in ``total`` itself, and
    has no ``parts``."""

    number: int
    pending: Pending
    left: Pending
    parts: Sequence[Sequence[torch.Tensor]]
    total: torch.Tensor | None
    sent_bytes: int
    received_bytes: int

    @property
    def size_bytes(self) -> int:
        """The larger one of what is sent and what is received."""
        return max(self.sent_bytes, self.received_bytes)


class ShardedState(RankSync):
    """A rank's part as reader and as owner. A reader's copy is a leaf of the ``ShardStore``; the parts that it owns are views of it."""

    def __init__(self, context: SyncContext, syncs: Mapping[int, ShardSync]) -> None:
        super().__init__(context, syncs)
        read = pieces_read(self.plan)
        self._first = {number: number - (sync.part or 0) for number, sync in syncs.items()}
        layouts = {number: Layout(self.plan, syncs[number], self.rank) for number in dict.fromkeys(self._first.values())}
        self._layouts = {number: layouts[first] for number, first in self._first.items()}
        self._leaves = {number: [self.store.leaves[piece] for piece in read[number]] for number in syncs}
        self._gradients = {
            number: GradientParts(sync, self._layouts[number], self._leaves[number][0].detach())
            for number, sync in syncs.items()
            if not self.plan.is_frozen(sync)
        }
        self._owned = {shard: number for number in self._gradients for shard in self._layouts[number].owned[self.rank]}
        self._scattering: deque[Scattering] = deque()
        self._gathering: deque[Gathering] = deque()
        self._summing: list[Pending] = []
        self._totals: dict[int, torch.Tensor] = {}
        self._views: dict[int, dict[int, torch.Tensor]] = {}
        for number in self._gradients:
            for place, leaf in enumerate(self._leaves[number]):
                self.take_gradients(leaf, number, ShardedState._collect, number, place)

    @property
    def shards(self) -> Iterable[int]:
        """The parts that this rank owns and updates."""
        return self._owned

    def begin(self, part: MicroBatch, watch: Watch) -> None:
        """Drop the last step's gradients before the first micro-batch; the optimizer has left its own on what it has updated."""
        super().begin(part, watch)
        if part.first:
            self._totals.clear()
            for own in self._gradients.values():
                own.forget()
            for shard in self._owned:
                self.store.tensors[shard].grad = None
            for leaf in chain.from_iterable(self._leaves.values()):
                leaf.grad = None

    def synchronize(self, number: int) -> None:
        """Send each owner its part of this rank's gradients; with several copies, begin to sum this rank's own part over its holders."""
        sync, layout = self.syncs[number], self._layouts[number]
        if not sync.aggregated:
            self._scatter(number, ActionKind.SYNC)
            return
        while any(one.number == number for one in self._scattering):
            self._add_up(self._scattering.popleft())
        total = self._totals[self._first[number]]
        if total.numel():
            pending = self.comm.all_reduce(total, layout.holders)
            self.comm.traffic.synchronized_bytes += total.nbytes
            self.watch(sum_name(sync, layout.holders), TaskKind.SYNC, pending)
            self._summing.append(pending)

    def collect(self, number: int) -> None:
        """Send each owner of this rank's copy its part of this rank's gradients."""
        self._scatter(number, ActionKind.COLLECT)

    def _scatter(self, number: int, kind: ActionKind) -> None:
        """Send the owners their parts, and begin to receive the others' gradients of this rank's own parts."""
        self._make_room(number)
        layout, (buffer, large) = self._layouts[number], self._gradients[number].take()
        if layout.room:
            total, moved = buffer.new_empty(layout.room), 2 * (buffer.nbytes - buffer.nbytes // len(layout.readers))
            pending = reduce_scatter_parts(self.comm, buffer, total, layout.readers)
            pending.further = (buffer,)
            self._under_way(kind, Scattering(number, pending, pending, (), total, buffer.nbytes, 0), moved)
            return
        given = [layout.pieces(reader, large, buffer[layout.spans[reader]]) for reader in layout.readers]
        own = given[layout.readers.index(self.rank)]
        size, others = sum(piece.numel() for piece in own), len(layout.readers) - 1
        received = buffer.new_empty(others * size)
        rows, sizes = iter(received.view(others, size)), [piece.numel() for piece in own]
        coming = [() if reader == self.rank else next(rows).split(sizes) for reader in layout.readers]
        leaving = [() if reader == self.rank else pieces for reader, pieces in zip(layout.readers, given, strict=True)]
        pending, left = exchange_pieces(self.comm, leaving, coming, layout.readers, buffer.new_empty(0))
        parts = [own if reader == self.rank else row for reader, row in zip(layout.readers, coming, strict=True)]
        sent = sum(piece.nbytes for piece in chain.from_iterable(given))
        # what two readers add up may take the place of what has come: either order of two gives the same bits
        scattered = Scattering(number, pending, left, parts, received if others == 1 else None, sent, received.nbytes)
        self._under_way(kind, scattered, sent - size * received.itemsize + received.nbytes)

    def _under_way(self, kind: ActionKind, scattered: Scattering, moved_bytes: int) -> None:
        """Note a scatter that has begun; add up the oldest where too much is under way."""
        self.comm.traffic.pushed_bytes += moved_bytes
        self.named(kind, scattered.number, scattered.pending)
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
        return self._totals[self._first[number]][self._layouts[number].mine[shard]].view(lengths(self.plan.shards[shard].box))

    def bring(self, number: int) -> None:
        """Send this rank's values to all other readers, and begin to receive theirs."""
        layout = self._layouts[number]
        if layout.room:
            coming = self._gather_values(number, ActionKind.BRING)
        else:
            received = self._blank(number, sum(layout.sizes_of_others))
            coming = self._send_values(number, ActionKind.BRING, received, self._places(number))
        coming.pending.then(partial(self._put, number, coming.buffer))
        self._gathering.append(coming)
        while _too_much(self._gathering):
            self._gathering.popleft().pending.wait()

    def _send_values(self, number: int, kind: ActionKind, received: torch.Tensor, places: Mapping[int, torch.Tensor]) -> Gathering:
        """Send this rank's values to all other readers of its copy, and begin to receive theirs: large parts in their ``places``, the small
        ones in ``received``, one owner after the other."""
        layout, own = self._layouts[number], self._values_sent(number)
        coming = [() if r == self.rank else layout.pieces(r, places, small) for r, small in layout.of_others(received).items()]
        leaving = [() if reader == self.rank else own for reader in layout.readers]
        pending, _ = exchange_pieces(self.comm, leaving, coming, layout.readers, received.new_empty(0))
        self.comm.traffic.pulled_bytes += sum(piece.nbytes for side in (leaving, coming) for piece in chain.from_iterable(side))
        return Gathering(number, self.named(kind, number, pending), received)

    def _values_sent(self, number: int) -> Sequence[torch.Tensor]:
        """This rank's values, piece by piece: large parts as they lie in its copies, the others packed."""
        layout, views = self._layouts[number], self._places(number)
        small = [views[shard] for shard in layout.small_of(self.rank)]
        packed = pack(small) if small else self._blank(number)
        return layout.pieces(self.rank, self._places(number), packed)

    def _blank(self, number: int, size: int = 0) -> torch.Tensor:
        """Memory for values of a synchronization."""
        return self._leaves[number][0].detach().new_empty(size)

    def _gather_values(self, number: int, kind: ActionKind) -> Gathering:
        """Begin to gather all values of this rank's copy, in a buffer with equal places for all owners."""
        layout = self._layouts[number]
        buffer = self._blank(number, layout.size)
        for shard in layout.owned[self.rank]:
            buffer[layout.places[shard]].copy_(self.store.tensors[shard].detach().reshape(-1))
        pending = self.named(kind, number, all_gather_parts(self.comm, buffer, layout.readers))
        self.comm.traffic.pulled_bytes += 2 * (buffer.nbytes - buffer.nbytes // len(layout.readers))
        return Gathering(number, pending, buffer)

    def _put(self, number: int, buffer: torch.Tensor) -> None:
        """Copy others' small parts out of what has come to their places in this rank's copies."""
        layout, views = self._layouts[number], self._places(number)
        if layout.small_of_others:
            if layout.room:
                come = [buffer[layout.places[shard]] for shard in layout.small_of_others]
            else:
                come = list(torch.split(buffer, layout.sizes_of_others))
            torch._foreach_copy_([views[shard] for shard in layout.small_of_others], come)

    def arrived(self) -> None:
        """Wait for all values."""
        while self._gathering:
            self._gathering.popleft().pending.wait()

    def _places(self, number: int) -> Mapping[int, torch.Tensor]:
        """Shard -> its place in this rank's copies, flat. Views share whatever memory the copies have."""
        if number not in self._views:
            regions = zip(self.syncs[number].regions, self._leaves[number], strict=True)
            self._views[number] = dict(chain.from_iterable(self._views_of(number, region, leaf) for region, leaf in regions))
        return self._views[number]

    def _views_of(self, number: int, region: ReadRegion, leaf: torch.Tensor) -> Iterable[tuple[int, torch.Tensor]]:
        """(shard, its place in a copy), flat; the copy has memory now. Autograd is told nothing of what is written there."""
        return zip(region.shards, torch.split(leaf.data.view(-1), self._layouts[number].sizes_of(region.shards)), strict=True)

    def _make_room(self, number: int) -> None:
        """Wait for gradients that are under way before those of a synchronization begin to be."""

    def _too_much(self) -> bool:
        """Whether more gradients are under way than may be at a time."""
        return _too_much(self._scattering)

    def _add_up(self, scattered: Scattering) -> None:
        """Wait for the others' gradients of this rank's parts, and add up all of them in the order of the readers, unless that is done: to
        those of the micro-batches before, if there are any."""
        scattered.pending.wait()
        layout, total, first_number = self._layouts[scattered.number], scattered.total, self._first[scattered.number]
        if (before := self._totals.get(first_number)) is not None:
            for pieces in scattered.parts or ([] if total is None else [[total[: layout.owned_elements]]]):
                if pieces:
                    torch._foreach_add_(torch.split(before, [piece.numel() for piece in pieces]), tuple(pieces))
            return
        if scattered.parts:
            first, second, *others = scattered.parts
            total = scattered.pending.tensor.new_empty(layout.owned_elements) if total is None else total
            sums = torch.split(total, [piece.numel() for piece in first])
            for own, a, b in zip(sums, first, second, strict=True):
                torch.add(a, b, out=own)
            for other in others if sums else ():
                torch._foreach_add_(sums, tuple(other))
        assert total is not None, "a collective leaves a sum"
        self._totals[first_number] = total[: layout.owned_elements]

    def _collect(self, number: int, place: int, gradient: torch.Tensor) -> None:
        """Note a segment's gradient of a region."""
        self._gradients[number].add(place, gradient)


def _too_much(under_way: Sequence[Gathering] | Sequence[Scattering]) -> bool:
    """Whether more is on its way than may be at a time: then the oldest is waited for, by the rule for what is sent (``transit``). What is
    sent, and is added up from there, stays as long as what is received."""
    return len(under_way) > SENT_TENSORS or (len(under_way) > 1 and sum(one.size_bytes for one in under_way) > SENT_BYTES)


METHOD = ShardedState
