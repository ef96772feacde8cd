"""All-to-all of parcels: each device sends several tensors to each other device at once."""

from __future__ import annotations

import torch

from soap.runtime.comm.packing import land
from soap.runtime.comm.redistribute import Communicator, Pending

Parcels = dict[int, list[torch.Tensor]]
"""Device -> the tensors that are sent to it, or received from it, in order."""


def start_exchange(
    comm: Communicator, devices: tuple[int, ...], parcels: Parcels, places: Parcels, blank: torch.Tensor, *, answers: int | None = None
) -> Pending:
    """Start sending ``parcels`` to the devices and receiving into ``places``. Both may leave out devices without tensors, and must leave
    out this rank itself.

    ``blank``: an empty tensor, whose dtype counts if this rank neither sends nor receives. ``answers``: see ``Communicator.post``.
    """
    if len(devices) < 2:
        return Pending((), blank)
    expected = [place for device in devices for place in places.get(device, ()) if place.numel()]
    sent = [parcel for device in devices for parcel in parcels.get(device, ())]
    buffer, finish = land(expected) if expected else ((sent[0] if sent else blank).new_empty(0), None)
    sizes = [sum(place.numel() for place in places.get(device, ())) for device in devices]
    pending = comm.all_to_all([parcels.get(device, []) for device in devices], buffer, sizes, devices, answers=answers)
    return pending if finish is None else pending.then(finish)


def bytes_of(parcels: Parcels) -> int:
    """Bytes of all tensors."""
    return sum(tensor.nbytes for own in parcels.values() for tensor in own)
