"""A quick measurement of this machine: what ``local:N`` costs. It takes a few seconds once; then it comes from the cache.

The rates are those that one of N processes reaches while the others work as well (``compute_rates``). A process has
``threads_per_process(N)`` threads; if there are more processes than cores, each gets its share of the time. Of processors it is also
measured what messages and sums between N ranks take in training, and from how much computing they keep them.

Torch does not say by what GPUs are joined (NVLink, a PCIe switch, the processors). So GPUs that reach each other form an island, and how
long copies take inside an island and between islands is measured.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from soap.cluster.emulated import FAMILY as EMULATED
from soap.cluster.emulated import emulated_topology, parse_emulated
from soap.cluster.memory_budget import left_by_process
from soap.cluster.presets import family, local_topology
from soap.cluster.topology import MEASURED, QUICKLY_MEASURED, DeviceType, Link, Topology
from soap.emulation.reference_work import VERSION, measured_reference_ns
from soap.errors import ProfileError, SoapError, SoapWarning
from soap.files import cache_folder, read_text, write_text_atomically
from soap.measure import machine_cache
from soap.measure.compute_rates import Rates, cpu_rates, cuda_rates, gpu_copy_seconds
from soap.measure.link_probe import LinkRates, Probed, measure_link
from soap.measure.link_probes import with_measured_links
from soap.measure.machine_cache import Key, Measurement
from soap.units import format_bytes

STAT = Path("/proc/stat")
IDLE = (3, 4)
"""Fields of a core's line: idle, and waiting for a disk. The time of guests (the last two fields) is in the others already."""
COUNTED = 8
NOTEWORTHY = 0.1
"""Share of the cores from which on others' work is told."""
LEAST_S = 0.2
"""A shorter time tells little: cores count in hundredths of a second."""


class Count(NamedTuple):
    """Seconds since the machine began, of the cores that this process may use."""

    busy_s: float
    own_s: float
    clock_s: float
    cores: int


def count() -> Count | None:
    """The counts by now; None where the system does not tell. Children count once they were waited for."""
    try:
        cores = os.sched_getaffinity(0)
        lines = [line.split() for line in STAT.read_text(encoding="ascii").splitlines() if line[:3] == "cpu" and line[3:4].isdigit()]
        own = [list(map(int, line[1 : 1 + COUNTED])) for line in lines if int(line[0][3:]) in cores]
        ticks = sum(value for line in own for field, value in enumerate(line) if field not in IDLE)
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        own_s = sum(one.ru_utime + one.ru_stime for one in used)
        return Count(ticks / os.sysconf("SC_CLK_TCK"), own_s, time.monotonic(), len(own))
    except (OSError, ValueError, AttributeError, IndexError):
        return None


def others_cores(before: Count | None, after: Count | None) -> float | None:
    """How many cores other processes, or other machines on the same hardware, kept busy on average; None if that is not known."""
    if before is None or after is None or not after.cores or after.clock_s - before.clock_s < LEAST_S:
        return None
    busy_s = (after.busy_s - before.busy_s) - (after.own_s - before.own_s)
    return max(0.0, busy_s / (after.clock_s - before.clock_s))


@contextmanager
def noticing_others(what: str, advice: str, counting: Callable[[], Count | None] = count) -> Iterator[None]:
    """Warn at the end, in one line, if others kept much of this machine busy. ``what``: such as ``links were``. ``advice``: what to do."""
    before = counting()
    yield
    after = counting()
    others = others_cores(before, after)
    if others is not None and after is not None and others >= NOTEWORTHY * after.cores:
        busy = f"other work kept {others:.1f} of {after.cores} cores busy while {what} measured"
        warnings.warn(f"{busy}: predictions may be off; on an idle machine, {advice}", SoapWarning, stacklevel=3)


GPU_NODES = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
"""Device files of NVIDIA's driver, of Windows' for Linux inside it, and of AMD's."""


