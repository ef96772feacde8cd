"""How long an optimizer's update of all parameters takes: by its implementation, the number of tensors and their size."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from time import perf_counter_ns
from typing import Any

import torch
from torch.optim import SGD, AdamW, Optimizer

KINDS: dict[str, Callable[..., Optimizer]] = {
    "sgd": partial(SGD, lr=1e-3),
    "momentum": partial(SGD, lr=1e-3, momentum=0.9),
    "adamw": partial(AdamW, lr=1e-3),
}
WAYS: dict[str, dict[str, bool]] = {"loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
COUNTS = (1, 8, 64, 512)
SIZES_BYTES = (4 * 2**10, 64 * 2**10, 2**20, 16 * 2**20)
MOST_BYTES = 2 * 2**30
REPETITIONS = 9


def time_updates(device: str, tiny: bool) -> list[dict[str, Any]]:
    """Each combination that fits: nanoseconds until the update is done, and until the processor has launched it."""
    return list(_all(device, COUNTS[:2] if tiny else COUNTS, SIZES_BYTES[:1] if tiny else SIZES_BYTES))


def _all(device: str, counts: tuple[int, ...], sizes: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    for count in counts:
        for size in sizes:
            if count * size > MOST_BYTES:
                continue
            for kind, make in KINDS.items():
                for way, options in WAYS.items():
                    done_ns, launched_ns = _time(device, make, options, count, size)
                    yield {"kind": kind, "way": way, "tensors": count, "bytes_each": size, "ns": done_ns, "launched_ns": launched_ns}


def _time(device: str, make: Callable[..., Optimizer], options: dict[str, bool], count: int, size: int) -> tuple[float, float]:
    tensors = [torch.zeros(size // 4, device=device, requires_grad=True) for _ in range(count)]
    for tensor in tensors:
        tensor.grad = torch.full_like(tensor, 1e-3)
    optimizer = make(tensors, **options)
    optimizer.step()
    done, launched = [], []
    for _ in range(REPETITIONS):
        _wait(device)
        start = perf_counter_ns()
        optimizer.step()
        launched.append(perf_counter_ns() - start)
        _wait(device)
        done.append(perf_counter_ns() - start)
    return median(done), median(launched)


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
