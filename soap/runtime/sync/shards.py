"""This rank's parameter shards: one leaf tensor each, and the regions of them that tiles need.

Readers of a dense region that is owned in parts have a copy of it, which is a leaf too. An owner that is also a reader has its parts as
views of its copy; or, if values are gathered for their uses, in memory of their own, and its copy has memory only while it is used. What
an owner sends together is then one piece of memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch

from soap.errors import RuntimeFailure
from soap.model.dtypes import name_of, replaced
from soap.model.graph import OperatorGraph
from soap.model.regions import Box, lengths, relative, volume, whole
from soap.plan.plan import Plan, ShardSync
from soap.plan.syncs.even_parts import is_even
from soap.plan.syncs.large_parts import large_regions
from soap.plan.syncs.sharing import copies_of, holders
from soap.runtime.comm.packing import assemble, cut
from soap.runtime.comm.redistribute import Communicator
from soap.runtime.sync.roles import pieces, pieces_read, uses_of_pieces
from soap.tracing.execute import TracedModel


class Layout:
    """Where the parts of a synchronization lie. All ranks agree on it.

    ``readers``: those of this rank's copy. ``holders``: the devices that own the same parts as this rank, itself included; this rank alone
    if there is one copy. ``owned``: reader -> its shards, large ones first. ``mine``: shard that this rank owns -> its elements among
    ``owned_elements``, which lie in that order. ``whole_elements``: of all that travels, with padding. ``large``: the shards of regions all
    of whose parts are large.

    The others share a buffer, one owner after the other. ``places``: shard -> its elements there. ``spans``: reader -> the elements that it
    owns. ``size``: of the buffer. ``room``: elements of each reader's place in it, if all have as many; then nothing is large.
    ``small_of_others``: those of all other readers, one after the other; ``sizes_of_others``: the elements of each.
    """

    def __init__(self, plan: Plan, sync: ShardSync, rank: int) -> None:
        self.rank = rank
        self.readers = next(group for group in copies_of(sync) if rank in group)
        self.holders = next((group for group in holders(sync) if rank in group), (rank,))
        even = is_even(plan, sync)
        self.large = frozenset(shard for place in large_regions(plan, sync) for shard in sync.regions[place].shards)
        self.owned: dict[int, list[int]] = {reader: [] for reader in self.readers}
        for shard in sorted(sync.shards, key=lambda shard: shard not in self.large):
            (owner,) = {*plan.shards[shard].devices} & self.owned.keys()
            self.owned[owner].append(shard)
        sizes = {shard: volume(plan.shards[shard].box) for shard in sync.shards}
        self.mine = dict(zip(self.owned[rank], in_a_row([sizes[shard] for shard in self.owned[rank]]), strict=True))
        self.owned_elements = sum(sizes[shard] for shard in self.owned[rank])
        self.room = max(sum(sizes[shard] for shard in own) for own in self.owned.values()) if even else 0
        self.spans, self.places, self.size = dict[int, slice](), dict[int, slice](), 0
        for reader in self.readers:
            small = self.small_of(reader)
            self.places.update(zip(small, in_a_row([sizes[shard] for shard in small], self.size), strict=True))
            self.spans[reader] = slice(self.size, self.size + sum(sizes[shard] for shard in small))
            self.size = self.size + self.room if self.room else self.spans[reader].stop
        self._sizes = sizes
        self.whole_elements = self.size if self.room else sum(sizes.values())
        self.small_of_others = [shard for reader in self.readers if reader != rank for shard in self.small_of(reader)]
        self.sizes_of_others = self.sizes_of(self.small_of_others)
        self._large_of = {reader: [shard for shard in own if shard in self.large] for reader, own in self.owned.items()}
        self._given = [0 if reader == rank else span.stop - span.start for reader, span in self.spans.items()]

    def small_of(self, reader: int) -> list[int]:
        """The parts that a reader owns and that travel together."""
        return [shard for shard in self.owned[reader] if shard not in self.large]

    def pieces(self, reader: int, large: Mapping[int, torch.Tensor], small: torch.Tensor) -> list[torch.Tensor]:
        """What a reader owns as it travels, all flat: its shards of those that are ``large``, then its ``small`` ones together."""
        pieces = [large[shard] for shard in self._large_of[reader]]
        return [*pieces, small] if small.numel() else pieces

    def of_others(self, small: torch.Tensor) -> dict[int, torch.Tensor]:
        """Reader -> its part of a flat tensor that has the small parts of all other readers; this rank's is empty."""
        return dict(zip(self.readers, torch.split(small, self._given), strict=True))

    def sizes_of(self, shards: Sequence[int]) -> list[int]:
        """The elements of these shards."""
        return [self._sizes[shard] for shard in shards]


