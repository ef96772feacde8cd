"""Sharded parameters: a rank keeps its parts; the values of whole regions are there only for the passes that read them.

Gradients go the way of sharded states. The leaf that tiles read is as large as its region, but its memory is freed behind the last forward
pass that reads it and is there again for the backward passes: autograd's saved tensors share the leaf's storage, whose size changes
(``resize_``), so that none of them keeps values. Values are written through ``Tensor.data``, which tells autograd nothing of it: they are
the same as before.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch

from soap.model.regions import volume
from soap.plan.plan import ShardSync
from soap.plan.syncs.gathering import UNDER_WAY
from soap.runtime.comm.redistribute import cut
from soap.runtime.program.actions import ActionKind
from soap.runtime.step.micro_batch import MicroBatch
from soap.runtime.sync.seam import SyncContext
from soap.runtime.sync.sharded_state import Exchanged, ShardedState
from soap.runtime.sync.shards import keep_memory
from soap.simulator.memory.transit import SENT_BYTES


class Sharded(ShardedState):
    """A rank's part as reader and as owner. The parts that it owns are tensors of their own, no views of a leaf."""

    brings_back: ClassVar[str] = "regather"

    def __init__(self, context: SyncContext, syncs: Mapping[int, ShardSync]) -> None:
        super().__init__(context, syncs)
        self._coming: dict[int, Exchanged] = {}

    @classmethod
    def after_update(cls, sync: ShardSync) -> tuple[ActionKind, ...]:
        """Nothing: readers get the new values when they need them."""
        return ()

    def bring(self, number: int) -> None:
        """Send this rank's values to all other readers before their forward passes, and begin to receive theirs."""
        self._begin_gather(number, ActionKind.BRING)

    def bring_back(self, number: int) -> None:
        """The same before their backward passes."""
        self._begin_gather(number, ActionKind.BRING_BACK)

    def need(self, number: int) -> None:
        """Wait for the values, and put them into the leaves."""
        coming = self._coming.pop(number)
        self._arrive(coming)
        layout, sync, store = self._layouts[number], self.syncs[number], self.store
        values = {shard: store.tensors[shard].data for shard in layout.owned[self.rank]}
        shards = layout.of_others(self.rank)
        if layout.room:
            values.update({shard: coming.buffer[layout.places[shard]] for shard in shards})
        else:
            sizes = [volume(self.plan.shards[shard].box) for shard in shards]
            values.update(zip(shards, torch.split(coming.buffer, sizes), strict=True))
        for region, leaf in zip(sync.regions, self._leaves[number], strict=True):
            keep_memory(leaf, kept=True)
            for shard in region.shards:
                place = cut(leaf.data, region.box, self.plan.shards[shard].box)
                place.copy_(values[shard].view(place.shape))

    def free(self, number: int) -> None:
        """Free the memory of the leaves."""
        for leaf in self._leaves[number]:
            keep_memory(leaf, kept=False)

    def end(self, part: MicroBatch) -> None:
        """Wait for all gradients, and for values that no pass of this rank has needed."""
        super().end(part)
        while self._coming:
            self._arrive(self._coming.popitem()[1])

    def _arrive(self, coming: Exchanged) -> None:
        """Wait for what others send. They have begun to receive then, and what this rank sends leaves soon: wait for that, too, so that its
        memory is free."""
        coming.pending.wait()
        self.comm.finish_sending(coming.sent)

    def _too_much(self) -> bool:
        size = sum(one.buffer.nbytes + one.sent.nbytes for one in self._scattering)
        return len(self._scattering) > UNDER_WAY or (len(self._scattering) > 1 and size > SENT_BYTES)

    def _add_up(self, scattered: Exchanged) -> None:
        super()._add_up(scattered)
        self.comm.finish_sending(scattered.sent)

    def _begin_gather(self, number: int, kind: ActionKind) -> None:
        layout, own = self._layouts[number], self._layouts[number].spans[self.rank]
        assert number not in self._coming, "values are gathered twice for one pass"
        if layout.room:
            self._coming[number] = self._gather_values(number, kind)
            return
        buffer = self._leaves[number][0].detach().new_empty(layout.size - (own.stop - own.start))
        self._coming[number] = self._send_values(number, kind, buffer)


METHOD = Sharded
