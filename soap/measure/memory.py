"""The memory that a rank really holds: of its tensors, from one moment on, as the allocators see it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile, record_function

QUIET = "99"
"""A level of the profiler's own messages above all that it has, so that it prints none."""
RESTART = "soap: restart"
"""Name of an event in the profile."""


@dataclass
class PeakMemory:
    """``bytes``: the most that tensors held at once beyond what was there before. ``with_workspaces_bytes``: the same including what
    kernels take for themselves while they run; on GPUs the allocator makes no such difference. Both are known when the measurement has
    ended."""

    bytes: int = 0
    with_workspaces_bytes: int = 0

    def restart(self) -> None:
        """From now on count the most that is held at once; what is held now still counts, what was held at most before does not."""
        with record_function(RESTART):
            pass
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()


class Change(NamedTuple):
    """Memory allocated (``size_bytes`` above 0) or freed. ``call``: the innermost call of an operator at that moment, -1 for none."""

    time_ns: int
    address: int
    size_bytes: int
    call: int


@contextmanager
def peak_memory(device: torch.device) -> Iterator[PeakMemory]:
    """Measure the tensors that this thread allocates on ``device`` within the block. On GPUs: what the caching allocator has given out.
    On CPUs: every allocation of torch's allocator, as its profiler reports them, which slows every call down."""
    found = PeakMemory()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield found
        found.bytes = found.with_workspaces_bytes = torch.cuda.max_memory_allocated(device) - before
        return
    os.environ.setdefault("KINETO_LOG_LEVEL", QUIET)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        yield found
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    tree = profiler.profiler.kineto_results.experimental_event_tree()
    changes, begin_ns = sorted(_changes(tree)), max((event.start_time_ns for event in tree if event.name == RESTART), default=0)
    found.with_workspaces_bytes = _most(changes, begin_ns)
    found.bytes = _most(without_workspaces(changes), begin_ns)


def without_workspaces(changes: Sequence[Change]) -> list[Change]:
    """The changes without workspaces: what one call of an operator itself, not a call within it, allocates and frees again."""
    taken: dict[int, int] = {}
    left: set[int] = set()
    for place, change in enumerate(changes):
        if change.size_bytes > 0:
            taken[change.address] = place
        elif (began := taken.pop(change.address, None)) is not None and changes[began].call == change.call != -1:
            left |= {began, place}
    return [change for place, change in enumerate(changes) if place not in left]


def _changes(events: Iterable[Any]) -> Iterator[Change]:
    """All changes, found in the profiler's tree of events."""
    waiting, calls = [(event, -1) for event in events], 0
    while waiting:
        event, call = waiting.pop()
        if event.tag == _EventType.Allocation:
            yield Change(event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size, call)
            continue
        own, calls = calls if event.tag == _EventType.TorchOp else call, calls + 1
        waiting += [(child, own) for child in event.children]


def _most(changes: Iterable[Change], begin_ns: int) -> int:
    """The most that is held at once from a moment on."""
    held = most = 0
    for change in changes:
        held += change.size_bytes
        most = max(most, held) if change.time_ns >= begin_ns else held
    return most
