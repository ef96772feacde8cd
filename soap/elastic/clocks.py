"""How far workers may be apart: synchronous, bounded or asynchronous training (docs/internals/servers.md).

A worker's *clock* is the number of waves that it has finished; a *wave* is so many minibatches (1: each by itself). Stale synchronous
parallel training (Ho et al., NIPS 2013) lets a worker begin only if no worker's clock is more than D behind its own; wave synchronous
parallel training (Park et al., "HetPipe", ATC 2020) does so for pipelines with a wave of minibatches in flight. Who has left, or has
nothing to do, counts as infinitely far ahead.

Values under wave synchronous parallel training (Park et al., "HetPipe", ATC 2020): what a worker begins a minibatch with, what it
pushes, and in which order servers add it up. When it may begin is the rule of ``clocks``.

A worker's *wave* is so many minibatches, one after the other. When all of them are finished, their updates' sum goes to the servers, once;
an incomplete wave goes when the worker has nothing more to do, and with it the worker has left. Servers add wave by wave, and those of a
wave in the order of workers, as soon as all active workers have pushed it: so the values of a version, which is a number of waves of all
workers, do not depend on who was first.

Values are anything that can be added: numbers, tensors, or, to prove it, sets.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any, Generic, Protocol, TypeVar

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


class Addable(Protocol):
    """What values and updates are. Sums are new objects: what is in use by a minibatch stays as it is."""

    def __add__(self, other: Any, /) -> Any:
        """Both together."""


Values = TypeVar("Values", bound=Addable)


@dataclass(frozen=True)
class Push(Generic[Values]):
    """A worker's push of one wave. ``minibatches``: how many it has, fewer if it is the last one. ``update``: their sum, in their order."""

    wave: int
    minibatches: int
    update: Values


class WorkerWeights(Generic[Values]):
    """The values of one worker. ``wave``: minibatches of a wave. ``pulled``: what it last got from the servers, with the first ``version``
    waves of all workers. A worker's own waves are counted from ``version`` at the beginning. ``begun``: of the first of these, how many
    minibatches are finished already, and the sum of their updates."""

    def __init__(self, wave: int, pulled: Values, version: int = 0, begun: tuple[int, Values] | None = None) -> None:
        if wave < 1 or version < 0:
            raise ElasticError(f"waves of {wave} minibatches behind version {version}; expected waves of at least 1, and 0 or more before")
        self._wave, self._whole, self.version = wave, pulled, version
        """``_whole``: what was pulled, and its own complete waves that are not in it: added once, not for each minibatch."""
        self._first = version
        self._finished = version * wave + (0 if begun is None else begun[0])
        self._own: dict[int, Values] = {}
        """Sums of its own complete waves that are in no pulled values, in their order."""
        self._incomplete: Values | None = None if begun is None else begun[1]

    @property
    def pushes(self) -> int:
        """How many waves were complete so far."""
        return self._finished // self._wave - self._first

    @property
    def finished_minibatches(self) -> int:
        """How many are finished, those before the beginning included."""
        return self._finished

    def values(self) -> Values:
        """What a minibatch begins with and computes both its passes with: the values last pulled, and own finished updates not in them."""
        return self._whole if self._incomplete is None else self._whole + self._incomplete

    def finished(self, update: Values, whole: Values | None = None) -> Push[Values] | None:
        """The next minibatch is finished. Returns its wave if that is complete. ``whole``: the sum of the wave that it completes, in the
        order of minibatches, if somebody has that already: it is kept instead of another one of the same."""
        number = self._finished // self._wave
        if whole is None:
            whole = update if self._incomplete is None else self._incomplete + update
        self._finished += 1
        if self._finished % self._wave:
            self._incomplete = whole
            return None
        self._own[number], self._incomplete = whole, None
        self._whole = self._whole + whole
        return Push(number, self._wave, whole)

    def ended(self) -> Push[Values] | None:
        """There are no more minibatches. Returns the last wave if it is incomplete and has any."""
        if self._incomplete is None:
            return None
        return Push(self._finished // self._wave, self._finished % self._wave, self._incomplete)

    def pull(self, values: Values, version: int) -> None:
        """The servers' values of a version, which is at least the last one. Own waves that are in them count no longer."""
        if version < self.version:
            raise ElasticError(f"values with {version} waves come after some with {self.version}; expected as many or more")
        self.version = version
        self._own = {wave: own for wave, own in self._own.items() if wave >= version}
        self._whole = reduce(add, self._own.values(), values)


class GlobalWeights(Generic[Values]):
    """The servers' values (of one shard, or of all). ``version``: the values have so many waves of all workers, and nothing else.
    ``pushes``: how many have counted. Earlier versions stay until nobody asks for them any more (``forget``)."""

    def __init__(self, values: Values, workers: Iterable[int] = (), version: int = 0) -> None:
        self.values, self.version, self.pushes = values, version, 0
        self._kept = {version: values}
        self._waiting: dict[int, dict[int, Values]] = {}
        """Waves that not all have pushed: wave -> worker -> update."""
        self._next: dict[int, int] = {}
        """By worker, its next wave; also of those that have left."""
        self._active: set[int] = set()
        for worker in workers:
            self.joined(worker)

    def joined(self, worker: int) -> None:
        """A new worker begins with the values as they are; its first wave is the next one to be added. ElasticError for a known number."""
        if worker in self._next:
            raise ElasticError(f"worker {worker} joins for the second time; expected another number than {sorted(self._next)}")
        self._active.add(worker)
        self._next[worker] = self.version

    def at(self, version: int) -> Values:
        """The values of a version that is there. ElasticError for any other."""
        if version not in self._kept:
            raise ElasticError(f"values of version {version}; expected one of {', '.join(map(str, self._kept))}: which are there")
        return self._kept[version]

    def forget(self, least: int) -> None:
        """Nobody asks for versions below this one any more; the last one stays in any case."""
        self._kept = {version: own for version, own in self._kept.items() if version >= min(least, self.version)}

    def left(self, worker: int) -> None:
        """A worker has no more waves: nobody waits for any."""
        self._active.discard(worker)
        self._add_complete()

    def push(self, worker: int, wave: int, update: Values) -> bool:
        """A worker's wave. Returns False, and changes nothing, if it has counted before. ElasticError if it is not its next one."""
        if worker not in self._next:
            raise ElasticError(f"worker {worker} pushes wave {wave}; expected one of {', '.join(map(str, sorted(self._next))) or 'nobody'}")
        if wave < self._next[worker]:
            return False
        if wave > self._next[worker] or worker not in self._active:
            expected = f"wave {self._next[worker]}" if worker in self._active else "nothing: it has left"
            raise ElasticError(f"worker {worker} pushes wave {wave}; expected {expected}")
        self._next[worker] += 1
        self._waiting.setdefault(wave, {})[worker] = update
        self.pushes += 1
        self._add_complete()
        return True

    def _add_complete(self) -> None:
        behind = min((self._next[worker] for worker in self._active), default=None)
        while self._waiting and (behind is None or self.version < behind):
            own = self._waiting.pop(self.version)
            self.values = self.values + reduce(add, [own[worker] for worker in sorted(own)])
            self.version += 1
            self._kept[self.version] = self.values
