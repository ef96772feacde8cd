"""Clipping the sums of hosts that compress as one peer each. See ``compression.dgc`` for the limit.

The peer of a host has the sums of what is compressed. To know the norm of all of the host's gradients, it adds up what is not compressed,
too; the scale that it finds goes back to the host's other ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from soap.plan.plan import Plan
from soap.plan.syncs.amounts import Group, reading_groups
from soap.runtime.comm.parcels import Parcels, bytes_of, start_exchange
from soap.runtime.comm.redistribute import Communicator
from soap.runtime.compression.dgc import scale_of
from soap.runtime.sync.compressed import CompressedSum, hosts_sum


def peer_groups(plan: Plan) -> list[Group]:
    """The devices in groups that compress as one peer: those of each host, or each alone. All that is compressed is compressed so."""
    compressed = next((sync for sync in plan.syncs if sync.contract.compresses), None)
    return [(device,) for device in range(plan.device_count)] if compressed is None else reading_groups(compressed)


def clip_hosts(
    comm: Communicator, groups: Sequence[Group], gradients: Sequence[torch.Tensor], compressed: CompressedSum, limit: float
) -> None:
    """Scale down, in place, this rank's ``gradients`` and the host's sums of what is compressed, so that the norm of all that the host
    gives to the total is at most ``limit``. Called on all ranks at once, once what is compressed is being collected."""
    [group] = [group for group in groups if comm.rank in group]
    sums = _added_up(comm, group, gradients)
    own = compressed.hosts_gradients() if comm.rank == group[0] else []
    scale = torch.ones(1, dtype=torch.float64, device=comm.device)
    if comm.rank == group[0]:
        scale.fill_(scale_of([*sums, *own], limit))
    _give(comm, group, scale)
    for tensor in (*gradients, *own):
        tensor.mul_(scale.to(tensor.dtype))


def _added_up(comm: Communicator, group: Group, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """On the first of a group its ranks' gradients, summed in their order; on others what they have themselves."""
    peer, *others = group
    places = {device: [torch.empty_like(own) for own in gradients] for device in others if comm.rank == peer}
    for dtype in dict.fromkeys(own.dtype for own in gradients):
        chosen = [i for i, own in enumerate(gradients) if own.dtype == dtype]
        parcels = {} if comm.rank == peer else {peer: [gradients[i] for i in chosen]}
        _exchange(comm, parcels, {device: [own[i] for i in chosen] for device, own in places.items()}, gradients[chosen[0]])
    return [hosts_sum([own, *(parts[i] for parts in places.values())]) for i, own in enumerate(gradients)]


def _give(comm: Communicator, group: Group, scale: torch.Tensor) -> None:
    """From the first of a group to its others."""
    peer, *others = group
    parcels: Parcels = {device: [scale] for device in others} if comm.rank == peer else {}
    _exchange(comm, parcels, {} if comm.rank == peer else {peer: [scale]}, scale)


def _exchange(comm: Communicator, parcels: Parcels, places: Parcels, like: torch.Tensor) -> None:
    comm.traffic.handed_bytes += bytes_of(parcels) + bytes_of(places)
    start_exchange(comm, tuple(range(comm.world_size)), parcels, places, like.new_empty(0)).wait()