@dataclass(frozen=True, slots=True)
class Gpus:
    """``kinds``: name and memory in bytes of each GPU. ``islands``: groups of GPUs, ascending, within which all memory is reached."""

    kinds: tuple[tuple[str, int], ...]
    islands: tuple[tuple[int, ...], ...]

    @property
    def are_joined_alike(self) -> bool:
        """Whether one figure holds for the links of all: they are in one island, or each is alone."""
        return len(self.islands) in (1, len(self.kinds))

    @property
    def neighbours(self) -> tuple[int, int] | None:
        """Two GPUs of the first island that has two; the first two GPUs if there is none; None if there is one GPU."""
        together = next((island[:2] for island in self.islands if len(island) > 1), tuple(range(len(self.kinds)))[:2])
        return (together[0], together[1]) if len(together) == 2 else None

    @property
    def strangers(self) -> tuple[int, int]:
        """The first GPUs of the first two islands; there must be two."""
        return self.islands[0][0], self.islands[1][0]


def gpu_count() -> int:
    """Number of GPUs that torch can use. Does not import torch where there can be none, so that planning starts quickly."""
    if not any(os.path.exists(node) for node in GPU_NODES) and platform.system() != "Windows":
        return 0
    import torch

    return int(torch.cuda.device_count()) if torch.cuda.is_available() else 0


def first_gpus(count: int) -> Gpus:
    """The first ``count`` GPUs."""
    import torch

    seen = [torch.cuda.get_device_properties(number) for number in range(count)]
    kinds = tuple((str(one.name), int(one.total_memory)) for one in seen)
    return Gpus(kinds, islands(count, torch.cuda.can_device_access_peer))


def islands(count: int, reaches: Callable[[int, int], bool]) -> tuple[tuple[int, ...], ...]:
    """The GPUs in groups: each joins the first group all of whose members it reaches, and which all reach it."""
    found: list[list[int]] = []
    for gpu in range(count):
        home = next((own for own in found if all(reaches(gpu, other) and reaches(other, gpu) for other in own)), None)
        if home is None:
            found.append([gpu])
        else:
            home.append(gpu)
    return tuple(map(tuple, found))


SIGNIFICANT_DIGITS = 4
"""Digits kept: more than the measurement is exact to, and short numbers in the cache file and in reports."""
GPU_COPY_BYTES = 256 * 2**20
GIB = 2**30
MOST_PROCESSES, FEWEST_PROCESSES = 4, 2
"""Processes of ``local`` on a machine without GPUs: four where it has as many cores, else two. One would leave nothing to split; as many
as there are cores would be many, each with one thread, of which sums over gloo make slow plans."""

AGAIN = "--measure-again"
WITHOUT_STEPS = "what two processes exchange at best; soap-profile links measures what messages and sums take in training"
USUAL_FIGURES = "the usual figures for links of one machine"

MOST_RANKS = 8
"""Most processes that are started to measure communication in training, where there are not as many cores: of more, each takes seconds of
its own to start."""
CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
CGROUP_USES = (("/sys/fs/cgroup/memory.stat", "anon"), ("/sys/fs/cgroup/memory/memory.stat", "total_rss"))
"""Container limits count files, and what processes hold in them; caches of files are dropped when memory is needed."""
MEMINFO = Path("/proc/meminfo")


def measured_topology(preset: Topology, cache: bool = True) -> Topology:
    """A preset made from this machine (``presets.family``), with its rates. Emulated hosts have processes on its cores."""
    if family(preset.name) != EMULATED:
        return measured_local_topology(preset.device_count, cache)
    return emulated_topology(
        parse_emulated(preset.name, preset.device_count), measured_local_topology(preset.device_count, cache, gpus=False, in_steps=False)
    )


def device_count() -> int:
    """How many devices ``local`` has: the GPUs that torch sees; on a machine without, a few processes on its cores."""
    return gpu_count() or (MOST_PROCESSES if cpu_cores() >= MOST_PROCESSES else FEWEST_PROCESSES)


