"""Where the parts of a synchronization lie in a rank's memory, and which of them travel as they lie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

import torch

from soap.model.regions import volume
from soap.plan.plan import Plan, ShardSync
from soap.plan.syncs.even_parts import is_even
from soap.plan.syncs.large_parts import large_regions
from soap.plan.syncs.sharing import copies_of, holders


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
