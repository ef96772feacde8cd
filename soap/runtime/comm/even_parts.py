"""Collectives of equal parts: all-gathers and reduce-scatters, as NCCL has them.

gloo has both as well, though its reduce-scatter is an all-reduce. Plans ask for them between accelerators alone
(``plan.syncs.even_parts``).
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from soap.runtime.comm.packing import plain
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
