"""Synchronization of gradients by all-reduce: buffers per bucket, summed while the backward pass goes on.

Gradients of shards that several devices keep live in views of the buffers for the whole training. Autograd leaves what a segment
contributes on the shards, whence a hook brings it here as soon as it is there. A sum over the devices starts when its last gradient has
come, at the latest when the program says that the bucket is complete; sums start in the order of the program, which all ranks share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import takewhile

import torch

from soap.runtime.program import Action, ActionKind, Program, part_of
from soap.runtime.redistribute import Communicator, Pending


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Which part of a step a batch is: of all ``count`` micro-batches, the one with this number.

    Gradients are added up over them, synchronized with the last, and are those of the mean of their losses.
    """

    number: int = 0
    count: int = 1

    @property
    def first(self) -> bool:
        """Whether gradients begin with it."""
        return self.number == 0

    @property
    def last(self) -> bool:
        """Whether gradients are complete behind it."""
        return self.number == self.count - 1


WHOLE_STEP = MicroBatch()


class SyncSchedule:
    """When a rank's gradients are complete, by one program. ``contributions``: shard -> number of segments whose backward pass may give it
    a gradient. ``follow``: segment -> the buckets that are summed right behind it; ``early`` False leaves every sum to its own action."""

    def __init__(self, program: Program, rank: int, early: bool = True) -> None:
        self.contributions = _contributions(program, rank)
        self.follow = _buckets_behind(part_of(program.backward, rank)) if early else {}


class GradientSync:
    """The gradients of a rank's shards. ``gradients``: shard -> its gradient, valid after ``step``.

    Inside ``step``, backward passes through ``tensors`` give their gradients to this object.
    """

    def __init__(self, program: Program, tensors: Mapping[int, torch.Tensor], comm: Communicator) -> None:
        self.program = program
        self.comm = comm
        self.gradients: dict[int, torch.Tensor] = {}
        self._tensors = tensors
        self._buffers: dict[int, torch.Tensor] = {}
        self._places: dict[int, torch.Tensor] = {}
        self._bucket_of: dict[int, int] = {}
        self._fresh: set[int] = set()
        self._missing: dict[int, int] = {}
        self._pending: dict[int, Pending] = {}
        self._startable: list[int] = []
        self._follow: Mapping[int, Sequence[int]] = {}
        for number, bucket in enumerate(program.buckets):
            if comm.rank not in bucket.devices:
                continue
            self._bucket_of.update(dict.fromkeys(bucket.shards, number))
            if len(bucket.devices) == 1:  # nothing is summed: autograd's own tensors will do
                continue
            shards = [tensors[i] for i in bucket.shards]
            buffer = torch.zeros(sum(shard.numel() for shard in shards), dtype=shards[0].dtype, device=shards[0].device)
            self._buffers[number] = buffer
            first = 0
            for i, shard in zip(bucket.shards, shards, strict=True):
                self._places[i] = self.gradients[i] = buffer[first : first + shard.numel()].view(shard.shape)
                first += shard.numel()

        for i in program.idle_shards:
            if i in tensors:
                self.gradients[i] = torch.zeros_like(tensors[i], requires_grad=False)

    @contextmanager
    def step(
        self, schedule: SyncSchedule, part: MicroBatch = WHOLE_STEP, carried: Mapping[int, torch.Tensor] | None = None
    ) -> Iterator[None]:
        """One forward and backward pass. What an earlier step has left is forgotten; behind the last micro-batch gradients are complete.

        ``carried``: what another one of the same shards holds of earlier micro-batches.
        """
        if part.first:
            self._fresh = set(self._bucket_of)
            for shard in self._bucket_of.keys() - self._places.keys():
                self.gradients.pop(shard, None)
        elif carried is not None and carried is not self.gradients:
            self._fresh = set()
            for shard, gradient in carried.items():
                self._put(shard, gradient.clone())
        self._follow = schedule.follow if part.last else {}
        self._missing = {bucket: sum(schedule.contributions[i] for i in self.program.buckets[bucket].shards) for bucket in self._buffers}
        hooks = []
        for i in self._bucket_of:
            self._tensors[i].grad = None
            hooks.append(self._tensors[i].register_post_accumulate_grad_hook(partial(self._take, i)))  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        for pending in self._pending.values():
            pending.wait()
        self._pending.clear()
        for shard in tuple(self._fresh):
            self._fill(shard)

    @contextmanager
    def segment(self, number: int) -> Iterator[None]:
        """The backward pass of a segment, during which sums may start that are to start behind it."""
        self._startable = list(self._follow.get(number, ()))
        yield
        self._startable = []

    def start(self, bucket: int) -> Pending:
        """Begin summing a bucket over its devices, unless that has begun already."""
        if bucket not in self._pending:
            for shard in self.program.buckets[bucket].shards:
                self._fill(shard)
            buffer = self._buffers[bucket]
            self.comm.traffic.synchronized_bytes += buffer.numel() * buffer.element_size()
            self._pending[bucket] = self.comm.all_reduce(buffer, self.program.buckets[bucket].devices)
        return self._pending[bucket]

    def _take(self, shard: int, tensor: torch.Tensor) -> None:
        """One segment's contribution is there."""
        assert tensor.grad is not None
        if shard in self._fresh:
            self._fresh.discard(shard)
            self._put(shard, tensor.grad)
        else:
            self.gradients[shard].add_(tensor.grad)
        tensor.grad = None
        bucket = self._bucket_of[shard]
        if bucket in self._missing:
            self._missing[bucket] -= 1
        while self._startable and self._missing[self._startable[0]] == 0:
            self.start(self._startable.pop(0))

    def _put(self, shard: int, gradient: torch.Tensor) -> None:
        if shard in self._places:
            self._places[shard].copy_(gradient)
        else:
            self.gradients[shard] = gradient

    def _fill(self, shard: int) -> None:
        """A shard to which nothing flowed on this rank contributes zeros."""
        if shard in self._fresh:
            self._fresh.discard(shard)
            self._put(shard, torch.zeros_like(self._tensors[shard], requires_grad=False))


def _contributions(program: Program, rank: int) -> dict[int, int]:
    """Shard -> number of this rank's segments whose backward pass may give it a gradient."""
    found: dict[int, int] = {}
    for i, shard in enumerate(program.plan.shards):
        tiles = [tile for tile, _ in shard.uses if tile in program.activity.tiles and program.plan.tiles[tile].device == rank]
        found[i] = len({program.segment_of[tile] for tile in tiles})
    return found


def _buckets_behind(actions: Sequence[Action]) -> dict[int, tuple[int, ...]]:
    """Segment -> the buckets that a rank sums right behind it, with no other communication in between."""
    found: dict[int, tuple[int, ...]] = {}
    is_sync: Callable[[Action], bool] = lambda action: action.kind is ActionKind.SYNC  # noqa: E731
    for place, action in enumerate(actions):
        if action.kind is ActionKind.SEGMENT:
            found[action.subject] = tuple(following.subject for following in takewhile(is_sync, actions[place + 1 :]))
    return found
