"""Several tensors from each of some devices to each other, at once."""

from __future__ import annotations

import torch

from soap.runtime.comm.packing import land
from soap.runtime.comm.redistribute import Communicator, Pending

Parcels = dict[int, list[torch.Tensor]]
"""What is sent to, or comes from, each device, one tensor after the other."""


def start_exchange(comm: Communicator, devices: tuple[int, ...], parcels: Parcels, places: Parcels, blank: torch.Tensor) -> Pending:
    """Start giving each of some devices its parcel, and receiving others into their places. Both may lack devices, and have not this one.

    ``blank``: an empty tensor for those who receive nothing.
    """
    if len(devices) < 2:
        return Pending((), blank)
    expected = [place for device in devices for place in places.get(device, ()) if place.numel()]
    sent = [parcel for device in devices for parcel in parcels.get(device, ())]
    buffer, finish = land(expected) if expected else ((sent[0] if sent else blank).new_empty(0), None)
    sizes = [sum(place.numel() for place in places.get(device, ())) for device in devices]
    pending = comm.all_to_all([parcels.get(device, []) for device in devices], buffer, sizes, devices)
    return pending if finish is None else pending.then(finish)


def bytes_of(parcels: Parcels) -> int:
    """Of all that is sent, or received."""
    return sum(tensor.nbytes for own in parcels.values() for tensor in own)
