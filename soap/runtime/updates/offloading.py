"""What a rank's optimizer updates in its host's memory: copies of values and gradients there, beside the optimizer's state.

On a GPU they are pinned, and copies run on a stream of their own. A rank that is a CPU makes the same copies in its own memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch

from soap.errors import RuntimeFailure
from soap.plan.plan import Plan
from soap.runtime.updates.parts import Part
from soap.runtime.updates.trial import Tried


def require_offloadable(plan: Plan, tried: Tried, *, lazy_sparse: bool) -> None:
    """RuntimeFailure in one line, the same on all ranks, if hosts cannot update what the plan offloads with this optimizer."""
    names = {plan.shards[number].parameter for number in plan.offloaded}
    if lazy_sparse and (tables := sorted(names & plan.graph.sparse.keys())):
        raise RuntimeFailure(
            f"lazy_sparse updates rows of {tables[0]!r} alone, which the plan offloads; leave lazy_sparse out, or do not offload the table"
        )
    apart = sorted(set(tried.coupled) - names)
    if apart and not names.isdisjoint(tried.coupled):
        raise RuntimeFailure(
            f"optimizer {tried.name} couples the updates of parameters with each other, but the plan offloads some and not {apart[0]!r}; "
            "offload all, or use an optimizer that updates each element by itself"
        )


class Offloading:
    """A rank's offloaded parts. ``parts``: all of the rank's, by first shard, with offloaded tensors on the host. ``numbers``: these."""

    def __init__(self, plan: Plan, parts: Mapping[int, Part], device: torch.device) -> None:
        self._on_device = {number: part.tensor for number, part in parts.items() if number in plan.offloaded}
        self._pinned = device.type == "cuda"
        self._gradients: dict[int, torch.Tensor] = {}
        self._stream = torch.cuda.Stream(device) if self._pinned and self._on_device else None  # type: ignore[no-untyped-call]
        here = {number: replace(parts[number], tensor=self._room(own).requires_grad_()) for number, own in self._on_device.items()}
        self.parts: dict[int, Part] = {**parts, **here}
        self.numbers = frozenset(here)
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Take over the device's values, which were loaded."""
        for number, own in self._on_device.items():
            self.parts[number].tensor.copy_(own)

    @torch.no_grad()
    def to_host(self, gradients: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Copies of the gradients of offloaded parts, complete when this returns. Parts without a gradient have none."""
        found = {}
        with self._copying():
            for number in self.numbers & gradients.keys():
                own = self._gradients.get(number)
                if own is None:
                    own = self._gradients[number] = self._room(gradients[number])
                own.copy_(gradients[number], non_blocking=self._pinned)
                found[number] = own
        if self._stream is not None:
            self._stream.synchronize()  # so the gradients may go as well
        return found

    @torch.no_grad()
    def from_host(self) -> None:
        """Copy updated values back. What the device computes next waits for it."""
        with self._copying():
            for number, own in self._on_device.items():
                own.copy_(self.parts[number].tensor, non_blocking=self._pinned)
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    def _room(self, like: torch.Tensor) -> torch.Tensor:
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=self._pinned)

    @contextmanager
    def _copying(self) -> Iterator[None]:
        """Inside, copies are made on the stream for them, behind what the device has been given to do."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            yield
