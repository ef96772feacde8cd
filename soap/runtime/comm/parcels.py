"""All-to-all of parcels: each device sends several tensors to each other device at once.

A parcel's tensors are packed. A piece is a message of its own, so pieces are for few large tensors. Collectives of equal parts are those of
NCCL; gloo has them as well, though its reduce-scatter is an all-reduce. Plans ask for them between accelerators alone
(``plan.syncs.even_parts``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from soap.runtime.comm.packing import land, plain
from soap.runtime.comm.redistribute import Communicator, Pending


def all_gather_parts(comm: Communicator, buffer: torch.Tensor, devices: tuple[int, ...]) -> Pending:
    """Start filling a contiguous buffer with one part of each device, in the order of the devices; this rank's is in its place already."""
    wire, finish = comm.through_wire(plain(buffer))
    own = wire.chunk(len(devices))[devices.index(comm.rank)]
    work = dist.all_gather_into_tensor(wire, own, group=comm.groups[devices], async_op=True)
    assert work is not None
    return Pending((work,), buffer, finish)


def reduce_scatter_parts(comm: Communicator, buffer: torch.Tensor, total: torch.Tensor, devices: tuple[int, ...]) -> Pending:
    """Start summing the devices' contiguous buffers. Each gets one part of the sum, in the order of the devices, in ``total``.

    Sums are made in the buffer's type, rounded after every addition, in an order that the library chooses. The buffer must not change until
    the sum is there; the caller keeps it.
    """
    sent = comm.to_wire(plain(buffer))
    wire, finish = comm.from_wire(plain(total))
    work = dist.reduce_scatter_tensor(wire, sent, group=comm.groups[devices], async_op=True)
    assert work is not None
    return Pending((work,), total, finish)


Pieces = Sequence[Sequence[torch.Tensor]]
"""Contiguous tensors for each device, in the order of the devices; none for this rank itself."""


def exchange_pieces(
    comm: Communicator, leaving: Pieces, coming: Pieces, devices: tuple[int, ...], blank: torch.Tensor
) -> tuple[Pending, Pending]:
    """Start sending ``leaving[i]`` to device i, and receiving what it sends into ``coming[i]``, piece by piece: both sides agree on sizes.

    ``blank``: an empty tensor. Returns (what waits until everything has come, what waits until everything has left). The pieces must not
    change until they have left; the communicator keeps them till then.
    """
    wires: dict[int, torch.Tensor] = {}
    finishes: list[Callable[[], None]] = []

    def landing(piece: torch.Tensor) -> torch.Tensor:
        wire, finish = comm.from_wire(plain(piece))
        if finish is not None:
            finishes.append(finish)
        return wire

    def leaves(piece: torch.Tensor) -> torch.Tensor:
        if id(piece) not in wires:  # the same piece goes to several devices
            wires[id(piece)] = comm.to_wire(plain(piece))
        return wires[id(piece)]

    received, sent = comm.post([[landing(p) for p in own] for own in coming], [[leaves(p) for p in own] for own in leaving], devices)
    left = Pending(sent, blank, further=tuple(wires.values()))
    comm.keep(left)
    arrived = Pending(received, blank)
    for finish in finishes:
        arrived.then(finish)
    return arrived, left


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
