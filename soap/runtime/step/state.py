"""The state of one step on one rank, which its forward pass leaves for its backward pass."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

import torch

from soap.model.dtypes import is_differentiable
from soap.model.regions import Box, lengths, volume
from soap.plan.delivery import reduced_tensor
from soap.plan.departures import PASSES_UNDER_WAY, Route
from soap.plan.running.activity import ValueKey
from soap.runtime.comm.packing import land, pack, plain
from soap.runtime.comm.redistribute import Communicator, Pending
from soap.runtime.program.program import Program
from soap.runtime.step.routed import RegionKey, Regions
from soap.runtime.trace import Recorder
from soap.simulator.tasks import TaskKind
from soap.tracing.execute import leaf_and_value

NOTHING: Mapping[ValueKey, int] = MappingProxyType({})
"""No readers."""


class ValueStore:
    """Values that segments start from, each with a leaf on which autograd leaves its gradient if it gets one.

    ``readers``: how often the forward pass reads each value. After the last reader it is dropped, unless it waits for ``second_readers``:
    how often second runs read it. Its leaf stays. ``dropped``: holdings that do not wait, because they are made again. ``gathered``:
    fetches with a leaf that wait until they have come a second time. ``takers``: how often its gradient is then taken (default 1). After
    the last taker it is dropped.
    """

    def __init__(
        self,
        readers: Mapping[ValueKey, int],
        takers: Mapping[ValueKey, int],
        second_readers: Mapping[ValueKey, int] = NOTHING,
        dropped: Collection[int] = (),
        gathered: Collection[int] = (),
    ) -> None:
        self._readers, self._takers = dict(readers), dict(takers)
        self._second_readers, self._dropped, self._gathered = dict(second_readers), dropped, gathered
        self._values: dict[ValueKey, torch.Tensor] = {}
        self._leaves: dict[ValueKey, torch.Tensor] = {}

    def __contains__(self, key: ValueKey) -> bool:
        return key in self._values

    def __len__(self) -> int:
        return len(self._values.keys() | self._leaves.keys())

    def __getitem__(self, key: ValueKey) -> torch.Tensor:
        return self._values[key]

    def put(self, key: ValueKey, tensor: torch.Tensor, takes_gradient: bool) -> torch.Tensor:
        """Note a value for its readers, and return it. ``takes_gradient``: whether it gets one, where its numbers may have one."""
        if takes_gradient and is_differentiable(tensor.dtype):
            self._leaves[key], self._values[key] = leaf_and_value(tensor)
        else:
            self._values[key] = tensor.detach()
        return self._values[key]

    def has_readers(self, key: ValueKey) -> bool:
        """Whether anything on this rank reads a value."""
        return key in self._readers

    def leave(self, key: ValueKey) -> bool:
        """Note that a reader has read the value, whether it is stored here or not. True if it was the last reader."""
        left = self._readers[key] = self._readers[key] - 1
        if left:
            return False
        if key[0] == "holding" and key[1] in self._dropped:
            self._leaves.pop(key, None)
            self._values.pop(key, None)
        elif not (key in self._leaves and key[0] == "fetch" and key[1] in self._gathered):
            self.drop(key)
        return True

    def drop(self, key: ValueKey) -> None:
        """Drop a value unless second runs read it."""
        if not self._second_readers.get(key):
            self._values.pop(key, None)

    def reads_again(self, key: ValueKey) -> bool:
        """Whether a second run reads a value that is not here: so it has to be made again for it."""
        return self._second_readers.get(key, 0) > 0 and key not in self._values

    def leave_again(self, key: ValueKey) -> bool:
        """``leave`` for a reader's second run."""
        left = self._second_readers[key] = self._second_readers[key] - 1
        if left:
            return False
        self._values.pop(key, None)
        return True

    def gradient(self, key: ValueKey) -> torch.Tensor | None:
        """The gradient that autograd has left on a value; None stands for zeros."""
        leaf = self._leaves.get(key)
        return None if leaf is None else leaf.grad

    def taken(self, key: ValueKey) -> None:
        """Note that a taker has used the gradient; drop it after the last one."""
        left = self._takers[key] = self._takers.get(key, 1) - 1
        if left == 0 and (leaf := self._leaves.pop(key, None)) is not None:
            leaf.grad = None  # an autograd graph that waits for its weight gradients still holds the leaf
            self._values.pop(key, None)


