"""What the forward pass of one step leaves for the backward pass, on one rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Literal, NamedTuple

import torch

from soap.regions import Box, lengths
from soap.runtime.program import Program
from soap.runtime.redistribute import Communicator, Pending
from soap.runtime.trace import Recorder
from soap.simulator.tasks import TaskKind

LeafKey = tuple[Literal["holding", "transfer"], int]
"""Where a segment's input comes from, unless it is a parameter shard: a holding of this rank, or a transfer."""


class Output(NamedTuple):
    """A tensor of a segment whose gradient comes from outside: one that is held, or a partial result. ``seed``: it is the loss."""

    tensor: torch.Tensor
    holding: int | None
    reduction: int | None
    seed: bool


class StepState:
    """The values of one step that outlive their segment, and the services that both passes use.

    ``leaves``: detached inputs of segments, on which autograd leaves their gradients. ``outputs``: segment -> what its backward pass
    starts from. ``share``: the gradient of the loss, less than 1 where the losses of several micro-batches are averaged.
    """

    def __init__(
        self,
        program: Program,
        comm: Communicator,
        dtype_of: Callable[[str], torch.dtype],
        recorder: Recorder | None,
        share: float = 1.0,
    ) -> None:
        self.share = share
        self.program, self.plan, self.graph = program, program.plan, program.plan.graph
        self.comm, self.dtype_of = comm, dtype_of
        self._recorder = recorder
        self.leaves: dict[LeafKey, torch.Tensor] = {}
        self.outputs: dict[int, list[Output]] = {}

    @property
    def rank(self) -> int:
        """This process's rank, which is also its device's number."""
        return self.comm.rank

    def empty(self, box: Box, tensor: str) -> torch.Tensor:
        """Room for a region of a tensor."""
        return torch.empty(lengths(box), dtype=self.dtype_of(tensor), device=self.comm.device)

    def reduced_tensor(self, reduction: int) -> str:
        """The tensor that a reduction makes a part of."""
        found = self.plan.reductions[reduction]
        return self.graph.operators[found.operator].outputs[found.output].tensor

    def send(self, tensor: torch.Tensor, target: int, tag: int, name: str) -> None:
        """Start sending, under the name of a task."""
        pending = self.comm.send(tensor, target, tag)
        self.comm.traffic.sent_bytes += tensor.numel() * tensor.element_size()
        self.watch([name], TaskKind.TRANSFER, pending)

    def receive(self, box: Box, tensor: str, source: int, tag: int, name: str) -> Pending:
        """Start receiving a region, under the name of a task."""
        buffer = self.empty(box, tensor)
        pending = self.comm.receive(buffer, source, tag)
        self.comm.traffic.received_bytes += buffer.numel() * buffer.element_size()
        self.watch([name], TaskKind.TRANSFER, pending)
        return pending

    def sum_over(self, tensor: torch.Tensor, devices: tuple[int, ...], name: str) -> Pending:
        """Start summing a tensor of this rank in place over the devices, under the name of a task; nothing to do for one device."""
        pending = self.comm.all_reduce(tensor, devices)
        if len(devices) > 1:
            self.comm.traffic.reduced_bytes += tensor.numel() * tensor.element_size()
            self.watch([name], TaskKind.REDUCE, pending)
        return pending

    def task(self, name: str, kind: TaskKind) -> AbstractContextManager[None]:
        """Times what is computed inside, if this step is traced."""
        return nullcontext() if self._recorder is None else self._recorder.task(name, kind)

    def watch(self, names: Sequence[str], kind: TaskKind, pending: Pending) -> None:
        """Times a communication, if this step is traced."""
        if self._recorder is not None:
            self._recorder.watch(names, kind, pending)