def in_a_row(sizes: Sequence[int], first: int = 0) -> list[slice]:
    """Slices of these sizes, one after the other."""
    return [slice(a, b) for a, b in pairwise(accumulate(sizes, initial=first))]


class Region(NamedTuple):
    """How a tile's parameter region is put together: its box and the pieces that cover it (see ``roles.pieces``)."""

    box: Box
    pieces: tuple[int, ...]


class ShardStore:
    """The shards that a rank owns. ``tensors``: shard -> leaf tensor, in plan order; trainable ones require a gradient.

    ``leaves``: piece (see ``roles.pieces``) -> leaf tensor that tiles read: the rank's shards, and its copies of dense regions in parts.
    ``boxes``: piece -> box. ``together``: synchronization whose values are gathered -> the rank's shards of it, flat, in the order of its
    ``Layout``: they are views of it. Those of all micro-batches share one. ``joined``: parameter in ``whole`` -> one tensor of the whole
    parameter; its shards are views of it.
    """

    def __init__(self, plan: Plan, rank: int, whole: Sequence[str] = ()) -> None:
        self.plan = plan
        self.rank = rank
        self.joined: dict[str, torch.Tensor] = {}
        self.together: dict[int, torch.Tensor] = {}
        self._whole = frozenset(whole)
        self.tensors: dict[int, torch.Tensor] = {}
        self.leaves: dict[int, torch.Tensor] = {}
        self.boxes = pieces(plan)
        self._regions: dict[tuple[int, int], list[int]] = {}
        for piece, own in enumerate(uses_of_pieces(plan)):
            for use in own:
                if plan.tiles[use[0]].device == rank:
                    self._regions.setdefault(use, []).append(piece)

    def load(
        self, parameters: Mapping[str, torch.Tensor], device: torch.device, dtype: torch.dtype | None, share: bool = False
    ) -> None:
        """Copy this rank's regions out of full parameters. Existing shards are filled in place, so that optimizers keep them.

        ``share``: a shard that is a whole parameter uses the parameter's own memory if device and dtype are the same.
        Copies of regions in parts get no values here, except this rank's own parts. RuntimeFailure for a meta tensor.
        """
        copied = {} if self.leaves else self._make_copies(parameters, device, dtype, share) | self._join(parameters, device, dtype)
        for number, shard in enumerate(self.plan.shards):
            if self.rank not in shard.devices:
                continue
            full = parameters[shard.parameter].detach()
            if full.is_meta:
                raise RuntimeFailure(
                    f"parameter {shard.parameter!r} has no values; expected a model that has them: load it again, or with weights "
                    "(soap-run --weights, soap.load(..., weights=...)) if it was exported without"
                )
            region = cut(full, whole(full.shape), shard.box)
            if number in self.tensors:
                with torch.no_grad():
                    self.tensors[number].copy_(region)
                continue
            kind = run_dtype(self.plan.graph, shard.parameter, dtype)  # files of weights may have another type
            if number in copied:
                own = copied[number]
                own.copy_(region)
            elif share and region is full and _is_kept_so(full, kind, device):
                own = full
            else:
                own = torch.empty(lengths(shard.box), dtype=kind, device=device)
                own.copy_(region)
            self.tensors[number] = own.requires_grad_(shard.trainable)
        self.leaves = {**self.tensors, **self.leaves}

    def share_with(self, other: ShardStore) -> None:
        """Use the tensors of another store, whose plan has the same shards."""
        self.tensors, self.leaves, self.joined, self.together = other.tensors, other.leaves, other.joined, other.together

    def _make_copies(
        self, parameters: Mapping[str, torch.Tensor], device: torch.device, dtype: torch.dtype | None, share: bool
    ) -> dict[int, torch.Tensor]:
        """Allocate this rank's copies of dense regions in parts. Returns shard -> view, for parts that it owns: of its copy, or apart."""
        mine: dict[int, torch.Tensor] = {}
        for number, (own, read) in enumerate(zip(self.plan.syncs, pieces_read(self.plan), strict=True)):
            if not own.contract.owned_in_parts or own.contract.by_rows or self.rank not in own.readers:
                continue
            for region, piece in zip(own.regions, read, strict=True):
                full = parameters[region.parameter].detach()
                kind = run_dtype(self.plan.graph, region.parameter, dtype)
                if own.contract.gathers_values:
                    leaf = torch.empty(lengths(region.box), dtype=kind, device=device)
                    self.leaves[piece] = leaf.requires_grad_(self.plan.shards[region.shards[0]].trainable)
                    keep_memory(self.leaves[piece], kept=False)
                    continue
                copy = full
                if not (share and region.box == whole(full.shape) and _is_kept_so(full, kind, device)):
                    copy = torch.empty(lengths(region.box), dtype=kind, device=device)
                for shard in region.shards:
                    if self.rank in self.plan.shards[shard].devices:
                        mine[shard] = cut(copy, region.box, self.plan.shards[shard].box)
                self.leaves[piece] = copy.detach().requires_grad_()
            if own.contract.gathers_values:
                first = number - (own.part or 0)
                if first != number:
                    self.together[number] = self.together[first]
                    continue
                mine.update(self._put_together(number, own, self.leaves[read[0]]))
        return mine

    def _put_together(self, number: int, sync: ShardSync, like: torch.Tensor) -> dict[int, torch.Tensor]:
        """Allocate what this rank sends of a synchronization's values. Returns shard -> view of it."""
        layout, boxes = Layout(self.plan, sync, self.rank), [shard.box for shard in self.plan.shards]
        flat = self.together[number] = torch.empty(layout.owned_elements, dtype=like.dtype, device=like.device)
        return {shard: flat[own].view(lengths(boxes[shard])) for shard, own in layout.mine.items()}

    def _join(self, parameters: Mapping[str, torch.Tensor], device: torch.device, dtype: torch.dtype | None) -> dict[int, torch.Tensor]:
        """Allocate one tensor for each parameter that is kept whole in several shards. Returns shard -> view of it."""
        places: dict[int, torch.Tensor] = {}
        for number, shard in enumerate(self.plan.shards):
            if self.rank in shard.devices and shard.parameter in self._whole:
                full = parameters[shard.parameter]
                if shard.parameter not in self.joined:
                    room = torch.empty(full.shape, dtype=run_dtype(self.plan.graph, shard.parameter, dtype), device=device)
                    self.joined[shard.parameter] = room.requires_grad_()
                places[number] = cut(self.joined[shard.parameter].detach(), whole(full.shape), shard.box)
        return places

    def agree(self, comm: Communicator) -> None:
        """Make all copies of a shard equal to the copy on its first device."""
        for number, shard in enumerate(self.plan.shards):
            if number in self.tensors and len(shard.devices) > 1:
                own = self.tensors[number].detach()
                sent = own.contiguous()
                comm.broadcast(sent, shard.devices[0], shard.devices).wait()
                if sent is not own:  # a view of a whole parameter
                    own.copy_(sent)

    def region(self, tile: int, place: int) -> Region:
        """The region that a tile needs for its parameter operand number ``place``."""
        return Region(self.plan.tiles[tile].parameters[place], tuple(self._regions.get((tile, place), ())))

    def is_one(self, region: Region) -> bool:
        """Whether a region is a single piece."""
        return len(region.pieces) == 1 and self.boxes[region.pieces[0]] == region.box

    def build(self, region: Region) -> torch.Tensor:
        """The region as one tensor, differentiable with respect to its pieces."""
        return assemble(region.box, [self.boxes[i] for i in region.pieces], [self.leaves[i] for i in region.pieces])


