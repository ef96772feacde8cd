"""This rank's parameter shards: one leaf tensor each, and the regions that tiles need of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from soap.regions import Box, lengths, relative, whole
from soap.runtime.redistribute import Communicator, assemble, cut
from soap.simulator.plan import Plan


class Region(NamedTuple):
    """How a tile's parameter region is put together: its box and the shards that cover it."""

    box: Box
    shards: tuple[int, ...]


class ShardStore:
    """The shards that a rank keeps. ``tensors``: shard -> leaf tensor, in plan order; what is trainable requires a gradient."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self.plan = plan
        self.rank = rank
        self.tensors: dict[int, torch.Tensor] = {}
        self._regions: dict[tuple[int, int], list[int]] = {}
        for number, shard in enumerate(plan.shards):
            for use in shard.uses:
                if plan.tiles[use[0]].device == rank:
                    self._regions.setdefault(use, []).append(number)

    def load(
        self, parameters: Mapping[str, torch.Tensor], device: torch.device, dtype: torch.dtype | None, share: bool = False
    ) -> None:
        """Take this rank's regions of full parameters; in place where shards exist already, so that optimizers keep them.

        ``share``: a shard that is a whole parameter uses the parameter's own memory, where device and dtype are the same.
        """
        for number, shard in enumerate(self.plan.shards):
            if self.rank not in shard.devices:
                continue
            full = parameters[shard.parameter].detach()
            region = cut(full, whole(full.shape), shard.box)
            if number in self.tensors:
                with torch.no_grad():
                    self.tensors[number].copy_(region)
                continue
            kind = dtype if dtype is not None and full.is_floating_point() else full.dtype
            if share and region is full and (full.dtype, full.device) == (kind, device) and full.is_contiguous():
                own = full
            else:
                own = torch.empty(lengths(shard.box), dtype=kind, device=device)
                own.copy_(region)
            self.tensors[number] = own.requires_grad_(shard.trainable)

    def agree(self, comm: Communicator) -> None:
        """Make all copies of a shard equal to the one of its first device."""
        for number, shard in enumerate(self.plan.shards):
            if number in self.tensors and len(shard.devices) > 1:
                own = self.tensors[number].detach()
                comm.broadcast(own, shard.devices[0], shard.devices).wait()

    def region(self, tile: int, place: int) -> Region:
        """What a tile needs for its parameter operand ``place``."""
        return Region(self.plan.tiles[tile].parameters[place], tuple(self._regions.get((tile, place), ())))

    def build(self, region: Region) -> torch.Tensor:
        """The region as one tensor, differentiable with respect to its shards."""
        return assemble(region.box, [self.plan.shards[i].box for i in region.shards], [self.tensors[i] for i in region.shards])


def gather_regions(
    comm: Communicator, plan: Plan, values: Mapping[int, torch.Tensor], wanted: Sequence[int], full: dict[str, torch.Tensor]
) -> None:
    """Bring shard-wise values together: rank 0 writes them into ``full`` (parameter -> whole tensor); the others send theirs.

    ``wanted``: the same shards in the same order on all ranks. Each comes from the first of its devices.
    """
    for tag, number in enumerate(wanted):
        shard = plan.shards[number]
        owner = shard.devices[0]
        if comm.rank == 0:
            target = full[shard.parameter][relative(shard.box, whole(full[shard.parameter].shape))]
            if owner == 0:
                target.copy_(values[number].detach())
            else:
                buffer = torch.empty(target.shape, dtype=target.dtype, device=comm.device)
                target.copy_(comm.receive(buffer, owner, tag).wait())
        elif comm.rank == owner:
            comm.send(values[number], 0, tag)
    comm.finish_sends()
