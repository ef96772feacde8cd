"""A cluster of emulated hosts that exists within a context and is removed afterwards, however the context ends."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

from soap.emulation import network, quota
from soap.emulation.cores import computing_and_communicating, cores_by_rank, usable_cores
from soap.emulation.hosts import HostLimits
from soap.emulation.leftovers import remove, remove_leftovers, reserved
from soap.emulation.names import box_address, host_name
from soap.emulation.placement import Placement
from soap.emulation.support import require_support
from soap.errors import StoppedBySignal


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
