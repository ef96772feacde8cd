"""A rank's gradients of what is owned in parts, from the first one until they leave for the owners."""

from __future__ import annotations

from typing import NamedTuple

import torch

from soap.model.regions import lengths
from soap.plan.plan import ShardSync
from soap.runtime.sync.layout import Layout


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