class Departures:
    """The messages of one step. Those of a pass are let go before a later one sends."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._passes: dict[Route, deque[tuple[int, list[Pending]]]] = {}

    def of(self, route: Route, sending: int) -> list[Pending]:
        """Where to note what this pass sends there. Waits until what too early ones have sent has left."""
        passes = self._passes.setdefault(route, deque())
        if not passes or passes[-1][0] != sending:
            passes.append((sending, []))
            if len(passes) > PASSES_UNDER_WAY:
                for pending in passes.popleft()[1]:
                    self._comm.release(pending)
        return passes[-1][1]


class Output(NamedTuple):
    """A segment's output whose gradient comes from outside: a ``holding``, or a partial result of a ``reduction``. ``root``: ``root_of``
    it. ``seed``: the constant that is added to its gradient, such as 1 for the loss; None if there is none."""

    root: torch.Tensor
    holding: int | None
    reduction: int | None
    seed: float | None


class StepState:
    """The values of one step that outlive their segment, and the communication that both passes use.

    ``values``: detached inputs of segments, until their last reader, and their gradients until these are taken. ``outputs``:
    segment -> the tensors that its backward pass starts from. ``sent``: messages on their way that a gradient answers, ``sent_again``:
    the same of their second time. ``share``: the gradient of this micro-batch's loss, ``MicroBatch.share``.
    """

    def __init__(
        self,
        program: Program,
        values: ValueStore,
        comm: Communicator,
        dtype_of: Callable[[str], torch.dtype],
        recorder: Recorder | None,
        share: float = 1.0,
    ) -> None:
        self.share, self.values = share, values
        self.program, self.plan, self.graph = program, program.plan, program.plan.graph
        self.comm, self.dtype_of = comm, dtype_of
        self._recorder = recorder
        self.outputs: dict[int, list[Output]] = {}
        self.sent: dict[int, Pending] = {}
        self.sent_again: dict[int, Pending] = {}
        self._departures = Departures(comm)
        self.regions = Regions(program.plan, dtype_of, comm.device)

    @property
    def rank(self) -> int:
        """This process's rank, which is also its device's number."""
        return self.comm.rank

    def empty(self, box: Box, tensor: str) -> torch.Tensor:
        """An uninitialized region of a tensor."""
        shape = (0, *lengths(box)[2:]) if tensor in self.graph.routed and not volume(box) else lengths(box)
        return torch.empty(shape, dtype=self.dtype_of(tensor), device=self.comm.device)

    def reduced_tensor(self, reduction: int) -> str:
        """The name of the tensor that a reduction computes a part of."""
        return reduced_tensor(self.plan, self.plan.reductions[reduction])

    def send(
        self, tensors: Sequence[torch.Tensor], target: int, tag: int, name: str, sending: tuple[Route, int] | None = None
    ) -> Pending:
        """Start sending tensors as one message. ``name``: of its task. ``sending``: route and pass, if nothing answers it."""
        noted = [] if sending is None else self._departures.of(*sending)
        pending = self.comm.send(pack(tensors), target, tag)
        noted.append(pending)
        self.comm.traffic.sent_bytes += _bytes(tensors)
        self.watch(name, TaskKind.TRANSFER, pending)
        return pending

    def receive(self, places: Sequence[torch.Tensor], source: int, tag: int, name: str) -> Pending:
        """Start receiving a message into ``places``. ``name``: of its task."""
        buffer, finish = land(places)
        pending = self.comm.receive(buffer, source, tag)
        self.comm.traffic.received_bytes += _bytes(places)
        self.watch(name, TaskKind.TRANSFER, pending)
        return pending if finish is None else pending.then(finish)

    def exchange(
        self,
        tensor: str,
        parcels: Sequence[Sequence[torch.Tensor]],
        places: Sequence[Sequence[torch.Tensor]],
        devices: tuple[int, ...],
        name: str,
    ) -> Pending:
        """Start an all-to-all of parts of a tensor: send ``parcels[i]`` to device i of ``devices``, receive from it into ``places[i]``.

        ``name``: of its task. What this rank gives itself does not count as traffic.
        """
        expected = [place for own in places for place in own]
        buffer, finish = land(expected) if expected else (self.empty(((0, 0),), tensor), None)
        sizes = [sum(place.numel() for place in own) for own in places]
        pending = self.comm.all_to_all(parcels, buffer, sizes, devices)
        others = [i for i, device in enumerate(devices) if device != self.rank]
        self._count_exchange(_bytes([t for i in others for t in parcels[i]]), _bytes([t for i in others for t in places[i]]))
        self.watch(name, TaskKind.EXCHANGE, pending)
        return pending if finish is None else pending.then(finish)

    def tell(self, tensor: torch.Tensor, targets: int, devices: tuple[int, ...], name: str) -> None:
        """Start a broadcast from this rank."""
        pending = self.comm.broadcast(pack([tensor]), self.rank, devices)
        self.comm.keep(pending)
        self._count_exchange(targets * tensor.nbytes, 0)
        self.watch(name, TaskKind.EXCHANGE, pending)

    def hear(self, place: torch.Tensor, source: int, devices: tuple[int, ...], name: str) -> Pending:
        """Start receiving a broadcast into ``place``."""
        buffer, finish = land([place])
        pending = self.comm.broadcast(buffer, source, devices)
        self._count_exchange(0, place.nbytes)
        self.watch(name, TaskKind.EXCHANGE, pending)
        return pending if finish is None else pending.then(finish)

    def sum_at(self, tensor: torch.Tensor, target: int, devices: tuple[int, ...], name: str) -> Pending:
        """Start summing a contiguous tensor at the target device, whose own tensor is zero; the other ranks' tensors are overwritten."""
        pending = self.comm.reduce(tensor, target, devices)
        at_target = self.rank == target
        self._count_exchange(0 if at_target else tensor.nbytes, (len(devices) - 1) * tensor.nbytes if at_target else 0)
        self.watch(name, TaskKind.EXCHANGE, pending)
        return pending

    def _count_exchange(self, sent_bytes: int, received_bytes: int) -> None:
        traffic = self.comm.traffic
        traffic.sent_bytes += sent_bytes
        traffic.received_bytes += received_bytes
        traffic.exchanged_bytes += received_bytes

    def sum_over(self, tensor: torch.Tensor, devices: tuple[int, ...], name: str) -> Pending:
        """Start summing a tensor of this rank in place over the devices. ``name``: of its task. One device alone has nothing to do."""
        pending = self.comm.all_reduce(tensor, devices)
        if len(devices) > 1:
            self.comm.traffic.reduced_bytes += tensor.nbytes
            self.watch(name, TaskKind.REDUCE, pending)
        return pending

    def scatter_sum(self, tensor: torch.Tensor, number: int, name: str) -> Pending:
        """Start a reduce-scatter over the devices of a reduction (its position): each device gets the sum of its own cell."""
        reduction = self.plan.reductions[number]
        parts = [self.regions.cut(("sum", number), tensor, cell) for cell in reduction.cells]
        pending = self.comm.reduce_scatter(parts, reduction.devices)
        self._count_scatter(tensor)
        self.watch(name, TaskKind.REDUCE, pending)
        return pending

    def gather_cells(self, own: torch.Tensor, number: int, name: str) -> Pending:
        """Start an all-gather of a reduction's cells on each of its devices. ``own``: this rank's cell."""
        key: RegionKey = ("sum", number)
        reduction, regions, whole = self.plan.reductions[number], self.regions, self.regions.empty(key)
        routed = regions.is_routed(key)
        places = [regions.empty(key, cell) if routed else regions.cut(key, whole, cell) for cell in reduction.cells]
        buffer, finish = land([place for place in places if place.numel()])
        sizes = [place.numel() for place in places]
        pending = self.comm.gather_ragged(plain(pack([own])), sizes, reduction.devices, plain(buffer))
        self._count_scatter(whole)
        self.watch(name, TaskKind.REDUCE, pending)
        pending.tensor = whole
        for step in () if finish is None else (finish,):
            pending.then(step)
        for cell, place in zip(reduction.cells, places, strict=True) if routed else ():
            pending.then(partial(regions.put, key, whole, cell, place))
        return pending

    def _count_scatter(self, tensor: torch.Tensor) -> None:
        self.comm.traffic.reduced_bytes += tensor.nbytes
        self.comm.traffic.scattered_bytes += tensor.nbytes

    @property
    def is_traced(self) -> bool:
        """Whether tasks are timed."""
        return self._recorder is not None

    def task(self, name: str, kind: TaskKind) -> AbstractContextManager[None]:
        """Time what is computed inside, if this step is traced."""
        return nullcontext() if self._recorder is None else self._recorder.task(name, kind)

    def watch(self, name: str, kind: TaskKind, pending: Pending) -> None:
        """Name a communication, and time it if this step is traced."""
        pending.name = name
        if self._recorder is not None:
            self._recorder.watch(name, kind, pending)


def _bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def leaf(tensor: torch.Tensor, takes_gradient: bool) -> torch.Tensor:
    """The tensor as a leaf of autograd's graph; with a gradient, where its numbers may have one."""
    return tensor.detach().requires_grad_(takes_gradient and is_differentiable(tensor.dtype))
