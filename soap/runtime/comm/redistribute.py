"""Moving regions: messages, collectives over groups, and putting pieces together. One code path for gloo and NCCL.

Every call of a rank follows the program's global order, which all that take part share. NCCL matches messages by this order,
gloo by tags as well. CUDA tensors under gloo travel through pinned host memory.

All-gather and reduce-scatter are all-to-alls: gloo's own reduce-scatter sends whole buffers around (more slowly than its all-reduce), its
all-gather wants equal sizes and takes its steps one after the other. Equal runs add in equal order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist

from soap.model.regions import Box, lengths, relative
from soap.runtime.comm.failures import tell_before_leaving
from soap.runtime.comm.packing import pack, plain
from soap.runtime.comm.position import HERE
from soap.runtime.system import clock
from soap.runtime.system.gloo_threads import calm_gloo
from soap.simulator.memory.transit import SENT_BYTES, SENT_TENSORS

EXCHANGE_TAG = 2**30
"""Apart from the numbers of messages and gradients."""


@dataclass
class Traffic:
    """Payload bytes of this rank in training steps: pieces sent and received, of these received by exchanges, and sums over groups (the
    size of the buffer, counted on every member; of those, sums of which each member has a cell).

    Sent and received together, of what servers keep: values or rows that are pulled, gradients that are pushed, and both between a leader
    and the other members of its host (handed); rows of gradients that readers give each other (gathered); for all of these, which rows
    they are, and how many (index).
    """

    sent_bytes: int = 0
    received_bytes: int = 0
    exchanged_bytes: int = 0
    reduced_bytes: int = 0
    scattered_bytes: int = 0
    synchronized_bytes: int = 0
    pulled_bytes: int = 0
    pushed_bytes: int = 0
    handed_bytes: int = 0
    gathered_bytes: int = 0
    index_bytes: int = 0


class Pending:
    """A communication under way. ``wait`` blocks until its tensor may be used, and may be called again. ``name``: of its task, if known."""

    def __init__(self, works: Sequence[dist.Work], tensor: torch.Tensor, finish: Callable[[], object] | None = None) -> None:
        self.tensor = tensor
        self.name = ""
        self._works = works
        self._steps: list[Callable[[], object]] = [] if finish is None else [finish]
        self._watched: Future[None] | None = None

    def then(self, step: Callable[[], None]) -> Pending:
        """Do something more before the tensor may be used, when somebody first waits for it."""
        self._steps.append(step)
        return self

    def watch(self, submit: Callable[[Callable[[], None]], Future[None]]) -> None:
        """Leave the waiting to another thread, which sees when it ends; ``wait`` then waits for that thread."""
        self._watched = submit(self._wait_works)

    def wait(self) -> torch.Tensor:
        """The tensor, once it is complete."""
        if self._works or self._watched is not None:
            clock.catch_up()
            HERE.waits = self
            if self._watched is not None:
                self._watched.result()
                clock.resume()
            else:
                self._wait_works(clock.resume)
            HERE.waits = None  # if this fails, it is where the rank was
        steps, self._steps = self._steps, []
        for step in steps:
            step()
        return self.tensor

    def let_go(self) -> None:
        """Wait, and hold the tensor no longer."""
        self.tensor = self.wait().new_empty(0)

    @property
    def is_over(self) -> bool:
        """Whether its tensor is no longer needed; messages under gloo cannot tell before they are waited for."""
        return all(work.is_completed() for work in self._works)

    def _wait_works(self, resume: Callable[[], None] = lambda: None) -> None:
        for work in self._works:
            work.wait()
            resume()
        self._works = ()


class Communicator:
    """This rank's connection to the others. Must be made by all ranks at once, with the same groups.

    ``messages_apart``: whether one rank may start a collective before some message, or an exchange, and another rank behind that.
    """

    def __init__(self, device: torch.device, groups: Iterable[Sequence[int]], timeout: timedelta) -> None:
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.device = device
        self.traffic = Traffic()
        self._nccl = dist.get_backend() == "nccl"
        self.messages_apart = not self._nccl  # there they are in one queue, which must be the same on all ranks
        self._staged = device.type != "cpu" and not self._nccl
        self._timeout = timeout
        self._groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {tuple(range(self.world_size)): None}
        self.open_groups(groups)
        self._sends: deque[Pending] = deque()
        self._left: list[Pending] = []
        if self._nccl:  # a batch of messages may be the first thing on a communicator only if all ranks take part
            dist.all_reduce(torch.zeros(1, device=device))

    def open_groups(self, groups: Iterable[Sequence[int]]) -> None:
        """Make the groups that are not there yet; on all ranks at once, with the same groups."""
        for devices in sorted({tuple(group) for group in groups} - self._groups.keys()):
            self._groups[devices] = dist.new_group(list(devices), timeout=self._timeout)
        calm_gloo()

    def send(self, tensor: torch.Tensor, target: int, tag: int) -> Pending:
        """Start sending; ``finish_sends`` waits for it. The tensor must not change until then."""
        wire = self._to_wire(plain(tensor.detach().contiguous()))
        pending = Pending(self._point_to_point(dist.isend, wire, target, tag), wire)
        self.keep(pending)
        return pending

    def receive(self, buffer: torch.Tensor, source: int, tag: int) -> Pending:
        """Start receiving into a contiguous buffer."""
        wire, finish = self._from_wire(plain(buffer))
        return Pending(self._point_to_point(dist.irecv, wire, source, tag), buffer, finish)

    def all_reduce(self, tensor: torch.Tensor, devices: tuple[int, ...]) -> Pending:
        """Start summing a contiguous tensor in place over the devices; with a single one there is nothing to do."""
        if len(devices) < 2:
            return Pending((), tensor)
        wire, finish = self._through_wire(plain(tensor))
        return Pending((_work(dist.all_reduce(wire, group=self._groups[devices], async_op=True)),), tensor, finish)

    def reduce(self, tensor: torch.Tensor, target: int, devices: tuple[int, ...]) -> Pending:
        """Start summing a contiguous tensor over the devices; only the target's own becomes the sum, the others' are lost."""
        wire, finish = self._through_wire(plain(tensor))
        pending = Pending((_work(dist.reduce(wire, target, group=self._groups[devices], async_op=True)),), tensor, finish)
        if self.rank != target:
            self.keep(pending)
        return pending

    def broadcast(self, tensor: torch.Tensor, source: int, devices: tuple[int, ...] | None = None) -> Pending:
        """Start copying a contiguous tensor from one rank to the devices (all ranks if None)."""
        group = None if devices is None else self._groups[devices]
        wire, finish = self._through_wire(plain(tensor))
        return Pending((_work(dist.broadcast(wire, source, group=group, async_op=True)),), tensor, finish)

    def all_to_all(
        self, parcels: Sequence[Sequence[torch.Tensor]], buffer: torch.Tensor, sizes: Sequence[int], devices: tuple[int, ...]
    ) -> Pending:
        """Start giving each device what is meant for it: ``parcels``, in the order of the devices, perhaps empty.

        What comes lands in the flat ``buffer``, in the same order; ``sizes``: elements from each device. All have one dtype.
        """
        content = [tensor for parcel in parcels for tensor in parcel]
        given = [sum(tensor.numel() for tensor in parcel) for parcel in parcels]
        sent = self._to_wire(plain(pack(content) if content else buffer.new_empty(0)))
        wire, finish = self._from_wire(plain(buffer))
        if self._nccl:
            group = self._groups[devices]
            work = _work(dist.all_to_all_single(wire, sent, list(sizes), given, group=group, async_op=True))
            self.keep(Pending((work,), sent))
            return Pending((work,), buffer, finish)
        coming, leaving = self._each_to_each(torch.split(wire, list(sizes)), torch.split(sent, given), devices)
        self.keep(Pending(leaving, sent))
        return Pending(coming, buffer, finish)

    def _each_to_each(
        self, coming: Sequence[torch.Tensor], leaving: Sequence[torch.Tensor], devices: tuple[int, ...]
    ) -> tuple[list[dist.Work], list[dist.Work]]:
        """An all-to-all of messages, of which all are expected before any is sent.

        gloo asks for a message on the connection on which it sends, behind what is on its way there: its own all-to-all sends before it
        asks, so that a rank that comes late gets nothing until it has sent all of its own. On a 200 Mbit/s link that took twice as long.
        The group's own methods: on a CPU what ``dist.isend`` adds to them takes as long as they do.
        """
        place, group = devices.index(self.rank), self._groups[devices] or dist.group.WORLD
        assert group is not None
        coming[place].copy_(leaving[place])
        turns = [(place + turn) % len(devices) for turn in range(1, len(devices))]
        received = [group.recv([coming[i]], i, EXCHANGE_TAG) for i in reversed(turns) if coming[i].numel()]
        sent = [group.send([leaving[i]], i, EXCHANGE_TAG) for i in turns if leaving[i].numel()]
        return received, sent

    def reduce_scatter(self, parts: Sequence[torch.Tensor], devices: tuple[int, ...]) -> Pending:
        """Start summing over the devices, of which each gets one part: ``parts`` in the order of the devices."""
        place = devices.index(self.rank)
        own = parts[place].clone(memory_format=torch.contiguous_format)
        others = [[] if i == place else [part] for i, part in enumerate(parts)]
        sizes = [0 if i == place else own.numel() for i in range(len(devices))]
        buffer = own.new_empty(sum(sizes))
        pending = self.all_to_all(others, buffer, sizes, devices)

        def add() -> None:
            for block in buffer.view(len(devices) - 1, *own.shape):
                own.add_(block)

        pending.tensor = own
        return pending.then(add)

    def release(self, pending: Pending) -> None:
        """Forget something sent of which is known that it has arrived."""
        pending.wait()
        self._sends = deque(other for other in self._sends if other is not pending)

    def keep(self, pending: Pending) -> None:
        """Remember what was sent until it has left. When it has become much, the oldest is waited for: its targets get to it without us."""
        self._sends = deque(other for other in self._sends if not other.is_over)
        self._left = [other for other in self._left if not other.is_over]
        self._sends.append(pending)
        while len(self._sends) > SENT_TENSORS or (len(self._sends) > 1 and sum(other.tensor.nbytes for other in self._sends) > SENT_BYTES):
            self._sends.popleft().let_go()

    def leave(self, pending: Pending) -> None:
        """Remember a sum that nobody reads here until it is over. It is not waited for in between: others may wait for us before they
        come to it."""
        self._left = [other for other in self._left if not other.is_over]
        self._left.append(pending)

    def finish_sends(self) -> None:
        """Wait until everything that was sent has left, and for what nobody reads."""
        while self._left:
            self._left.pop().let_go()
        while self._sends:
            self._sends.popleft().let_go()

    def close(self) -> None:
        """Give up the groups; on all ranks at once. If that is because of an error, this is told first."""
        tell_before_leaving()
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

    def _to_wire(self, tensor: torch.Tensor) -> torch.Tensor:
        """What can be sent of a contiguous tensor, now: itself, or a copy in host memory."""
        clock.catch_up()
        if not self._staged:
            return tensor
        staged = _host_memory(tensor)
        staged.copy_(tensor, non_blocking=True)
        torch.cuda.current_stream(self.device).synchronize()
        return staged

    def _from_wire(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Callable[[], None] | None]:
        """Where to receive a contiguous tensor, and what brings it from there to its place."""
        if not self._staged:
            return tensor, None
        staged = _host_memory(tensor)
        return staged, partial(_copy, tensor, staged)

    def _through_wire(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Callable[[], None] | None]:
        """What a collective can change in place, and what brings the outcome to the tensor."""
        wire = self._to_wire(tensor)
        return wire, None if wire is tensor else partial(_copy, tensor, wire)

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


def _host_memory(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source, non_blocking=True)  # of pinned memory: the allocator keeps it until the stream is there


def _work(work: dist.Work | None) -> dist.Work:
    assert work is not None, "a rank that takes part in a communication is a member of its group"
    return work
