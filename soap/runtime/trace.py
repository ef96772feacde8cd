"""Recording when each task really ran, under the simulator's names.

Times are nanoseconds since a barrier of all ranks: the ranks' clocks share an origin, up to the barrier's skew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from time import perf_counter_ns

import torch

from soap.runtime.comm.redistribute import Communicator, Pending
from soap.runtime.system import clock
from soap.simulator.tasks import TaskKind

WAITING_THREADS = 256
"""The most communications that are watched at the same time; threads are started as needed."""


@dataclass(frozen=True, slots=True)
class Event:
    """One task as a rank saw it. A communication lasts from when the rank joined it until it had the result."""

    rank: int
    name: str
    kind: TaskKind
    start_ns: int
    end_ns: int


Watch = Callable[[str, TaskKind, Pending], None]
"""Times a communication under the name of a task."""


def watch_nothing(name: str, kind: TaskKind, pending: Pending) -> None:
    """The ``Watch`` of steps that are not traced: it only names the communication, for messages about what a rank waits for."""
    pending.name = name


class Recorder:
    """Collects this rank's events. ``align`` sets the origin of time."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self.events: list[Event] = []
        self._origin = 0
        self._threads = ThreadPoolExecutor(WAITING_THREADS)
        self._watching: list[Future[None]] = []

    def align(self) -> None:
        """Set time zero, at a barrier of all ranks."""
        self.comm.barrier()
        self._origin = perf_counter_ns()

    @contextmanager
    def task(self, name: str, kind: TaskKind) -> Iterator[None]:
        """Time what this rank computes inside."""
        start = clock.now_ns()
        yield
        self._synchronize()
        self.events.append(Event(self.comm.rank, name, kind, start - self._origin, clock.now_ns() - self._origin))

    def watch(self, name: str, kind: TaskKind, pending: Pending) -> None:
        """Time a communication without waiting for it here."""
        pending.name = name
        start = self._now()

        def submit(wait: Callable[[], None]) -> Future[None]:
            def watched() -> None:
                wait()
                self._synchronize()
                end = self._now()
                self.events.append(Event(self.comm.rank, name, kind, start, end))

            self._watching.append(self._threads.submit(watched))
            return self._watching[-1]

        pending.watch(submit)

    def close(self) -> list[Event]:
        """Wait for all watched communications. Returns this rank's events, ordered by start."""
        for future in self._watching:
            future.result()
        self._threads.shutdown()
        return sorted(self.events, key=lambda event: (event.start_ns, event.end_ns, event.name))

    def _now(self) -> int:
        return perf_counter_ns() - self._origin

    def _synchronize(self) -> None:
        if self.comm.device.type == "cuda":
            torch.cuda.synchronize(self.comm.device)


def join_events(per_rank: Sequence[Sequence[Event]]) -> list[Event]:
    """Join the events of all ranks into one per task. Tiles and updates stay as they are.

    A communication starts when the last of its ranks has joined, and ends when the last one has the result. It is listed under the highest
    rank that took part.
    """
    joined: dict[tuple[str, TaskKind], Event] = {}
    for event in (event for events in per_rank for event in events):
        key = (event.name, event.kind)
        other = joined.get(key)
        if other is not None:
            event = replace(event, start_ns=max(event.start_ns, other.start_ns), end_ns=max(event.end_ns, other.end_ns))
        joined[key] = event
    return sorted(joined.values(), key=lambda event: (event.start_ns, event.end_ns, event.name))
