"""A cluster of emulated hosts that exists within a context and is removed afterwards, however the context ends.

A launcher holds a lock on its emulation's file for as long as it lives, however it ends. Whatever bears the number of an emulation that
nobody holds was left by a launcher that was killed.
"""

from __future__ import annotations

import fcntl
import math
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from soap.emulation import network, quota
from soap.emulation.hosts import HostLimits
from soap.emulation.names import INTERFACES, NAMESPACES, NUMBERS, box_address, host_name, names_in, number_of
from soap.emulation.placement import Placement
from soap.emulation.quota import CpuGroups
from soap.emulation.support import require_support
from soap.errors import RuntimeFailure, SoapWarning, StoppedBySignal

LOCKS = Path("/run/soap-emulation")


@contextmanager
def reserved(is_free: Callable[[int], bool]) -> Iterator[int]:
    """The lowest number that nobody uses and that ``is_free`` accepts; reserved within this context."""
    for number in NUMBERS:
        with _held(number) as held:
            if held and is_free(number):
                yield number
                return
    raise RuntimeFailure(f"--emulate: all {len(NUMBERS)} numbers of emulations are in use; wait until one of them has ended")


def remove_leftovers(groups: CpuGroups) -> list[int]:
    """Remove what emulations left whose launcher was killed; returns their numbers. Living emulations are not touched."""
    named = (*names_in(NAMESPACES), *names_in(INTERFACES), *names_in(groups.root), *names_in(LOCKS))
    removed = []
    for number in sorted({number for name in named if (number := number_of(name)) is not None}):
        with _held(number) as held:
            if held:
                remove(groups, number)
                removed.append(number)
    return removed


def remove(groups: CpuGroups, number: int) -> None:
    """End the processes of an emulation, and remove everything that it has made. Warns of what cannot be removed."""
    left = quota.remove(groups, number) + network.remove(number)
    if left:
        text = f"--emulate: could not remove {', '.join(left)}; the next start tries again"
        warnings.warn(text, SoapWarning, stacklevel=2)


@contextmanager
def _held(number: int) -> Iterator[bool]:
    """Whether this process now holds the emulation's lock. At the end the lock is released and its file removed."""
    LOCKS.mkdir(mode=0o755, parents=True, exist_ok=True)
    path = LOCKS / f"soap-emulation-{number}"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)  # children must not inherit it: they may live longer
    held = False
    try:
        held = _lock(descriptor, path)
        yield held
    finally:
        if held:
            path.unlink(missing_ok=True)
        os.close(descriptor)


def _lock(descriptor: int, path: Path) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    try:  # the last holder may have removed the file meanwhile: then others lock another one
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


BUSIEST = 0.5
"""Share up to which emulated devices may fill a core so that threads that communicate get other cores."""


def usable_cores() -> tuple[int, ...]:
    """Numbers of the cores that this process may use."""
    return tuple(sorted(os.sched_getaffinity(0)))


def computing_and_communicating(shares: Sequence[float], cores: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """On which of these cores the devices compute, given their shares of a core, and on which other ones, at most as many, their
    threads communicate. There are none for communication if none can be spared, or if a device has more than a core.

    Other devices' messages displace a computation and cool its caches, so steps of one plan take different times. If computation leaves
    a core free (with a small ``--emulate-scale``), communication has all of it.
    """
    needed = len(cores) if max(shares) > 1 else math.ceil(sum(shares) / BUSIEST)
    return tuple(cores[:needed]), tuple(cores[needed : 2 * needed])


def cores_by_rank(ranks: int, cores: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Each rank's cores: the same number of its own for all, or the same number of ranks on each; any core for all ranks otherwise.

    The kernel balances by moving processes, late: of four ranks with not quite half a core each, three would often be on one of two
    cores.
    """
    if len(cores) % ranks == 0:
        each = len(cores) // ranks
        return tuple(tuple(cores[rank * each : (rank + 1) * each]) for rank in range(ranks))
    if ranks % len(cores) == 0:
        return tuple((cores[rank % len(cores)],) for rank in range(ranks))
    return (tuple(cores),) * ranks


@dataclass(frozen=True, slots=True)
class Emulation:
    """An emulated cluster. ``address``: the launcher's, as its hosts see it. ``place``: what each rank calls first."""

    number: int
    address: str
    place: Placement


@contextmanager
def emulated(hosts: Sequence[HostLimits], reference_ns: float | None = None) -> Iterator[Emulation]:
    """Make these hosts on this box; ``reference_ns``: see ``Placement``. What killed launchers left is removed first. RuntimeFailure if
    the system does not allow it.

    Signals that come while the hosts are made are obeyed afterwards; SIGTERM and its like raise StoppedBySignal. No signal ends the
    removal.
    """
    groups = require_support()
    with _Signals() as signals:
        remove_leftovers(groups)
        with reserved(network.is_subnet_free) as number:
            try:
                by_rank = sorted((rank, host.cores / len(host.ranks)) for host in hosts for rank in host.ranks)
                shares = tuple(share for _, share in by_rank)
                quota.build(groups, number, shares)
                network.build(number, hosts)
                places = [
                    (rank, host_name(number, i), str(groups.group(number, rank))) for i, host in enumerate(hosts) for rank in host.ranks
                ]
                where = tuple((namespace, group) for _, namespace, group in sorted(places))
                computing, communicating = computing_and_communicating(shares, usable_cores())
                cores = cores_by_rank(len(shares), computing)
                place = Placement(where, cores, str(groups.free_group(number)), shares, communicating, reference_ns)
                signals.let_through()
                yield Emulation(number, str(box_address(number)), place)
            finally:
                signals.hold()
                remove(groups, number)


class _Signals:
    """While held, signals are only remembered. Otherwise the first one raises; later ones do not, as removal follows. Only the main
    thread handles signals; in other threads this does nothing."""

    def __init__(self) -> None:
        self._held, self._raised = True, False
        self._pending: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _Signals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
                before = signal.getsignal(number)
                if before is not signal.SIG_IGN:  # what our caller ignores (nohup) stays ignored
                    self._before[number] = before
                    signal.signal(number, self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        if kind is None:
            self._raise_pending()

    def let_through(self) -> None:
        """From now on signals raise: at once if one has come."""
        self._held = False
        self._raise_pending()

    def hold(self) -> None:
        """From now on signals are remembered."""
        self._held = True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._pending is None:
            self._pending = number
        if not self._held:
            self._raise_pending()

    def _raise_pending(self) -> None:
        number, self._pending = self._pending, None
        if number is None or self._raised:
            return
        self._raised = True
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise StoppedBySignal(f"stopped by {signal.Signals(number).name}; the emulated cluster is removed", number)
