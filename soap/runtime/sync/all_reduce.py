"""All-reduces of gradients: buffers, one per bucket, that live for the whole training.

Gradients of shards that several devices keep are views of the buffers. Autograd leaves what a segment contributes on the shards, whence
a hook brings it here as soon as it is there, while it is in the processor's cache. What a single device keeps stays where autograd adds it
up.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from soap.runtime.comm.redistribute import Communicator, Pending
from soap.runtime.program.actions import ActionKind
from soap.runtime.program.program import Program
from soap.runtime.step.early_start import EarlyStart, SyncSchedule
from soap.runtime.step.micro_batch import WHOLE_STEP, MicroBatch


class GradientSync:
    """The gradients of a rank's shards. ``gradients``: shard -> its gradient, valid after ``step``.

    Inside ``step``, backward passes through ``tensors`` give their gradients to this object; there is one of it for the tensors. It serves
    all programs whose plans have the same shards and buckets.
    """

    def __init__(self, program: Program, tensors: Mapping[int, torch.Tensor], comm: Communicator) -> None:
        self.program = program
        self.comm = comm
        self.gradients: dict[int, torch.Tensor] = {}
        self._tensors = tensors
        self._buffers: dict[int, torch.Tensor] = {}
        self._places: dict[int, torch.Tensor] = {}
        self._alone: list[int] = []
        self._fresh: set[int] = set()
        self._pending: dict[int, Pending] = {}
        self.early = EarlyStart()
        self.early.by(self.start, ActionKind.SYNC)
        self._bucket_of: dict[int, int] = {}
        for number, bucket in enumerate(program.buckets):
            if comm.rank not in bucket.devices:
                continue
            if len(bucket.devices) == 1:  # nothing is summed: autograd's own tensors will do
                self._alone.extend(bucket.shards)
                continue
            self._bucket_of.update(dict.fromkeys(bucket.shards, number))
            shards = [tensors[i] for i in bucket.shards]
            buffer = torch.zeros(sum(shard.numel() for shard in shards), dtype=shards[0].dtype, device=shards[0].device)
            self._buffers[number] = buffer
            first = 0
            for i, shard in zip(bucket.shards, shards, strict=True):
                self._places[i] = self.gradients[i] = buffer[first : first + shard.numel()].view(shard.shape)
                first += shard.numel()

        by_rows = {table.parameter for table in program.tables}
        for i in program.idle_shards:
            if i in tensors and program.plan.shards[i].parameter not in by_rows:
                self.gradients[i] = torch.zeros_like(tensors[i], requires_grad=False)
        self._open = False
        for i in self._places:
            self._hook(i)

    @contextmanager
    def step(self, schedule: SyncSchedule, part: MicroBatch = WHOLE_STEP) -> Iterator[None]:
        """One forward and backward pass. What an earlier step has left is forgotten; behind the last micro-batch gradients are complete."""
        if part.first:
            self._forget()
        self._open = True
        try:
            with self.early.step(schedule, part):
                yield
        finally:
            self._open = False
        for pending in self._pending.values():
            pending.wait()
        self._pending.clear()
        for shard in tuple(self._fresh):
            self._fill(shard)
        for shard in self._alone:
            gradient = self._tensors[shard].grad
            if gradient is None:
                self.gradients[shard] = torch.zeros_like(self._tensors[shard], requires_grad=False)
            else:  # optimizers take complex numbers for pairs in memory, and cannot where these are only marked as conjugated
                self.gradients[shard] = gradient.resolve_conj().resolve_neg()

    def _forget(self) -> None:
        """Begin with nothing. The optimizer's update has read ``.grad``, and has left it there."""
        self._fresh = set(self._places)
        for shard in self._places:
            self._tensors[shard].grad = None
        for shard in self._alone:
            self._tensors[shard].grad = None
            self.gradients.pop(shard, None)

    def start(self, bucket: int) -> Pending:
        """Begin summing a bucket over its devices, unless that has begun already."""
        if bucket not in self._pending:
            for shard in self.program.buckets[bucket].shards:
                self._fill(shard)
            buffer = self._buffers[bucket]
            self.comm.traffic.synchronized_bytes += buffer.numel() * buffer.element_size()
            self._pending[bucket] = self.comm.all_reduce(buffer, self.program.buckets[bucket].devices)
        return self._pending[bucket]

    def _hook(self, shard: int) -> None:
        """Have autograd's contributions to a shard brought to its place, one segment's after the other's."""
        reference, bucket = weakref.ref(self), self._bucket_of[shard]  # a tensor's hooks live as long as it does

        def take(tensor: torch.Tensor) -> None:
            own = reference()
            if own is None or not own._open:
                return
            gradient = tensor.grad
            assert gradient is not None
            tensor.grad = None
            if shard in own._fresh:
                own._fresh.discard(shard)
                own._places[shard].copy_(gradient)
            else:
                own._places[shard].add_(gradient)
            own.early.arrived((ActionKind.SYNC, bucket))

        self._tensors[shard].register_post_accumulate_grad_hook(take)  # type: ignore[no-untyped-call]

    def _fill(self, shard: int) -> None:
        """A shard to which nothing flowed on this rank contributes zeros."""
        if shard in self._fresh:
            self._fresh.discard(shard)
            self._places[shard].zero_()
