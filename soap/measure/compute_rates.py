"""Rates that this machine reaches: operations and bytes per second, and what a call costs.

On a CPU all cores that will compute work at the same time, each on its own data, as separate processes will: neighbouring hardware
threads share execution units, and all share the memory. The processor time of each thread counts, not wall-clock time. So other
programs, which take turns with ours, do not spoil a figure that is kept for long.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from threading import Barrier
from typing import Any

SECONDS_PER_RATE = 0.1
"""Seconds of measuring one rate; there are four to six rates."""
MATMUL_SIZE = {"cpu": 512, "cuda": 4096}
COPY_BYTES = {"cpu": 64 * 2**20, "cuda": 512 * 2**20}
"""Bytes of all copies together, above the last cache level of usual processors; each core copies at least ``LEAST_COPY_BYTES``."""
LEAST_COPY_BYTES = 4 * 2**20
DTYPES = {"cpu": ("float32", "float64"), "cuda": ("float32", "tf32", "float64", "bfloat16", "float16")}
TINY_LAYERS = 40
"""Length of the chain of tiny layers whose calls are timed."""
TINY_CALLS = TINY_LAYERS * (3 + 4)
"""Calls of a forward and backward pass over the chain, as ``roofline`` counts them: linear, relu and add, and linear's backward pass
twice."""
FINE_CLOCK_SECONDS = 1e-4
"""A thread's processor time is used if the system counts it at least this finely; otherwise wall-clock time."""

Action = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Rates:
    """What one core (or one GPU) reaches while its neighbours work as well. ``memory_bytes_per_second``: read and written.
    ``kernel_seconds``: time of a small call in a forward and backward pass in eager mode, including the recording of the graph."""

    flops_per_second: dict[str, float]
    memory_bytes_per_second: float
    kernel_seconds: float


def cpu_rates(workers: int) -> Rates:
    """Rates of one core while ``workers`` cores work."""
    size = max(COPY_BYTES["cpu"] // workers, LEAST_COPY_BYTES)
    with _single_threaded():
        flops = {dtype: _flops(_together(workers, _matmul("cpu", dtype)), "cpu") for dtype in DTYPES["cpu"]}
        copied = 2 * size / _together(workers, _copy("cpu", size))
        call = _together(1, _tiny_calls("cpu")) / TINY_CALLS  # Python's lock would let only one thread call at a time
    return Rates(flops, copied, call)


def cuda_rates(gpu: int = 0) -> Rates:
    """Rates of a GPU. GPUs do not disturb each other."""
    import torch

    with torch.cuda.device(gpu):
        flops = {dtype: _flops(_on_gpus(_matmul("cuda", dtype), gpu), "cuda") for dtype in DTYPES["cuda"]}
        size = COPY_BYTES["cuda"]
        copied = 2 * size / _on_gpus(_copy("cuda", size), gpu)
        return Rates(flops, copied, _on_gpus(_tiny_calls("cuda"), gpu) / TINY_CALLS)


def gpu_copy_seconds(copied_bytes: int, source: int = 0, target: int = 1) -> float:
    """Seconds to copy from one GPU to another."""
    import torch

    given, taken = (torch.empty(copied_bytes, dtype=torch.uint8, device=f"cuda:{gpu}") for gpu in (source, target))
    return _on_gpus(lambda: lambda: taken.copy_(given), source, target)


@contextmanager
def _single_threaded() -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _together(workers: int, make: Callable[[], Action]) -> float:
    """Typical seconds of an action while so many threads do it at once. ``make`` gives each thread an action of its own."""
    import torch

    barrier = Barrier(workers)
    fine = time.get_clock_info("thread_time").resolution <= FINE_CLOCK_SECONDS

    def work() -> float:
        try:
            torch.set_num_threads(1)  # counts for the calling thread only
            action = make()
            action()
            barrier.wait()
            return _typical_seconds(action, time.thread_time if fine else time.perf_counter)
        except BaseException:
            barrier.abort()  # otherwise the other threads would wait for ever
            raise

    with ThreadPoolExecutor(workers) as pool:
        return median([future.result() for future in [pool.submit(work) for _ in range(workers)]])


def _on_gpus(make: Callable[[], Action], *gpus: int) -> float:
    """Typical seconds of an action, from its call until these GPUs have finished it."""
    import torch

    action = make()

    def finished() -> None:
        action()
        for gpu in gpus:
            torch.cuda.synchronize(gpu)

    finished()
    return _typical_seconds(finished, time.perf_counter)


def _typical_seconds(action: Action, clock: Callable[[], float]) -> float:
    """The median of at least four times."""
    seconds: list[float] = []
    stop = time.perf_counter() + SECONDS_PER_RATE
    while len(seconds) < 4 or time.perf_counter() < stop:
        start = clock()
        action()
        seconds.append(max(clock() - start, 1e-9))
    return median(seconds)


def _flops(seconds: float, kind: str) -> float:
    return 2 * MATMUL_SIZE[kind] ** 3 / seconds


def _matmul(kind: str, dtype: str) -> Callable[[], Action]:
    import torch

    def make() -> Action:
        size = MATMUL_SIZE[kind]
        own = torch.float32 if dtype == "tf32" else getattr(torch, dtype)
        left, right = (torch.ones(size, size, dtype=own, device=kind) for _ in range(2))
        result = torch.empty_like(left)

        def multiply() -> None:
            with float32_precision("high" if dtype == "tf32" else "highest"):
                torch.mm(left, right, out=result)

        return multiply

    return make


@contextmanager
def float32_precision(name: str) -> Iterator[None]:
    """Within this context torch multiplies float32 matrices so, as ``torch.set_float32_matmul_precision`` says."""
    import torch

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(name)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _copy(kind: str, size_bytes: int) -> Callable[[], Action]:
    import torch

    def make() -> Action:
        source = torch.ones(size_bytes // 4, device=kind)
        target = torch.zeros_like(source)
        return lambda: target.copy_(source)

    return make


def _tiny_calls(kind: str) -> Callable[[], Action]:
    """A forward and backward pass over tiny layers, ``TINY_CALLS`` calls, as in training."""
    import torch

    def make() -> Action:
        features, bias = torch.ones(4, 8, device=kind), torch.zeros(8, device=kind, requires_grad=True)
        weight = torch.zeros(8, 8, device=kind, requires_grad=True)

        def calls() -> None:
            hidden = features
            with torch.enable_grad():
                for _ in range(TINY_LAYERS):
                    hidden = torch.add(torch.relu(torch.nn.functional.linear(hidden, weight, bias)), features)
            torch.autograd.grad(hidden, (weight, bias), features)

        return calls

    return make
