"""Where the parts of a synchronization lie in a rank's memory, and which of them travel as they lie."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise

import torch

from soap.model.regions import volume
from soap.plan.plan import Plan, ReadRegion, ShardSync
from soap.plan.syncs.bucketing import shard_bytes
from soap.plan.syncs.even_parts import is_even
from soap.plan.syncs.sharing import copies_of, holders

LARGE_BYTES = 256 * 2**10
"""Parts of at least so many bytes are messages of their own, from where they lie to where they belong. Smaller ones are copied into one
message: a message takes a processor about as long as copying so much twice."""


class Layout:
    """Where the parts of a synchronization lie. All ranks agree on it.

    ``readers``: those of this rank's copy. ``holders``: the devices that own the same parts as this rank, itself included; this rank alone
    if there is one copy. ``owned``: reader -> its shards, large ones first. ``mine``: shard that this rank owns -> its elements among
    ``owned_elements``, which lie in that order. ``large``: the shards of regions all of whose parts are large.

    The others share a buffer, one owner after the other. ``places``: shard -> its elements there. ``spans``: reader -> the elements that it
    owns. ``size``: of the buffer. ``room``: elements of each reader's place in it, if all have as many; then nothing is large.
    """

    def __init__(self, plan: Plan, sync: ShardSync, rank: int) -> None:
        self.rank = rank
        self.readers = next(group for group in copies_of(sync) if rank in group)
        self.holders = next((group for group in holders(sync) if rank in group), (rank,))
        even = is_even(plan, sync)
        self.large = frozenset[int]() if even else frozenset(shard for region in sync.regions for shard in _large_parts(plan, region))
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

    def small_of(self, reader: int) -> list[int]:
        """The parts that a reader owns and that travel together."""
        return [shard for shard in self.owned[reader] if shard not in self.large]

    def small_of_others(self) -> list[int]:
        """Those of all other readers, one after the other."""
        return [shard for reader in self.readers if reader != self.rank for shard in self.small_of(reader)]

    def pieces(self, reader: int, large: Mapping[int, torch.Tensor], small: torch.Tensor) -> list[torch.Tensor]:
        """What a reader owns as it travels, flat tensors without copies: its ``large`` shards, then the ``small`` ones together."""
        return [*(large[shard].view(-1) for shard in self.owned[reader] if shard in self.large), *([small] if small.numel() else [])]

    def of_others(self, small: torch.Tensor) -> dict[int, torch.Tensor]:
        """Reader -> its part of a flat tensor that has the small parts of all other readers; this rank's is empty."""
        sizes = [0 if reader == self.rank else span.stop - span.start for reader, span in self.spans.items()]
        return dict(zip(self.readers, small.split(sizes), strict=True))


def in_a_row(sizes: Sequence[int], first: int = 0) -> list[slice]:
    """Slices of these sizes, one after the other."""
    return [slice(a, b) for a, b in pairwise(accumulate(sizes, initial=first))]


def _large_parts(plan: Plan, region: ReadRegion) -> Iterator[int]:
    """The parts of a region if all are large."""
    if min(shard_bytes(plan.graph, plan.shards[shard]) for shard in region.shards) >= LARGE_BYTES:
        yield from region.shards
