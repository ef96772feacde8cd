"""A quick measurement of this machine: what ``local:N`` costs. A few seconds, once; then from the cache.

The rates are those that one of N processes reaches while the others work as well. They share the cores: a process has
``threads_per_process(N)`` threads, and where there are more processes than cores each gets its part of the time. They share the memory and
the execution units of neighbouring hardware threads too, so no process is credited with more than an N-th of what all cores reach together.
"""

from __future__ import annotations

import os
import platform
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from soap.errors import ProfileError
from soap.presets import local_topology
from soap.profiles import machine_cache
from soap.profiles.link_probe import LinkRates, measure_link
from soap.profiles.machine_cache import Key, Measurement
from soap.profiles.roofline import MEASURED
from soap.topology import DeviceType, Topology

SECONDS_PER_RATE = 0.1
"""How long one rate is measured; there are up to seven."""
SIGNIFICANT_DIGITS = 4
"""More than the measurement means; short numbers in the cache file and in what people see."""
MATMUL_SIZE = {"cpu": 512, "cuda": 4096}
COPY_BYTES = {"cpu": 64 * 2**20, "cuda": 512 * 2**20}
"""Above the last cache level of usual processors."""
DTYPES = {"cpu": ("float32", "float64"), "cuda": ("float32", "float64", "bfloat16", "float16")}
TINY_CALLS = 500
GIB = 2**30
GPU_NODES = ("/dev/nvidiactl", "/dev/dxg")
CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def measured_local_topology(count: int, cache: bool = True) -> Topology:
    """``local:count`` with what this machine reaches: GPUs if it has as many, else processes on its cores joined by gloo.

    With ``cache`` the first measurement is kept in the user's cache folder and used from then on: equal questions, equal answers.
    """
    local_topology(count)  # refuses an impossible number before anything is measured
    kind = "cuda" if _gpu_count() >= count else "cpu"
    key = _key(kind, count)
    measurement = machine_cache.load(key) if cache else None
    if measurement is None:
        measurement, complete = _measure(kind, count)
        if cache and complete:
            machine_cache.save(key, measurement)
    device, link = measurement
    if link is None:
        return local_topology(count, device)
    return local_topology(count, device, link.bandwidth_bytes_per_second, link.latency_seconds)


