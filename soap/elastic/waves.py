"""Values under wave synchronous parallel training (Park et al., "HetPipe", ATC 2020): what a worker begins a minibatch with, what it
pushes, and in which order servers add it up. When it may begin is the rule of ``clocks``.

A worker's *wave* is so many minibatches, one after the other. When all of them are finished, their updates' sum goes to the servers, once;
an incomplete wave goes when the worker has nothing more to do, and with it the worker has left. Servers add wave by wave, and those of a
wave in the order of workers, as soon as all active workers have pushed it: so the values of a version, which is a number of waves of all
workers, do not depend on who was first.

Values are anything that can be added: numbers, tensors, or, to prove it, sets.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any, Generic, Protocol, TypeVar

from soap.elastic.faults import ElasticError


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
