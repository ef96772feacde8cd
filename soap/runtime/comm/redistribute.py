"""Moving tensors: messages, and collectives over groups. One code path for gloo and NCCL.

Every rank calls in the program's global order. NCCL matches messages by this order, gloo by tags as well. CUDA tensors under gloo travel
through pinned host memory.

All-gather and reduce-scatter are done as all-to-alls: gloo's own reduce-scatter sends whole buffers (slower than its all-reduce), and its
all-gather needs equal sizes and runs its steps one after the other. Sums add in a fixed order, so that equal runs give equal bits.

Groups are made by their members alone. ``torch.distributed.new_group`` wants to be called on all ranks, because it counts the groups of a
process, and the count is a group's name in the store. Ranks that make their own groups only have to agree on names in another way.
``use_local_synchronization`` does not help: it names a group by its members and by how many groups the process is in (torch 2.13), which
differs between members as soon as groups overlap. So the count is set to the group's number among all, which rank 0 has told. No cycle of
ranks that wait for each other: members make their groups by ascending numbers.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from soap.errors import RuntimeFailure
from soap.runtime.comm import signs
from soap.runtime.comm.failures import tell_before_leaving
from soap.runtime.comm.handing_out import hand_out
from soap.runtime.comm.packing import as_bytes, pack, plain
from soap.runtime.comm.position import HERE
from soap.runtime.system import clock
from soap.runtime.system.process import calm_gloo
from soap.simulator.memory.transit import SENT_BYTES, SENT_TENSORS

Groups = dict[tuple[int, ...], dist.ProcessGroup | None]
"""Devices, ascending -> their group; None for the group of all. Devices, descending -> a second group of the same: gloo requests a message
on the connection on which it sends, so requests queue behind data, and what goes one way would wait for all that goes the other."""


def all_make_all() -> bool:
    """Whether all ranks make every group: NCCL splits a communicator bound to a GPU, or torch was told to wait for all after each."""
    world = dist.group.WORLD
    return (world is not None and world.bound_device_id is not None) or os.environ.get("TORCH_DIST_INIT_BARRIER") == "1"


def needed_by(groups: Sequence[tuple[int, ...]], ranks: int) -> list[dict[int, tuple[int, ...]]]:
    """By rank, the groups that it has to make, by number."""
    if all_make_all():
        return [dict(enumerate(groups))] * ranks
    found: list[dict[int, tuple[int, ...]]] = [{} for _ in range(ranks)]
    for number, devices in enumerate(groups):
        for device in devices:
            found[device][number] = devices
    return found


def make_groups(known: Groups, groups: Mapping[int, tuple[int, ...]], count: int, timeout: timedelta) -> None:
    """Make those that are not known. Called on all ranks at once, with at least their own groups, and equal numbers below ``count``."""
    world, rank, all_of_them = distributed_c10d._world, dist.get_rank(), all_make_all()
    if not isinstance(getattr(world, "group_count", None), int):  # torch's own matter, as 2.11 to 2.13 have it
        raise RuntimeFailure(f"torch {torch.__version__} counts process groups in a way that we do not know; expected torch 2.11 to 2.13")
    first = world.group_count
    for number, devices in sorted(groups.items()):
        if devices not in known and (all_of_them or rank in devices):
            world.group_count = first + number
            known[devices] = dist.new_group(list(devices), timeout=timeout)
    world.group_count = first + count


@dataclass
class Traffic:
    """Payload bytes that this rank has moved in training steps.

    ``sent``, ``received``: pieces of activations and of their gradients; ``exchanged``: the part that exchanges received. ``reduced``: sums
    over groups, by size of the buffer, counted on every member; ``scattered``: the part in which each member has a cell.
    ``synchronized``: all-reduced gradients.

    Sent and received together: ``pulled``: values or rows from owners; ``pushed``: gradients to owners; ``handed``: both between a leader
    and the other members of its host; ``gathered``: row gradients that readers give each other; ``index``: row numbers and counts of these;
    ``compressed``: messages of compressed gradients.

    To no other rank: ``offloaded``: what operators keep, copied to the host; ``restored``: copied back.
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
    compressed_bytes: int = 0
    offloaded_bytes: int = 0
    restored_bytes: int = 0