def measure_device(kind: str, count: int) -> DeviceType:
    """Rates of one of ``count`` equal devices of this machine while all of them work. ``kind``: "cpu" or "cuda"."""
    import torch

    if kind == "cuda":
        properties = torch.cuda.get_device_properties(0)
        return _device_type(kind, properties.name, int(properties.total_memory), _rates(kind, 1))
    cores = cpu_cores()
    threads = threads_per_process(count)
    alone = _rates(kind, threads)
    together = alone if threads == cores else _rates(kind, cores)
    share = min(1.0, cores / (count * threads))
    rates = {name: min(rate * share, together[name] / count) for name, rate in alone.items() if name != "kernel_seconds"}
    rates["kernel_seconds"] = alone["kernel_seconds"] / share
    return _device_type(kind, f"{cpu_model()} / {count}", memory_bytes() // count, rates)


def threads_per_process(count: int) -> int:
    """Threads that each of ``count`` processes on this machine uses."""
    return max(1, cpu_cores() // count)


def cpu_cores() -> int:
    """Cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)  # not on every system
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


def cpu_model() -> str:
    """The processor's name, as far as the system tells."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return " ".join(line.partition(":")[2].split())
    except OSError:
        pass
    return platform.processor() or platform.machine() or "unknown processor"


def memory_bytes() -> int:
    """Main memory of this machine, or of the container that this process runs in.

    In whole GiB if there is as much: the exact figure changes with every kernel, and the topology's hash must not.
    """
    limits = []
    try:
        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, ValueError, OSError):  # not on every system
        limits.append(8 * GIB)
    for path in CGROUP_LIMITS:
        try:
            limits.append(int(Path(path).read_text(encoding="ascii")))
        except (OSError, ValueError):  # no such group, or "max"
            continue
    size = min(limit for limit in limits if limit > 0)
    return size if size < GIB else size // GIB * GIB


def _gpu_count() -> int:
    """Number of CUDA devices; does not import torch where there can be none, so that planning starts quickly."""
    if not any(os.path.exists(node) for node in GPU_NODES) and platform.system() != "Windows":
        return 0
    import torch

    return int(torch.cuda.device_count()) if torch.cuda.is_available() else 0


def _key(kind: str, count: int) -> Key:
    try:
        torch_version = version("torch")
    except PackageNotFoundError:
        torch_version = "unknown"
    key: dict[str, str | int] = {"kind": kind, "torch": torch_version, "devices": count, "cpu": cpu_model(), "cores": cpu_cores()}
    if kind == "cuda":
        import torch

        return {**key, "gpu": torch.cuda.get_device_name(0)}
    return {**key, "threads": threads_per_process(count), "memory_bytes": memory_bytes()}


def _measure(kind: str, count: int) -> tuple[Measurement, bool]:
    """The measurement, and whether all of it succeeded."""
    device = measure_device(kind, count)
    if count == 1:
        return (device, None), True
    try:
        link = _measure_gpu_link() if kind == "cuda" else _shared(measure_link(), count)
    except (ProfileError, RuntimeError) as cause:
        warnings.warn(f"{cause}; going on with the usual figures for links of one machine", stacklevel=3)
        return (device, None), False
    return (device, LinkRates(_rounded(link.bandwidth_bytes_per_second), _rounded(link.latency_seconds))), True


def _shared(link: LinkRates, count: int) -> LinkRates:
    """The cores copy what processes send each other: two kept two cores busy, more processes share what there are."""
    share = min(1.0, max(2, cpu_cores()) / count)
    return LinkRates(link.bandwidth_bytes_per_second * share, link.latency_seconds / share)


def _measure_gpu_link() -> LinkRates:
    import torch

    def copy_seconds(size: int) -> float:
        source = torch.empty(size, dtype=torch.uint8, device="cuda:0")
        target = torch.empty(size, dtype=torch.uint8, device="cuda:1")
        return _seconds(lambda: target.copy_(source), _synchronizer("cuda", 2))

    size = COPY_BYTES["cuda"]
    latency_seconds = copy_seconds(1)
    return LinkRates(size / max(copy_seconds(size) - latency_seconds, 1e-9), latency_seconds)


def _device_type(kind: str, name: str, size_bytes: int, rates: dict[str, float]) -> DeviceType:
    return DeviceType(
        name=name,
        kind="cuda" if kind == "cuda" else "cpu",
        flops_per_second={dtype: _rounded(rates[dtype]) for dtype in DTYPES[kind]},
        memory_bandwidth_bytes_per_second=_rounded(rates["memory"]),
        memory_bytes=size_bytes,
        kernel_seconds=_rounded(rates["kernel_seconds"]),
        source=f"{MEASURED} on this machine by soap.profiles.measure_machine",
    )


def _rates(kind: str, threads: int) -> dict[str, float]:
    """FLOP/s by dtype, bytes per second of "memory", and the seconds of a call, with this many threads."""
    with _threads(threads):
        rates = {dtype: _matmul_rate(kind, dtype) for dtype in DTYPES[kind]}
        return {**rates, "memory": _copy_rate(kind), "kernel_seconds": _call_seconds(kind)}


@contextmanager
def _threads(count: int) -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _matmul_rate(kind: str, dtype: str) -> float:
    import torch

    size = MATMUL_SIZE[kind]
    left, right = (torch.ones(size, size, dtype=getattr(torch, dtype), device=kind) for _ in range(2))
    result = torch.empty_like(left)
    return 2 * size**3 / _seconds(lambda: torch.mm(left, right, out=result), _synchronizer(kind))


def _copy_rate(kind: str) -> float:
    """Bytes read and written per second."""
    import torch

    source = torch.ones(COPY_BYTES[kind] // 4, device=kind)
    target = torch.zeros_like(source)
    return 2 * COPY_BYTES[kind] / _seconds(lambda: target.copy_(source), _synchronizer(kind))


def _call_seconds(kind: str) -> float:
    """One call on a tiny tensor, recorded for the backward pass as in training."""
    import torch

    tiny = torch.ones(8, device=kind, requires_grad=True)

    def calls() -> None:
        for _ in range(TINY_CALLS):
            torch.add(tiny, tiny)

    return _seconds(calls, _synchronizer(kind)) / TINY_CALLS


def _synchronizer(kind: str, devices: int = 1) -> Callable[[], None]:
    if kind == "cpu":
        return lambda: None
    import torch

    def synchronize() -> None:
        for device in range(devices):
            torch.cuda.synchronize(device)

    return synchronize


def _seconds(action: Callable[[], Any], synchronize: Callable[[], None]) -> float:
    """The fastest of the action's times, for about ``SECONDS_PER_RATE`` after a first one that warms up.

    What other programs do meanwhile only ever adds time, so the middle would say more about them than about this machine.
    """
    action()
    synchronize()
    seconds: list[float] = []
    while len(seconds) < 4 or sum(seconds) < SECONDS_PER_RATE:
        start = time.perf_counter()
        action()
        synchronize()
        seconds.append(max(time.perf_counter() - start, 1e-9))
    return min(seconds)


def _rounded(value: float) -> float:
    return float(f"{value:.{SIGNIFICANT_DIGITS}g}")