def measured_local_topology(count: int, cache: bool = True, gpus: bool = True, in_steps: bool = True) -> Topology:
    """``local:count`` with the rates that this machine reaches: GPUs if it has as many (and ``gpus``), otherwise processes on its cores
    joined by gloo. With ``cache`` the first measurement is kept in the user's cache folder and used from then on: equal questions,
    equal answers. ``in_steps``: with what communication costs these processes in training."""
    local_topology(count)  # refuses an impossible number before anything is measured
    if gpus and gpu_count() >= count:
        return _measured_gpus(count, first_gpus(count), cache)
    in_steps = in_steps and 1 < count <= max(MOST_RANKS, cpu_cores())
    links_of = partial(_measure_cpu_links, count, False) if count > 1 else None
    in_steps_of = partial(_measure_cpu_links, count, True) if in_steps else None
    return _joined(count, _measured(_key("cpu", count), partial(measure_device, "cpu", count), links_of, cache, in_steps_of), in_steps)


def _measured_gpus(count: int, found: Gpus, cache: bool) -> Topology:
    """One GPU of each kind is measured, and copies between two neighbours; and between two islands, if there are several."""
    key = _key("cuda", count)
    if not found.are_joined_alike:
        key = {**key, "islands": " ".join(",".join(map(str, island)) for island in found.islands)}
    measure_links = None if found.neighbours is None else partial(_measure_gpu_link, *found.neighbours)
    first = _measured(key, partial(measure_device, "cuda", count), measure_links, cache)
    host, types = _joined(count, first), {found.kinds[0]: first.device}
    for gpu, kind in enumerate(found.kinds):
        if kind not in types:
            own = {**_key("cuda", count), "gpu": kind[0], "gpu_memory_bytes": kind[1]}
            types[kind] = _measured(own, partial(measure_device, "cuda", count, gpu), None, cache).device
    if len(types) > 1:
        names = Counter(measured.name for measured in types.values())
        for kind, measured in types.items():
            if names[measured.name] > 1:  # sold with more and with less memory
                types[kind] = replace(measured, name=f"{measured.name} {format_bytes(kind[1])}")
        host = _with_types(host, [types[kind] for kind in found.kinds])
    if found.are_joined_alike:
        return host
    between = {**key, "between": "islands"}
    way = _measured(between, lambda: first.device, partial(_measure_gpu_link, *found.strangers), cache).link
    return host if way is None else _with_islands(host, found.islands, way.bandwidth_bytes_per_second, way.latency_seconds)


def _measured(
    key: Key,
    device_of: Callable[[], DeviceType],
    links_of: Callable[[], Probed] | None,
    cache: bool,
    in_steps_of: Callable[[], Probed] | None = None,
) -> Measurement:
    """What is kept under the key, or else measured now. ``links_of``: None if there are no links to measure. ``in_steps_of``: with their
    timings, None if these are not wanted. If it fails that is kept for a day: it takes long, and would fail for the next command as
    well."""
    known = machine_cache.load(key) if cache else None
    wants_steps = in_steps_of is not None and (known is None or known.timings is None)
    wants_links = links_of is not None and (known is None or known.link is None)
    if known is not None and (known.tried or not (wants_steps or wants_links)):
        return known
    with noticing_others("this machine was", f"measure it again by {AGAIN}"):
        begun = known or Measurement(device_of())
        link, timings, failed_at = begun.link, begun.timings, begun.failed_at
        if in_steps_of is not None and timings is None:
            found = _links(in_steps_of, WITHOUT_STEPS)
            failed_at = time.time() if found is None else failed_at
            link, timings = (link, None) if found is None else (link or found.rates, found.timings or None)
        if links_of is not None and link is None:
            found = _links(links_of, USUAL_FIGURES)
            link, failed_at = (None, time.time()) if found is None else (found.rates, failed_at)
    made = Measurement(begun.device, link, timings, failed_at)
    if cache and made != known:
        other = machine_cache.load(key)  # stored by another process that has measured at the same time and was first
        if other is not None and other != known:
            made = Measurement(other.device, other.link or link, other.timings or timings, failed_at)
        if made != other:
            machine_cache.save(key, made)
    return made