def keep_memory(leaf: torch.Tensor, *, kept: bool) -> None:
    """Give a contiguous tensor its memory, without values, or free it; also for all that share it, as what autograd has saved."""
    storage = leaf.untyped_storage()
    size = leaf.nbytes if kept else 0
    if storage.nbytes() != size:
        storage.resize_(size)


def _is_kept_so(full: torch.Tensor, kind: torch.dtype, device: torch.device) -> bool:
    """Whether a tensor may be a shard as it is."""
    return (full.dtype, full.device) == (kind, device) and full.is_contiguous()


def gather_regions(
    comm: Communicator, plan: Plan, values: Mapping[int, torch.Tensor], wanted: Sequence[int], full: dict[str, torch.Tensor]
) -> None:
    """Gather values of shards on rank 0, which writes them into ``full`` (parameter -> whole tensor). The other ranks send theirs.

    ``wanted``: shards, in the same order on all ranks. The first device of each shard sends it.
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


def run_dtype(graph: OperatorGraph, name: str, dtype: torch.dtype | None) -> torch.dtype:
    """The dtype of a graph's tensor at run time: its own, or ``dtype`` in place of a floating-point one."""
    own: Any = getattr(torch, graph.tensors[name].dtype)
    assert isinstance(own, torch.dtype)
    return replaced(own, dtype)


def model_in_type(model: TracedModel, plan: object, dtype: torch.dtype | None) -> TracedModel:
    """The model to compute in ``dtype``: traced again if its program names other types. RuntimeFailure if the plan is for these."""
    other = model if dtype is None else model.in_type(dtype)
    if other is not model and isinstance(plan, Plan):
        name = name_of(dtype)  # type: ignore[arg-type]
        raise RuntimeFailure(
            f"dtype {name}: the program of {model.graph.name!r} names types, and the plan is for them; expected a plan for the model of "
            f"soap.load(..., dtype={name!r})"
        )
    return other
