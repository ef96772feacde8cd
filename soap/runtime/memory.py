"""What a rank really holds: tensor memory from one moment on, as the allocators see it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

QUIET = "99"
"""A level of the profiler's own messages above all that it has."""


@dataclass
class PeakMemory:
    """``bytes``: the most that was held at once beyond what was there before; known when the measurement has ended."""

    bytes: int = 0


@contextmanager
def peak_memory(device: torch.device) -> Iterator[PeakMemory]:
    """Measure the tensors that this thread allocates on ``device`` within the block: on GPUs what the caching allocator has given out; on
    CPUs every allocation of torch's allocator, as its profiler tells them, which slows every call down."""
    found = PeakMemory()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield found
        found.bytes = torch.cuda.max_memory_allocated(device) - before
        return
    os.environ.setdefault("KINETO_LOG_LEVEL", QUIET)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        yield found
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    events = profiler.profiler.kineto_results.events()
    held = 0
    for _, change in sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"):
        held += change
        found.bytes = max(found.bytes, held)
