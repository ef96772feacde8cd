"""A rank's gradients of what is owned in parts, from the first one until they leave for the owners."""

from __future__ import annotations

from typing import NamedTuple

import torch

from soap.model.regions import lengths
from soap.plan.plan import Plan, ReadRegion, ShardSync
from soap.runtime.comm.redistribute import cut
from soap.runtime.sync.layout import Layout


class GradientParts:
    """The gradients of one synchronization. Small parts are collected in a buffer, ordered by owner; the buffer exists from the first of
    them on. Of a large region the gradient stays where autograd has made it. ``like``: a tensor of the dtype, on the device."""

    def __init__(self, plan: Plan, sync: ShardSync, layout: Layout, like: torch.Tensor) -> None:
        self._plan, self._sync, self._layout, self._like = plan, sync, layout, like
        self.forget()

    def forget(self) -> None:
        """Drop all."""
        self._buffer: torch.Tensor | None = None
        self._filled = set[int]()
        self._whole: dict[int, torch.Tensor] = {}

    def add(self, place: int, gradient: torch.Tensor) -> None:
        """Add a segment's gradient of region number ``place``. The tensor is ours from now on."""
        region = self._sync.regions[place]
        if self._is_large(region):
            if place in self._whole:
                self._whole[place].add_(gradient)
            else:
                self._whole[place] = gradient.resolve_conj().resolve_neg().contiguous()
            return
        given = [cut(gradient, region.box, self._plan.shards[shard].box) for shard in region.shards]
        (torch._foreach_add_ if place in self._filled else torch._foreach_copy_)(self._places(region), given)
        self._filled.add(place)

    def take(self) -> Taken:
        """All gradients, which are forgotten here; zeros where there was none."""
        large: dict[int, torch.Tensor] = {}
        for place, region in enumerate(self._sync.regions):
            if self._is_large(region):
                whole = self._whole.get(place)
                whole = self._like.new_zeros(lengths(region.box)) if whole is None else whole
                large.update({shard: cut(whole, region.box, self._plan.shards[shard].box).view(-1) for shard in region.shards})
            elif place not in self._filled:
                torch._foreach_zero_(self._places(region))
        buffer = self._like.new_empty(0) if self._buffer is None else self._buffer
        self.forget()
        return Taken(buffer, large)

    def _is_large(self, region: ReadRegion) -> bool:
        return region.shards[0] in self._layout.large

    def _places(self, region: ReadRegion) -> list[torch.Tensor]:
        """A region's parts of the buffer, which is made if there is none yet."""
        if self._buffer is None:
            self._buffer = self._like.new_empty(self._layout.size)
        buffer, places, shards = self._buffer, self._layout.places, self._plan.shards
        return [buffer[places[shard]].view(lengths(shards[shard].box)) for shard in region.shards]


class Taken(NamedTuple):
    """Gradients that leave, all flat. ``buffer``: of small parts, as the ``Layout`` has them. ``large``: shard -> its gradient."""

    buffer: torch.Tensor
    large: dict[int, torch.Tensor]