EXCHANGE_TAG = 2**30
"""Tag of all-to-alls, above the tags of messages and gradients. Above it are those of answers."""


class Pending:
    """A communication under way; ``wait`` blocks until its tensor may be used. ``name``: of its task. ``further``: more tensors of it."""

    def __init__(
        self,
        works: Sequence[dist.Work],
        tensor: torch.Tensor,
        finish: Callable[[], object] | None = None,
        further: Sequence[torch.Tensor] = (),
    ) -> None:
        self.tensor, self.further = tensor, further
        self.name = ""
        self._works = works
        self._steps: list[Callable[[], object]] = [] if finish is None else [finish]
        self._watched: Future[None] | None = None

    def then(self, step: Callable[[], None]) -> Pending:
        """Add a step that runs at the first ``wait``, before the tensor may be used."""
        self._steps.append(step)
        return self

    def watch(self, submit: Callable[[Callable[[], None]], Future[None]]) -> None:
        """Let another thread wait and note the end; ``wait`` then waits for that thread."""
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
            HERE.waits = None  # not in a finally clause: after a failure it tells where the rank was
        steps, self._steps = self._steps, []
        for step in steps:
            step()
        return self.tensor

    def let_go(self) -> None:
        """Wait, then drop the tensors."""
        self.tensor, self.further = self.wait().new_empty(0), ()

    @property
    def held_bytes(self) -> int:
        """The size of all tensors."""
        return self.tensor.nbytes + sum(tensor.nbytes for tensor in self.further)

    @property
    def is_over(self) -> bool:
        """Whether its tensor is no longer needed. For messages under gloo that is unknown until they are waited for."""
        return all(work.is_completed() for work in self._works)

    def _wait_works(self, resume: Callable[[], None] = lambda: None) -> None:
        for work in self._works:
            work.wait()
            resume()
        self._works = ()


