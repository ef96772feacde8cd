"""Checking compressed sums: all ranks' part in them, once more in one process, from the local gradients that the ranks had.

What an emulation of the same compression makes of the same gradients has the same bits. That the local gradients are right is another
question: added up, they have to be what one process computes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from soap.model.regions import lengths, whole
from soap.plan.syncs.amounts import reading_groups
from soap.plan.syncs.compressed import compressed_shards
from soap.runtime.comm.assembling import cut
from soap.runtime.compression.peer import Peer, copied
from soap.runtime.compression.seam import State
from soap.runtime.compression.together import in_order, synchronized
from soap.runtime.sync.compressed import hosts_sum, peer_of
from soap.runtime.trainer import Trainer

ByShard = Mapping[int, torch.Tensor]


class LocalGradients:
    """On each rank: the local gradients of the compressed shards that it reads, step by step."""

    def __init__(self, trainer: Trainer) -> None:
        self._method = trainer.sizes.gradients.compressed
        self.states: Mapping[int, State] = {}
        if self._method is not None:
            self.states = {shard: copied(state, "cpu") for shard, state in self._method.states.items()}
            self._method.local = {}

    def taken(self) -> dict[int, torch.Tensor]:
        """Those of the last step."""
        return {} if self._method is None or self._method.local is None else {i: own.cpu() for i, own in self._method.local.items()}

    def close(self) -> None:
        """Keep no more of them."""
        if self._method is not None:
            self._method.local = None


class EmulatedSums:
    """All ranks in one process. ``states``: by rank, what it keeps of its shards before the first step."""

    def __init__(self, trainer: Trainer, states: Sequence[Mapping[int, State]]) -> None:
        self._trainer, self._peers = trainer, dict[int, list[Peer]]()
        self._syncs = compressed_shards(trainer.plan)
        for shard, sync in self._syncs.items():
            own, dtype, shape = [], trainer.dtype_of(sync.parameter), lengths(trainer.plan.shards[shard].box)
            for rank in sync.peers:
                peer = peer_of(sync, rank, shape, dtype, trainer.compressing)
                peer.state = copied(states[rank][shard], trainer.device)
                own.append(peer)
            self._peers[shard] = own

    def wrong(self, local: Sequence[ByShard], gradients: Mapping[str, torch.Tensor]) -> dict[str, bool]:
        """Name of a shard -> whether its sum has other bits than that of the emulation. ``local``: by rank."""
        found = {}
        for shard, peers in self._peers.items():
            name, box = self._trainer.plan.shards[shard].parameter, self._trainer.plan.shards[shard].box
            totals = synchronized(peers, self._of_hosts(local, shard))
            mine = cut(gradients[name], whole(gradients[name].shape), box).cpu()
            found[f"{name}{list(box)}"] = not all(torch.equal(total.cpu().to(mine.dtype), mine) for total in totals)
        return found

    def uncompressed(self, local: Sequence[ByShard], gradients: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The gradients with those of compressed shards replaced by the sums of the local ones."""
        found = dict(gradients)
        for shard in self._peers:
            name, box = self._trainer.plan.shards[shard].parameter, self._trainer.plan.shards[shard].box
            if found[name] is gradients[name]:
                found[name] = gradients[name].clone()
            cut(found[name], whole(found[name].shape), box).copy_(in_order(self._given(local, shard)))
        return found

    def _given(self, local: Sequence[ByShard], shard: int) -> list[torch.Tensor]:
        return [local[rank][shard] for rank in self._syncs[shard].readers]

    def _of_hosts(self, local: Sequence[ByShard], shard: int) -> list[torch.Tensor]:
        """What each peer compresses, on the device of the ranks: others may round otherwise."""
        sync, given = self._syncs[shard], [own.to(self._trainer.device) for own in self._given(local, shard)]
        if not sync.aggregated:
            return given
        of_reader = dict(zip(sync.readers, given, strict=True))
        return [hosts_sum([of_reader[reader] for reader in group]) for group in reading_groups(sync)]
