"""How far workers may be apart: synchronous, bounded or asynchronous training (docs/internals/servers.md).

A worker's *clock* is the number of waves that it has finished; a *wave* is so many minibatches (1: each by itself). Stale synchronous
parallel training (Ho et al., NIPS 2013) lets a worker begin only if no worker's clock is more than D behind its own; wave synchronous
parallel training (Park et al., "HetPipe", ATC 2020) does so for pipelines with a wave of minibatches in flight. Who has left, or has
nothing to do, counts as infinitely far ahead.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from soap.elastic.faults import ElasticError

SYNC = 0
"""Bound of synchronous training."""
ASYNC = None
"""No bound."""


def waves_needed(minibatch: int, wave: int, bound: int | None) -> int:
    """How many waves of all workers must be in the values with which a minibatch begins, the first of which is 0: those that are certain
    to be finished of its own, less the bound; none if that is below 0, or without a bound."""
    return 0 if bound is None else max(0, (minibatch + 1) // wave - 1 - bound)


@dataclass
class _Progress:
    """Of a worker: minibatches begun, minibatches finished, and waves that servers have."""

    started: int
    finished: int
    pushed: int


class Clocks:
    """``bound``: D, in waves; None for asynchronous training. ``wave``: minibatches of a wave, which a worker has in flight at most.

    ``finished``: minibatches that each of ``workers`` has finished before; servers have the whole waves of these.

    ``missing``: for each minibatch that was started, how many earlier ones of the slowest other worker were not there in whole waves, and
    so perhaps not in the values that it reads: number -> how often. With bound D: at most D + 1 waves, and those
    in flight: (D + 2) * wave - 2.
    """

    def __init__(self, workers: Iterable[Hashable] = (), bound: int | None = SYNC, wave: int = 1, *, finished: int = 0) -> None:
        if (bound is not None and bound < 0) or wave < 1:
            raise ElasticError(f"a bound of {bound} and waves of {wave}; expected a bound from 0 on or none, and waves of at least 1")
        self.bound, self.wave = bound, wave
        self._active: dict[Hashable, _Progress] = {}
        self._floor = finished // wave
        self.missing: Counter[int] = Counter()
        for worker in workers:
            self._active[worker] = _Progress(finished, finished, finished // wave)

    @property
    def slowest(self) -> int:
        """The least clock: servers have so many waves of all active workers. If there are none, what it was when the last one left."""
        return min((own.pushed for own in self._active.values()), default=self._floor)

    def clock(self, worker: Hashable) -> int:
        """How many waves of a worker servers have, counted from where it joined."""
        return self._of(worker).pushed

    def joined(self, worker: Hashable) -> None:
        """A worker is there (again), at the clock of the slowest: it holds nobody up more than that one does."""
        if worker not in self._active:
            at = self.slowest
            self._active[worker] = _Progress(at * self.wave, at * self.wave, at)

    def left(self, worker: Hashable) -> None:
        """A worker is gone, or has nothing to do until it joins again: nobody waits for it. What it had in flight does not count."""
        self._floor = max(self._floor, self.slowest)
        self._active.pop(worker, None)
        self._floor = max(self._floor, self.slowest)

    def may_start(self, worker: Hashable) -> bool:
        """Whether a worker may begin its next minibatch."""
        own = self._of(worker)
        return own.started - own.finished < self.wave and self.slowest >= self.needed(worker)

    def needed(self, worker: Hashable) -> int:
        """How many waves of all workers must be in the values with which a worker's next minibatch begins."""
        return waves_needed(self._of(worker).started, self.wave, self.bound)

    def started(self, worker: Hashable, has: int | None = None) -> None:
        """A worker begins a minibatch. ``has``: how many waves of all workers are in its values, if it does not pull for each minibatch
        what servers have. ElasticError if it may not begin, or has too few."""
        own = self._of(worker)
        if not self.may_start(worker):
            raise ElasticError(f"worker {worker!r} begins minibatch {own.started + 1} before it may; ask may_start first")
        if has is not None and not self.needed(worker) <= has <= self.slowest:
            raise ElasticError(
                f"worker {worker!r} begins minibatch {own.started + 1} with {has} waves of all workers; expected {self.needed(worker)} to "
                f"{self.slowest}: pull first"
            )
        others = [other.pushed for name, other in self._active.items() if name != worker]
        there = has if has is not None else min(others, default=0)
        self.missing[max(0, own.started - there * self.wave) if others else 0] += 1
        own.started += 1

    def finished(self, worker: Hashable, *, pushed: bool = True) -> None:
        """A worker has finished a minibatch. ``pushed``: servers have it, too. ElasticError if it has begun none."""
        own = self._of(worker)
        if own.finished == own.started:
            raise ElasticError(f"worker {worker!r} finishes a minibatch that it has not begun; call started first")
        own.finished += 1
        if pushed:
            own.pushed = own.finished // self.wave

    def pushed(self, worker: Hashable) -> None:
        """Servers have a worker's next wave. ElasticError if it has not finished that."""
        own = self._of(worker)
        if own.pushed == own.finished // self.wave:
            raise ElasticError(f"worker {worker!r} pushes wave {own.pushed} before it is finished; call finished first")
        own.pushed += 1

    def _of(self, worker: Hashable) -> _Progress:
        try:
            return self._active[worker]
        except KeyError:
            raise ElasticError(f"worker {worker!r} is not there; expected one of {', '.join(map(repr, self._active))}") from None