class Communicator:
    """This rank's connection to the others. Must be made by all ranks at once, with the same groups.

    ``messages_apart``: whether collectives and messages have separate queues. Then one rank may start a collective before a message or an
    exchange, and another rank after it.
    """

    def __init__(self, device: torch.device, groups: Iterable[Sequence[int]], timeout: timedelta) -> None:
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.device = device
        self.traffic = Traffic()
        self._nccl = dist.get_backend() == "nccl"
        self.messages_apart = not self._nccl  # NCCL has one queue for both, whose order must be the same on all ranks
        self._staged = device.type != "cpu" and not self._nccl
        self._timeout = timeout
        self.groups: Groups = {tuple(range(self.world_size)): None}
        self.open_groups(groups)
        self._sends: deque[Pending] = deque()
        self._left: list[Pending] = []
        if self._nccl:  # a batch of messages may come first on a communicator only if all ranks take part
            dist.all_reduce(torch.zeros(1, device=device))

    def open_groups(self, groups: Iterable[Sequence[int]]) -> None:
        """Make the groups that do not exist yet; called on all ranks at once, with the same groups."""
        every = sorted({tuple(group) for group in groups})
        self.open_numbered(dict(enumerate(every)), len(every))

    def open_numbered(self, groups: Mapping[int, tuple[int, ...]], count: int) -> None:
        """The same, by numbers below ``count``: a rank needs to name those groups alone that it is in (``needed_by``)."""
        make_groups(self.groups, groups, count, self._timeout)
        calm_gloo()

    def send(self, tensor: torch.Tensor, target: int, tag: int) -> Pending:
        """Start sending; ``finish_sends`` waits for it. The tensor must not change until then."""
        if not tensor.numel():
            return Pending((), tensor)  # of routed rows, of which there may be none: the other end knows
        wire = self.to_wire(plain(tensor.detach().contiguous()))
        pending = Pending(self._point_to_point(dist.isend, wire, target, tag, target < self.rank), wire)
        self.keep(pending)
        return pending

    def receive(self, buffer: torch.Tensor, source: int, tag: int) -> Pending:
        """Start receiving into a contiguous buffer."""
        if not buffer.numel():
            return Pending((), buffer)
        wire, finish = self.from_wire(plain(buffer))
        return Pending(self._point_to_point(dist.irecv, wire, source, tag, self.rank < source), buffer, finish)

    def all_reduce(self, tensor: torch.Tensor, devices: tuple[int, ...]) -> Pending:
        """Start summing a contiguous tensor in place over the devices. A single device has nothing to do."""
        if len(devices) < 2:
            return Pending((), tensor)
        wire, finish = self.through_wire(plain(tensor))
        return Pending((_work(dist.all_reduce(wire, group=self.groups[devices], async_op=True)),), tensor, finish)

    def reduce(self, tensor: torch.Tensor, target: int, devices: tuple[int, ...]) -> Pending:
        """Start summing a contiguous tensor over the devices. The target's tensor becomes the sum; the others' values are lost."""
        wire, finish = self.through_wire(plain(tensor))
        pending = Pending((_work(dist.reduce(wire, target, group=self.groups[devices], async_op=True)),), tensor, finish)
        if self.rank != target:
            self.keep(pending)
        return pending

    def broadcast(self, tensor: torch.Tensor, source: int, devices: tuple[int, ...] | None = None) -> Pending:
        """Start copying a contiguous tensor from one rank to the devices (all ranks if None)."""
        group = None if devices is None else self.groups[devices]
        wire, finish = self.through_wire(as_bytes(tensor))
        return Pending((_work(dist.broadcast(wire, source, group=group, async_op=True)),), tensor, finish)

    def all_to_all(
        self,
        parcels: Sequence[Sequence[torch.Tensor]],
        buffer: torch.Tensor,
        sizes: Sequence[int],
        devices: tuple[int, ...],
        *,
        answers: int | None = None,
    ) -> Pending:
        """Start an all-to-all. ``parcels``: tensors for each device, in the order of the devices; may be empty. ``answers``: see ``post``.

        Received elements land in the flat ``buffer``, in the order of the devices; ``sizes``: how many come from each. One dtype for all.
        """
        nothing = buffer.new_empty(0)
        wire, finish = self.from_wire(plain(buffer))
        if self._nccl:
            content = [tensor for parcel in parcels for tensor in parcel]
            given = [sum(tensor.numel() for tensor in parcel) for parcel in parcels]
            sent = plain(pack(content) if content else nothing)
            group = self.groups[devices]
            work = _work(dist.all_to_all_single(wire, sent, list(sizes), given, group=group, async_op=True))
            self.keep(Pending((work,), sent))
            return Pending((work,), buffer, finish)
        leaves = [self.to_wire(plain(pack(parcel) if parcel else nothing)) for parcel in parcels]  # a single tensor is not copied
        coming, leaving = self._each_to_each(torch.split(wire, list(sizes)), leaves, devices, answers=answers)
        self.keep(Pending(leaving, nothing, further=leaves))
        return Pending(coming, buffer, finish)

    def _each_to_each(
        self, coming: Sequence[torch.Tensor], leaving: Sequence[torch.Tensor], devices: tuple[int, ...], *, answers: int | None = None
    ) -> tuple[list[dist.Work], list[dist.Work]]:
        """An all-to-all of messages."""
        place = devices.index(self.rank)
        coming[place].copy_(leaving[place])
        return self.post([[tensor] for tensor in coming], [[tensor] for tensor in leaving], devices, answers=answers)

    def post(
        self,
        coming: Sequence[Sequence[torch.Tensor]],
        leaving: Sequence[Sequence[torch.Tensor]],
        devices: tuple[int, ...],
        *,
        answers: int | None = None,
    ) -> tuple[list[dist.Work], list[dist.Work]]:
        """Start receiving ``coming[i]`` from device i, and sending it ``leaving[i]``: contiguous tensors, a message for each that is not
        empty. What is given to this rank itself is left out. Returns what waits for receives, and what waits for sends. ``answers``: the
        number of the exchange that this one answers. It goes by the devices' second group, if they have one, as the first may still be
        under way. Under gloo, answers may be awaited in another order than they are sent in.

        All receives are posted before any send. gloo requests a message on the same connection on which it sends, so the request queues
        behind data. Its own all-to-all sends first: a late rank then receives nothing until it has sent everything, which took twice as
        long on a 200 Mbit/s link. We call the group's own methods, because on a CPU the overhead of ``dist.isend`` doubles the time of the
        call.
        """
        second = None if answers is None else self.groups.get(devices[::-1])
        place, group = devices.index(self.rank), second or self.groups[devices] or dist.group.WORLD
        assert group is not None
        turns = [(place + turn) % len(devices) for turn in range(1, len(devices))]
        received = [(i, tensor) for i in reversed(turns) for tensor in coming[i] if tensor.numel()]
        sent = [(i, tensor) for i in turns for tensor in leaving[i] if tensor.numel()]
        if self._nccl:
            moves = [dist.P2POp(dist.irecv, tensor, devices[i], group) for i, tensor in received]
            moves += [dist.P2POp(dist.isend, tensor, devices[i], group) for i, tensor in sent]
            works = dist.batch_isend_irecv(moves) if moves else []
            return works, works
        tag = EXCHANGE_TAG if answers is None else EXCHANGE_TAG + 1 + answers
        return [group.recv([tensor], i, tag) for i, tensor in received], [group.send([tensor], i, tag) for i, tensor in sent]

    def reduce_scatter(self, parts: Sequence[torch.Tensor], devices: tuple[int, ...]) -> Pending:
        """Start a reduce-scatter: device i gets the sum of ``parts[i]``, in the order of the devices."""
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

    def all_gather(self, message: torch.Tensor, devices: tuple[int, ...]) -> Pending:
        """Start an all-gather of contiguous tensors of one shape. Gives all of them as rows, in the order of the devices."""
        wire = self.to_wire(message)
        return self._rows(wire, [wire] * len(devices), message, devices)

    def gather_ragged(
        self, message: torch.Tensor, sizes: Sequence[int], devices: tuple[int, ...], buffer: torch.Tensor | None = None
    ) -> Pending:
        """Start an all-gather of flat tensors of unlike ``sizes``, in elements, in the order of the devices. Gives all of them, one behind
        the other, in ``buffer`` if that is given. Gloo has no such collective, and NCCL's all-gather wants equal sizes: it is an
        all-to-all."""
        sent, buffer = self.to_wire(message), message.new_empty(sum(sizes)) if buffer is None else buffer
        wire, finish = self.from_wire(buffer)
        return self._all_to_each(sent, [sent] * len(devices), torch.split(wire, list(sizes)), buffer, finish, devices)

    def rows_to_all(self, rows: torch.Tensor, devices: tuple[int, ...]) -> Pending:
        """Start an all-to-all: device i gets row i of this contiguous tensor. Gives the rows that came, in the order of the devices."""
        wire = self.to_wire(rows)
        return self._rows(wire, list(wire.unbind()), rows[0], devices)

    def _rows(self, sent: torch.Tensor, leaving: list[torch.Tensor], like: torch.Tensor, devices: tuple[int, ...]) -> Pending:
        """Start an all-to-all of ``leaving``, views of ``sent``. ``like``: a row on this rank's device."""
        buffer = like.new_empty((len(devices), *like.shape))
        wire, finish = self.from_wire(buffer)
        return self._all_to_each(sent, leaving, wire.unbind(), buffer, finish, devices)

    def _all_to_each(
        self,
        sent: torch.Tensor,
        leaving: list[torch.Tensor],
        places: Sequence[torch.Tensor],
        buffer: torch.Tensor,
        finish: Callable[[], None] | None,
        devices: tuple[int, ...],
    ) -> Pending:
        """Start an all-to-all of ``leaving``, views of ``sent``, into ``places``, from where ``finish`` brings it into ``buffer``."""
        if self._nccl:
            work = _work(dist.all_to_all(list(places), leaving, group=self.groups[devices], async_op=True))
            self.keep(Pending((work,), sent))
            return Pending((work,), buffer, finish)
        coming, left = self._each_to_each(places, leaving, devices)
        self.keep(Pending(left, sent))
        return Pending(coming, buffer, finish)

    def release(self, pending: Pending) -> None:
        """Forget a sent message that is known to have arrived."""
        pending.wait()
        self._sends = deque(other for other in self._sends if other is not pending)

    def keep(self, pending: Pending) -> None:
        """Keep a sent tensor alive until it has left. Of too many or too large ones wait for the oldest: receivers do not depend on us."""
        self._sends = deque(other for other in self._sends if not other.is_over)
        self._left = [other for other in self._left if not other.is_over]
        self._sends.append(pending)
        while len(self._sends) > SENT_TENSORS or (len(self._sends) > 1 and sum(other.held_bytes for other in self._sends) > SENT_BYTES):
            self._sends.popleft().let_go()

    def leave(self, pending: Pending) -> None:
        """Keep a sum that nobody reads here until it is over. Never wait for it in between: ranks may wait for us before they join it."""
        self._left = [other for other in self._left if not other.is_over]
        self._left.append(pending)

    def finish_sends(self) -> None:
        """Wait until everything sent has left, and until all sums that nobody reads here are over."""
        while self._left:
            self._left.pop().let_go()
        while self._sends:
            self._sends.popleft().let_go()

    def close(self) -> None:
        """Destroy the groups; called on all ranks at once. If an error is the reason, it is reported first."""
        tell_before_leaving()
        for group in self.groups.values():
            if group is not None:
                dist.destroy_process_group(group)
        self.groups.clear()

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.all_reduce(torch.zeros(1, device=self.device), tuple(range(self.world_size))).wait()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def gather_late(self, value: object) -> list[Any]:
        """``gather``, where a rank may come by hours later than others: what it has done before takes as long as it takes."""
        signs.meet()
        return self.gather(value)

    def gather(self, value: object) -> list[Any]:
        """Exchange small objects: the list of every rank's ``value``, on every rank."""
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def hand_out(self, make: Callable[[], Iterable[bytes]]) -> tuple[bytes, bytes]:
        """What rank 0's ``make`` has for all ranks, and for this one; called on all ranks at once."""
        return hand_out(self.rank, self.world_size, make)

    def to_wire(self, tensor: torch.Tensor) -> torch.Tensor:
        """What to send for a contiguous tensor: itself, or a finished copy in host memory."""
        clock.catch_up()
        if not self._staged:
            return tensor
        staged = _host_memory(tensor)
        staged.copy_(tensor, non_blocking=True)
        torch.cuda.current_stream(self.device).synchronize()
        return staged

    def from_wire(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Callable[[], None] | None]:
        """(where to receive a contiguous tensor, function that then copies it to its place; None if it is the place)."""
        if not self._staged:
            return tensor, None
        staged = _host_memory(tensor)
        return staged, partial(_copy, tensor, staged)

    def through_wire(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Callable[[], None] | None]:
        """(what a collective changes in place, function that then copies the result to the tensor; None if it is the tensor)."""
        wire = self.to_wire(tensor)
        return wire, None if wire is tensor else partial(_copy, tensor, wire)

    def _point_to_point(self, operation: Callable[..., Any], wire: torch.Tensor, peer: int, tag: int, back: bool) -> list[dist.Work]:
        """``back``: to a lower rank; by the second group of all, if there is one."""
        if self._nccl:
            return dist.batch_isend_irecv([dist.P2POp(operation, wire, peer)])
        group = self.groups.get(tuple(reversed(range(self.world_size)))) if back else None
        return [_work(operation(wire, peer, tag=tag, group=group))]


def _host_memory(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source, non_blocking=True)  # the allocator keeps pinned memory alive until the stream has copied it


def _work(work: dist.Work | None) -> dist.Work:
    assert work is not None, "a rank that takes part in a communication is a member of its group"
    return work
