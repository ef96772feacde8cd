"""What a rank does to be on its host, and what its host's network card has counted."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from soap.emulation import reference_work, virtual_clock
from soap.emulation.names import INTERFACE, NAMESPACES
from soap.emulation.quota import join, move_thread, own_group
from soap.emulation.support import require_support
from soap.errors import RuntimeFailure
from soap.runtime.system.gloo_threads import GLOO_WORKERS, THREADS, be_prompt, thread_name
from soap.runtime.system.parent import die_with_parent

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
    """From now on the calling thread computes at its device's even rate (``virtual_clock``), and this process's other threads, which
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
    virtual_clock.set_share(share)


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
