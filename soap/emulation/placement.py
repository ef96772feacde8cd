"""What a rank does to be on its host, and what its host's network card has counted.

A device of an emulated cluster computes at an even rate. A CPU quota alone does not give that: a process that has waited may use a
whole period's time at once, and one that has used it up stands still, messages or not. So a process keeps a clock of its own, at which
its device is free. Its thread's processor time (even, if ``reference_work`` makes it so), divided by the share, is added to the clock.
Before the process communicates, which is when others can notice, it sleeps until then. Waiting for others adds nothing: a device that
waits computes nothing. What a device has waited for is there as soon as it has come, even if another device's process has the core at
that moment: a device's core is its own.

Without ``set_share`` all of this does nothing.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from soap.emulation import reference_work
from soap.emulation.names import INTERFACE, NAMESPACES
from soap.emulation.quota import join, move_thread, own_group
from soap.emulation.support import require_support
from soap.errors import RuntimeFailure
from soap.runtime.system import clock
from soap.runtime.system.clock import Clock
from soap.runtime.system.process import GLOO_WORKERS, THREADS, be_prompt, die_with_parent, thread_name

LEAST_SLEEP_NS = 50_000
"""Shorter sleeps are not made at once, but together with later ones."""


class VirtualClock(Clock):
    """``share``: cores that the device has, at most 1."""

    def __init__(self, share: float) -> None:
        self.share = share
        self._busy_ns = self._used_ns = self._free_ns = self._queued_ns = 0
        self._statistics = _open_statistics()
        self.go_on()

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        if self._statistics is not None:
            close(self._statistics)  # when the program ends, ``os`` may be gone before

    def catch_up(self) -> None:
        """Return when the device would have come so far."""
        late_ns = self.now_ns() - time.perf_counter_ns()
        if late_ns >= LEAST_SLEEP_NS:
            time.sleep(late_ns / 1e9)
        self._queued_ns = self._queued()

    def now_ns(self) -> int:
        """See ``Clock``."""
        used = reference_work.thread_time_ns()
        computed_ns = int((used - self._used_ns) / self.share)
        self._used_ns = used
        self._busy_ns += computed_ns
        self._free_ns += computed_ns
        return self._free_ns

    def busy_ns(self) -> int:
        """How long the device has computed."""
        self.catch_up()
        return self._busy_ns

    def resume(self) -> None:
        """What the device has waited for has come. It goes on now, or when it has finished what it had begun."""
        self._used_ns = reference_work.thread_time_ns()
        queued_ns = self._queued()
        self._free_ns = max(self._free_ns, time.perf_counter_ns() - (queued_ns - self._queued_ns))
        self._queued_ns = queued_ns

    def go_on(self) -> None:
        """The device is free from now on."""
        self._used_ns, self._free_ns = reference_work.thread_time_ns(), time.perf_counter_ns()
        self._queued_ns = self._queued()

    def _queued(self) -> int:
        """For how long the thread could have run so far, but others had the cores; 0 if the kernel does not tell."""
        return 0 if self._statistics is None else int(os.pread(self._statistics, 100, 0).split()[1])


def _open_statistics() -> int | None:
    """Figures of the calling thread: run time, time in the queue, and how often it was queued, in ns."""
    with suppress(OSError):
        return os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
    return None


def set_share(share: float | None) -> None:
    """From now on the calling thread is such a device; None: no longer."""
    clock.install(None if share is None else VirtualClock(share))


CLONE_NEWNET = 0x40000000
FREE_GROUP = "SOAP_EMULATED_FREE_GROUP"
"""Environment variable of a placed rank: the control group without a quota."""
QUOTA_GROUP = "SOAP_EMULATED_QUOTA_GROUP"
"""Environment variable of a placed rank: the control group with its device's quota."""
SHARE = "SOAP_EMULATED_SHARE"
"""Environment variable of a placed rank: how many cores its device has."""
COMMUNICATION_CORES = "SOAP_EMULATED_COMMUNICATION_CORES"
"""Environment variable of a placed rank: numbers of the cores that only communication uses, with commas; empty if there are none."""
REFERENCE = "SOAP_EMULATED_REFERENCE_NS"
"""Environment variable of a placed rank: time of the reference work on a core as fast as its device's; empty: as fast as this core is."""
COUNTERS = Path("/proc/thread-self/net/dev")
"""Not /sys, which shows the namespace in which it was mounted."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Puts this process onto the host of its rank. Call it before any thread is made that communicates. ``hosts``: (namespace, control
    group) of each rank. ``cores``: numbers of those that each may use; empty: all. ``free_group``: a group without a quota, in which a
    rank stays until ``run_evenly``: it reads its model at this machine's speed. ``shares``: how many cores the device of each rank has.
    ``communication_cores``: those on which no device computes. ``reference_ns``: time of the reference work on a core as fast as a
    device's (``soap.emulation.reference_work``); None: as on this core at that moment."""

    hosts: tuple[tuple[str, str], ...]
    cores: tuple[tuple[int, ...], ...] = ()
    free_group: str = ""
    shares: tuple[float, ...] = ()
    communication_cores: tuple[int, ...] = ()
    reference_ns: float | None = None

    def __call__(self, rank: int) -> None:
        """Join the control group, the cores, and the namespace; gloo takes the network card there. The process ends with its launcher."""
        namespace, group = self.hosts[rank]
        libc = ctypes.CDLL(None, use_errno=True)
        if self.cores:
            os.sched_setaffinity(0, self.cores[rank])
        die_with_parent()
        try:
            (Path(self.free_group or group) / "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")
            descriptor = os.open(NAMESPACES / namespace, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as cause:
            raise RuntimeFailure(f"emulated host {namespace}: {cause.strerror}; it was removed meanwhile: start again") from None
        try:
            if libc.setns(descriptor, CLONE_NEWNET):  # os.setns exists from Python 3.12 on
                raise RuntimeFailure(f"emulated host {namespace}: {os.strerror(ctypes.get_errno())}; expected that root may enter it")
        finally:
            os.close(descriptor)
        os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
        os.environ[FREE_GROUP], os.environ[QUOTA_GROUP] = self.free_group, group
        os.environ[SHARE] = str(self.shares[rank]) if self.shares else ""
        os.environ[REFERENCE] = "" if self.reference_ns is None else str(self.reference_ns)
        os.environ[COMMUNICATION_CORES] = ",".join(map(str, self.communication_cores))


def run_evenly() -> None:
    """From now on the calling thread computes at its device's even rate (``VirtualClock``), and this process's other threads, which
    communicate, get all the time that they need.

    A device computes and communicates at the same time, as the simulator has it, and evenly. Under a quota both would stop together as
    soon as the computation has used it up, a sum would stop at every rank in turn, and a rank that has waited would be too fast for a
    while. A rank that computes with several threads, or has more than a core, gets its quota. Call it again when threads have been
    added.

    Another host's computation keeps a sum waiting as little as possible: communication has cores of its own, if there are some. If not,
    the threads that do sums are prompt, on the cores on which this rank computes. With equal threads the rank that had a sum first
    would compute, and one on the same core would have the sum only when that is done.
    """
    group, share = os.environ.get(FREE_GROUP, ""), float(os.environ.get(SHARE) or 0)
    if not group:
        return
    if not 0 < share <= 1 or os.environ.get("OMP_NUM_THREADS") != "1":
        join(Path(os.environ[QUOTA_GROUP]), os.getpid())
        return
    apart = communication_cores()
    own, cores = apart or os.sched_getaffinity(0), apart or os.sched_getaffinity(os.getppid())
    for thread in map(int, os.listdir(THREADS)):
        move_thread(Path(group), thread)
        if thread != threading.get_native_id():
            with suppress(ProcessLookupError, FileNotFoundError):  # the thread has ended
                sums = thread_name(thread).startswith(GLOO_WORKERS)
                os.sched_setaffinity(thread, own if sums else cores)
                if sums:
                    be_prompt(thread)
    if os.environ.get(REFERENCE):
        reference_work.start(float(os.environ[REFERENCE]))
    set_share(share)


def communication_cores() -> set[int]:
    """Numbers of the cores that only communication uses; empty if it shares those on which emulated devices compute."""
    return {int(core) for core in os.environ.get(COMMUNICATION_CORES, "").split(",") if core}


@contextmanager
def working_as_rank(place: Placement) -> Iterator[None]:
    """Within this context the calling process is on rank 0's core, without a quota, as paced ranks compute (``run_evenly``), and its
    thread's time is even. It keeps its network. It leaves its group at the end, since whatever is in a group ends with it."""
    groups = require_support()
    group_before, cores_before = own_group(groups), os.sched_getaffinity(0)
    try:
        join(Path(place.free_group), os.getpid())
        if place.cores:
            os.sched_setaffinity(0, place.cores[0])
        if place.reference_ns is not None:
            reference_work.start(place.reference_ns)
        yield
    finally:
        reference_work.stop()
        join(group_before, os.getpid())
        os.sched_setaffinity(0, cores_before)


def card_counters() -> tuple[int, int, int, int]:
    """What the network card of this process's host has counted since it was made: bytes (sent, received), headers included, and frames
    (sent, received), each of which has one header. If the kernel cuts a frame up behind the card, it counts one frame with one header."""
    for line in COUNTERS.read_text(encoding="ascii").splitlines():
        name, found, figures = line.partition(":")
        if found and name.strip() == INTERFACE:
            values = figures.split()
            return int(values[8]), int(values[0]), int(values[9]), int(values[1])
    raise RuntimeFailure(f"no network card {INTERFACE!r} here; expected to be on an emulated host")
