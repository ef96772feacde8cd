"""All-to-all without copies: each device sends pieces from where they lie, and receives others' where they belong.

A piece is a message. So this is for few large pieces; many small ones are packed first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from soap.runtime.comm.packing import plain
from soap.runtime.comm.redistribute import Communicator, Pending

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
