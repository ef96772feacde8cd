"""Moving regions: point-to-point pieces, sums over groups, and putting pieces together. One code path for gloo and NCCL.

Every call of a rank follows the program's global order, which both ends of each message share. NCCL matches messages by this order,
gloo by tags as well. CUDA tensors under gloo travel through host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist

from soap.regions import Box, lengths, relative


@dataclass
class Traffic:
    """Payload bytes of this rank in training steps: sent and received point to point, and summed over groups (the size of the buffer,
    counted on every member)."""

    sent_bytes: int = 0
    received_bytes: int = 0
    reduced_bytes: int = 0
    synchronized_bytes: int = 0


class Pending:
    """A communication under way. ``wait`` blocks until its tensor may be used, and may be called again."""

    def __init__(self, works: Sequence[dist.Work], tensor: torch.Tensor, finish: Callable[[], None] | None = None) -> None:
        self.tensor = tensor
        self._works = works
        self._finish = finish
        self._watched: Future[None] | None = None

    def watch(self, submit: Callable[[Callable[[], None]], Future[None]]) -> None:
        """Leave the waiting to another thread, which sees when it ends; ``wait`` then waits for that thread."""
        self._watched = submit(self._wait_works)

    def wait(self) -> torch.Tensor:
        """The tensor, once it is complete."""
        if self._watched is not None:
            self._watched.result()
        else:
            self._wait_works()
        if self._finish is not None:
            self._finish()
            self._finish = None
        return self.tensor

    def _wait_works(self) -> None:
        for work in self._works:
            work.wait()
        self._works = ()


class Communicator:
    """This rank's connection to the others. Must be made by all ranks at once, with the same groups."""

    def __init__(self, device: torch.device, groups: Iterable[Sequence[int]], timeout: timedelta) -> None:
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.device = device
        self.traffic = Traffic()
        self._nccl = dist.get_backend() == "nccl"
        self._staged = device.type != "cpu" and not self._nccl
        self._timeout = timeout
        self._groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {tuple(range(self.world_size)): None}
        self.open_groups(groups)
        self._sends: list[Pending] = []
        if self._nccl:  # a batch of messages may be the first thing on a communicator only if all ranks take part
            dist.all_reduce(torch.zeros(1, device=device))

    def open_groups(self, groups: Iterable[Sequence[int]]) -> None:
        """Make the groups that are not there yet; on all ranks at once, with the same groups."""
        for devices in sorted({tuple(group) for group in groups} - self._groups.keys()):
            self._groups[devices] = dist.new_group(list(devices), timeout=self._timeout)

    def send(self, tensor: torch.Tensor, target: int, tag: int) -> Pending:
        """Start sending; ``finish_sends`` waits for it. The tensor must not change until then."""
        wire = _wire(tensor.detach().contiguous())
        wire = wire.cpu() if self._staged else wire
        pending = Pending(self._point_to_point(dist.isend, wire, target, tag), wire)
        self._sends.append(pending)
        return pending

    def receive(self, buffer: torch.Tensor, source: int, tag: int) -> Pending:
        """Start receiving into a contiguous buffer."""
        wire = _wire(buffer)
        if not self._staged:
            return Pending(self._point_to_point(dist.irecv, wire, source, tag), buffer)
        staged = torch.empty_like(wire, device="cpu")
        return Pending(self._point_to_point(dist.irecv, staged, source, tag), buffer, lambda: _copy(wire, staged))

    def all_reduce(self, tensor: torch.Tensor, devices: tuple[int, ...]) -> Pending:
        """Start summing a contiguous tensor in place over the devices; with a single one there is nothing to do."""
        if len(devices) < 2:
            return Pending((), tensor)
        if not self._staged:
            return Pending((_work(dist.all_reduce(tensor, group=self._groups[devices], async_op=True)),), tensor)
        staged = tensor.cpu()
        work = _work(dist.all_reduce(staged, group=self._groups[devices], async_op=True))
        return Pending((work,), tensor, lambda: _copy(tensor, staged))

    def broadcast(self, tensor: torch.Tensor, source: int, devices: tuple[int, ...] | None = None) -> Pending:
        """Start copying a contiguous tensor from one rank to the devices (all ranks if None)."""
        group = None if devices is None else self._groups[devices]
        if not self._staged:
            return Pending((_work(dist.broadcast(tensor, source, group=group, async_op=True)),), tensor)
        staged = tensor.cpu()
        work = _work(dist.broadcast(staged, source, group=group, async_op=True))
        return Pending((work,), tensor, lambda: _copy(tensor, staged))

    def finish_sends(self) -> None:
        """Wait until everything that was sent has left."""
        for pending in self._sends:
            pending.wait()
        self._sends.clear()

    def close(self) -> None:
        """Give up the groups; on all ranks at once."""
        for group in self._groups.values():
            if group is not None:
                dist.destroy_process_group(group)
        self._groups.clear()

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.all_reduce(torch.zeros(1, device=self.device), tuple(range(self.world_size))).wait()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def gather(self, value: object) -> list[Any]:
        """A small object of every rank, on every rank."""
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def _point_to_point(self, operation: Callable[..., Any], wire: torch.Tensor, peer: int, tag: int) -> list[dist.Work]:
        if self._nccl:
            return dist.batch_isend_irecv([dist.P2POp(operation, wire, peer)])
        return [_work(operation(wire, peer, tag=tag))]


class _Assemble(torch.autograd.Function):
    """Disjoint pieces that cover a box, as one tensor; the gradient is cut along the same lines."""

    @staticmethod
    def forward(ctx: Any, box: Box, boxes: Sequence[Box], *pieces: torch.Tensor) -> torch.Tensor:
        ctx.box, ctx.boxes = box, boxes
        whole = pieces[0].new_empty(lengths(box))
        for own, piece in zip(boxes, pieces, strict=True):
            whole[relative(own, box)] = piece
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        needed = ctx.needs_input_grad[2:]
        parts = [gradients[0][relative(own, ctx.box)] if need else None for own, need in zip(ctx.boxes, needed, strict=True)]
        return (None, None, *parts)


def assemble(box: Box, boxes: Sequence[Box], pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    """One tensor for ``box`` from pieces that hold ``boxes``; differentiable. A single piece that is the box is returned as it is."""
    if len(boxes) == 1 and boxes[0] == box:
        return pieces[0]
    return cast(torch.Tensor, _Assemble.apply(box, tuple(boxes), *pieces))  # type: ignore[no-untyped-call]


def cut(tensor: torch.Tensor, held: Box, box: Box) -> torch.Tensor:
    """The part ``box`` of a tensor that holds ``held``: a view, or the tensor itself."""
    return tensor if box == held else tensor[relative(box, held)]


def _wire(tensor: torch.Tensor) -> torch.Tensor:
    """Bytes for types that backends do not know."""
    return tensor.view(torch.uint8) if tensor.dtype is torch.bool else tensor


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source)


def _work(work: dist.Work | None) -> dist.Work:
    assert work is not None, "a rank that takes part in a communication is a member of its group"
    return work
