"""Synchronization of gradients by all-reduce: buffers per bucket, summed while the backward pass goes on.

Gradients live in views of the buffers for the whole training. What several segments contribute is added here; the sum over the
devices starts when the program says that the bucket is complete.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from soap.runtime.program import Program
from soap.runtime.redistribute import Communicator, Pending


class GradientSync:
    """The gradients of a rank's shards. ``gradients``: shard -> its gradient, valid after ``finish``."""

    def __init__(self, program: Program, tensors: Mapping[int, torch.Tensor], comm: Communicator) -> None:
        self.program = program
        self.comm = comm
        self.gradients: dict[int, torch.Tensor] = {}
        self._buffers: dict[int, torch.Tensor] = {}
        self._fresh: set[int] = set()
        self._pending: list[Pending] = []
        for number, bucket in enumerate(program.buckets):
            if comm.rank not in bucket.devices:
                continue
            shards = [tensors[i] for i in bucket.shards]
            buffer = torch.zeros(sum(shard.numel() for shard in shards), dtype=shards[0].dtype, device=shards[0].device)
            self._buffers[number] = buffer
            first = 0
            for i, shard in zip(bucket.shards, shards, strict=True):
                self.gradients[i] = buffer[first : first + shard.numel()].view(shard.shape)
                first += shard.numel()

        for i in program.idle_shards:
            if i in tensors:
                self.gradients[i] = torch.zeros_like(tensors[i], requires_grad=False)

    def begin(self) -> None:
        """Forget the last step's gradients."""
        self._fresh = {shard for bucket in self._buffers for shard in self.program.buckets[bucket].shards}

    def take_over(self, gradients: Mapping[int, torch.Tensor]) -> None:
        """Go on from what another one of the same shards has added up and not yet summed over the devices."""
        self._fresh = set()
        for shard, own in self.gradients.items():
            own.copy_(gradients[shard])

    def add(self, shard: int, gradient: torch.Tensor) -> None:
        """One segment's contribution."""
        if shard in self._fresh:
            self._fresh.discard(shard)
            self.gradients[shard].copy_(gradient)
        else:
            self.gradients[shard].add_(gradient)

    def start(self, bucket: int) -> Pending:
        """Begin summing a bucket over its devices."""
        self._fill(bucket)
        buffer = self._buffers[bucket]
        self.comm.traffic.synchronized_bytes += buffer.numel() * buffer.element_size()
        pending = self.comm.all_reduce(buffer, self.program.buckets[bucket].devices)
        self._pending.append(pending)
        return pending

    def finish(self) -> None:
        """Wait until all gradients are complete."""
        for pending in self._pending:
            pending.wait()
        self._pending.clear()
        for bucket in self._buffers:
            self._fill(bucket)

    def _fill(self, bucket: int) -> None:
        """A shard to which nothing flowed on this rank contributes zeros."""
        for shard in self.program.buckets[bucket].shards:
            if shard in self._fresh:
                self._fresh.discard(shard)
                self.gradients[shard].zero_()