def _joined(count: int, measured: Measurement, in_steps: bool = False) -> Topology:
    link, timings = measured.link, measured.timings
    if link is None:
        return local_topology(count, measured.device)
    joined = local_topology(count, measured.device, link.bandwidth_bytes_per_second, link.latency_seconds)
    if not in_steps or not timings:
        return joined
    try:
        return with_measured_links(joined, timings, f"{QUICKLY_MEASURED} on this machine; soap-profile links measures for longer")
    except ProfileError:  # somebody has changed the file
        return joined


def measure_device(kind: str, count: int, gpu: int = 0) -> DeviceType:
    """Rates of one of ``count`` equal devices of this machine while all of them work. ``kind``: "cpu" or "cuda", then of this GPU."""
    if kind == "cuda":
        import torch

        properties = torch.cuda.get_device_properties(gpu)
        usable_bytes = left_by_process(properties.total_memory)
        return _device_type(kind, properties.name, usable_bytes, cuda_rates(gpu), 1.0, 1.0)
    cores, threads = cpu_cores(), threads_per_process(count)
    share = min(1.0, cores / (count * threads))
    rates = cpu_rates(min(cores, count * threads))
    return _device_type(kind, f"{cpu_model()} / {count}", memory_bytes() // count, rates, threads * share, share)


def threads_per_process(count: int) -> int:
    """Threads that each of ``count`` processes on this machine uses."""
    return max(1, cpu_cores() // count)


def cpu_cores() -> int:
    """Cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)  # not on every system
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


def cpu_model() -> str:
    """The processor's name, if the system tells it."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return " ".join(line.partition(":")[2].split())
    except OSError:
        pass
    return platform.processor() or platform.machine() or "unknown processor"


def memory_bytes() -> int:
    """Main memory of this machine or container, in whole GiB if it is at least one: the exact figure changes with every kernel."""
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


def free_memory_bytes() -> int:
    """Memory that processes can still take on this machine, or in this container; all of it if the system does not tell."""
    left = [memory_bytes()]
    try:
        for line in MEMINFO.read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                left.append(int(line.split()[1]) * 1024)
    except (OSError, ValueError):  # not on every system
        pass
    for limit, (stat, key) in zip(CGROUP_LIMITS, CGROUP_USES, strict=True):
        try:
            held = dict(line.split() for line in Path(stat).read_text(encoding="ascii").splitlines())
            left.append(int(Path(limit).read_text(encoding="ascii")) - int(held[key]))
        except (OSError, ValueError, KeyError):  # no such group, or "max"
            continue
    return max(0, min(left))


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


def _links(measure: Callable[[], Probed], instead: str) -> Probed | None:
    """What is measured, in short numbers; a warning if it fails. ``instead``: what is used then."""
    try:
        link, timings = measure()
    except (ProfileError, RuntimeError) as cause:
        warnings.warn(f"{cause}; going on with {instead}, for a day or until {AGAIN}", stacklevel=5)
        return None
    return Probed(LinkRates(_rounded(link.bandwidth_bytes_per_second), _rounded(link.latency_seconds)), timings)


def _measure_cpu_links(count: int, in_steps: bool) -> Probed:
    rates, timings = measure_link(count, threads_per_process(count)) if in_steps else measure_link()
    if timings:
        with_measured_links(local_topology(count), timings)  # raises if they cannot be right, before they are kept
    return Probed(_shared(rates, count), timings)


def _shared(link: LinkRates, count: int) -> LinkRates:
    """Bandwidth shared by so many processes. The cores copy what processes send each other: two processes keep two cores busy."""
    share = min(1.0, max(2, cpu_cores()) / count)
    return LinkRates(link.bandwidth_bytes_per_second * share, link.latency_seconds / share)


def _measure_gpu_link(source: int, target: int) -> Probed:
    latency_seconds = gpu_copy_seconds(1, source, target)
    moving_seconds = max(gpu_copy_seconds(GPU_COPY_BYTES, source, target) - latency_seconds, 1e-9)
    return Probed(LinkRates(GPU_COPY_BYTES / moving_seconds, latency_seconds))


def _device_type(kind: str, name: str, size_bytes: int, rates: Rates, cores: float, share: float) -> DeviceType:
    """A device of so many cores (or 1 GPU), which gets ``share`` of their time."""
    return DeviceType(
        name=name,
        kind="cuda" if kind == "cuda" else "cpu",
        flops_per_second={dtype: _rounded(rate * cores) for dtype, rate in rates.flops_per_second.items()},
        memory_bandwidth_bytes_per_second=_rounded(rates.memory_bytes_per_second * cores),
        memory_bytes=size_bytes,
        kernel_seconds=_rounded(rates.kernel_seconds / share),
        source=f"{MEASURED} on this machine by soap.measure.this_machine",
    )


def _rounded(value: float) -> float:
    return float(f"{value:.{SIGNIFICANT_DIGITS}g}")


def _with_types(host: Topology, types: Sequence[DeviceType]) -> Topology:
    """The cluster with these device types, one for each device."""
    return replace(host, devices=tuple(replace(device, type=own) for device, own in zip(host.devices, types, strict=True)))


def _with_islands(
    host: Topology, islands: Sequence[Sequence[int]], bandwidth_bytes_per_second: float, latency_seconds: float
) -> Topology:
    """The cluster, whose devices are joined by one switch, with a switch for each island of several devices.

    Its links have the figures inside islands. Bandwidth and latency are those of a message between islands, whose devices share the way to
    the host's switch, as behind a PCIe switch or a processor.
    """
    inside, hub = host.links[0], host.links[0].target
    links: list[Link] = []

    def connect(a: str, b: str, bandwidth: float, seconds: float) -> None:
        for source, target in ((a, b), (b, a)):
            links.append(Link(len(links), f"{source}->{target}", source, target, bandwidth, seconds))

    for number, island in enumerate(islands):
        own, half = hub, latency_seconds / 2
        if len(island) > 1:
            own, half = f"{hub}{number}", max(0.0, latency_seconds / 2 - inside.latency_seconds)
        for device in island if own != hub else ():
            connect(host.devices[device].name, own, inside.bandwidth_bytes_per_second, inside.latency_seconds)
        connect(own if own != hub else host.devices[island[0]].name, hub, bandwidth_bytes_per_second, half)
    return replace(host, links=tuple(links))


FILE = "core-speed.json"


def core_reference_ns() -> float | None:
    """Nanoseconds of the reference work on a core of this machine; None if they cannot be measured."""
    folder = cache_folder()
    key = f"{cpu_model()}, yardstick {VERSION}"  # an older word for the reference work: another key would measure the core anew
    path = None if folder is None else folder / FILE
    try:
        known = json.loads(read_text(path, what="cache file")) if path is not None and path.exists() else {}
        if isinstance(known.get(key), float) and known[key] > 0:
            return float(known[key])
    except (SoapError, ValueError, AttributeError, RecursionError):
        known = {}
    found = measured_reference_ns()
    if found is not None and path is not None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text_atomically(path, json.dumps({**known, key: found}, indent=1) + "\n", error=ProfileError)
        except (OSError, ProfileError) as cause:
            warnings.warn(f"the speed of this machine's cores is not kept: {cause}; repeated runs will differ slightly", stacklevel=2)
    return found
