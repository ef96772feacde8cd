"""Sharded parameters: a rank keeps its parts; the values of whole regions are there only for the passes that read them.

Gradients go the way of sharded states. The leaf that tiles read is as large as its region, but its memory is freed behind the last forward
pass that reads it and is there again for the backward passes: autograd's saved tensors share the leaf's storage, whose size changes
(``resize_``), so that none of them keeps values. Values are written through ``Tensor.data``, which tells autograd nothing of it: they are
the same as before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from soap.plan.plan import ShardSync
from soap.plan.syncs.gathering import UNDER_WAY
from soap.runtime.program.actions import ActionKind, MicroBatch
from soap.runtime.sync.seam import SyncContext
from soap.runtime.sync.sharded_state import Gathering, Scattering, ShardedState
from soap.runtime.sync.shards import keep_memory
from soap.simulator.memory.transit import SENT_BYTES


class Sharded(ShardedState):
    """A rank's part as reader and as owner. The parts that it owns have memory of their own (``ShardStore.together``), apart from leaves.
    Large parts of others are received in the leaves, which therefore have memory from the beginning of the gather on."""

    def __init__(self, context: SyncContext, syncs: Mapping[int, ShardSync]) -> None:
        super().__init__(context, syncs)
        self._coming: dict[int, Gathering] = {}

    def bring(self, number: int) -> None:
        """Send this rank's values to all other readers before their forward passes, and begin to receive theirs."""
        self._begin_gather(number, ActionKind.BRING)

    def bring_back(self, number: int) -> None:
        """The same before their backward passes."""
        self._begin_gather(number, ActionKind.BRING_BACK)

    def need(self, number: int) -> None:
        """Wait for the values, and put into the leaves what is not there yet."""
        coming = self._coming.pop(number)
        coming.pending.wait()
        self._give_memory(number, large=False)
        self._put(number, coming.buffer)
        layout, views, together = self._layouts[number], self._places(number), self.store.together[number]
        if layout.mine:
            own = layout.owned[self.rank]
            torch._foreach_copy_([views[shard] for shard in own], torch.split(together, layout.sizes_of(own)))

    def _give_memory(self, number: int, *, large: bool) -> None:
        """Give the leaves memory, if ``large`` those alone of which all parts are large."""
        views, layout = self._views.setdefault(number, {}), self._layouts[number]
        for region, leaf in zip(self.syncs[number].regions, self._leaves[number], strict=True):
            if not large or region.shards[0] in layout.large:
                keep_memory(leaf, kept=True)
                if region.shards[0] not in views:  # views can be made only while there is memory
                    views.update(self._views_of(number, region, leaf))

    def free(self, number: int) -> None:
        """Free the memory of the leaves."""
        for leaf in self._leaves[number]:
            keep_memory(leaf, kept=False)

    def end(self, part: MicroBatch) -> None:
        """Wait for all gradients, and for values that no pass of this rank has needed."""
        super().end(part)
        while self._coming:
            number, coming = self._coming.popitem()
            coming.pending.wait()
            self.free(number)

    def _make_room(self, number: int) -> None:
        """So much is under way at most, what begins now included."""
        layout = self._layouts[number]
        whole, own = (count * self._leaves[number][0].itemsize for count in (layout.whole_elements, layout.owned_elements))
        coming = whole if layout.room else whole + (len(layout.readers) - 1) * own
        while self._scattering:
            size = coming + sum(one.sent_bytes + one.received_bytes for one in self._scattering)
            if len(self._scattering) < UNDER_WAY and size <= SENT_BYTES:
                break
            self._add_up(self._scattering.popleft())

    def _too_much(self) -> bool:
        return False  # there was room

    def _add_up(self, scattered: Scattering) -> None:
        """Others have begun to receive when theirs has come, so wait until what this rank sends has left: its memory is free then."""
        super()._add_up(scattered)
        self.comm.release(scattered.left)

    def _values_sent(self, number: int) -> Sequence[torch.Tensor]:
        """This rank's values, piece by piece, as they lie in its memory. All have left before the update."""
        layout, together = self._layouts[number], self.store.together[number]
        span = layout.spans[self.rank]
        large = {shard: together[layout.mine[shard]] for shard in layout.owned[self.rank] if shard in layout.large}
        return layout.pieces(self.rank, large, together[layout.owned_elements - (span.stop - span.start) :])

    def _begin_gather(self, number: int, kind: ActionKind) -> None:
        assert number not in self._coming, "values are gathered twice for one pass"
        layout = self._layouts[number]
        if layout.room:
            self._coming[number] = self._gather_values(number, kind)
            return
        self._give_memory(number, large=True)
        received = self._blank(number, sum(layout.sizes_of_others))
        self._coming[number] = self._send_values(number, kind, received, self._places(number))


METHOD = Sharded
