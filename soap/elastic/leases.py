"""Who works on which batch, and which batches are one step: batches are dealt to workers in leases, and dealt again, under their numbers,
if a worker is lost. A lease's number says epoch and batch, and the seed the order of samples. Which are done is
noted in the run's folder, so that another launcher goes on from there."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import heapify, heappop, heappush
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from soap.elastic.faults import ElasticError
from soap.errors import first_line
from soap.files import read_text, write_text_atomically


@dataclass(frozen=True, eq=False)
class Lease:
    """The right and duty to work on a batch. ``number``: its own, the same if the batch is dealt again. ``indices``: of its samples."""

    number: int
    epoch: int
    indices: NDArray[np.int64]


@dataclass(frozen=True)
class Finished:
    """All batches of all epochs are done."""


class Dealer:
    """Deals ``samples`` in batches of ``batch`` (the last one of an epoch may be smaller), ``epochs`` times, each time in another order
    that follows from ``seed``; if not ``shuffled``, each time as they come. An epoch begins when all batches of the one before are dealt,
    done or not. ``most``: of all leases, if these are not all of all epochs."""

    def __init__(self, samples: int, batch: int, epochs: int, seed: int = 0, *, shuffled: bool = True, most: int | None = None) -> None:
        if samples < 1 or batch < 1 or epochs < 0:
            raise ElasticError(f"{samples} samples in batches of {batch}, {epochs} epochs; expected at least 1, 1 and 0")
        self.samples, self.batch, self.epochs, self.seed, self.shuffled, self.most = samples, batch, epochs, seed, shuffled, most
        self.batches = -(-samples // batch)
        """A number of batches per epoch."""
        self._next, self._done = 0, Ledger()
        self._again: list[int] = []
        self._held: dict[Hashable, set[int]] = {}
        self._order = lru_cache(maxsize=2)(self._shuffled)

    @property
    def total(self) -> int:
        """Leases that are dealt in all."""
        return self.batches * self.epochs if self.most is None else min(self.most, self.batches * self.epochs)

    @property
    def first_left(self) -> int:
        """The lowest number that is not done."""
        intervals = self._done.intervals
        return intervals[0][1] if intervals and intervals[0][0] == 0 else 0

    def size(self, number: int) -> int:
        """How many samples a lease has."""
        place = number % self.batches
        return min(self.batch, self.samples - place * self.batch)

    def deal(self, worker: Hashable, below: int | None = None) -> Lease | Finished | None:
        """A lease, if one is left ``below`` this number; ``Finished`` if all is done; else None: the worker should ask again."""
        number = self._take(self.total if below is None else below)
        if number is None:
            return Finished() if len(self._done) >= max(self.total, self._next) else None
        self._held.setdefault(worker, set()).add(number)
        return self.lease(number)

    def _take(self, below: int) -> int | None:
        """The lowest number that must be dealt again, or else the next new one."""
        while self._again and (self._again[0] < below or self._again[0] in self._done):
            number = heappop(self._again)
            if number not in self._done:  # its former holder may have finished it after all
                return number
        if self._next >= min(self.total, below):
            return None
        self._next += 1
        return self._next - 1

    def lease(self, number: int) -> Lease:
        """The lease with this number, whoever has it."""
        self._check(number)
        epoch, place = divmod(number, self.batches)
        first = place * self.batch
        if not self.shuffled:
            return Lease(number, epoch, np.arange(first, first + self.size(number)))
        return Lease(number, epoch, self._order(epoch)[first : first + self.batch])

    def done(self, number: int) -> bool:
        """Note that a lease is done, by whomever. False if it was done before."""
        self._check(number)
        for held in self._held.values():
            held.discard(number)
        return self._done.add(number)

    def lost(self, worker: Hashable) -> int:
        """Note that a worker is gone: what it held will be dealt again. Returns how many leases these are."""
        held = self._held.pop(worker, set())
        for number in held:
            heappush(self._again, number)
        return len(held)

    def state(self) -> dict[str, Any]:
        """What a dealer goes on from, for JSON. Leases in workers' hands are no part of it: they are dealt again."""
        return {**self._plan, "next": self._next, "done": [list(pair) for pair in self._done.intervals]}

    @property
    def _plan(self) -> dict[str, Any]:
        fixed = {"samples": self.samples, "batch": self.batch, "epochs": self.epochs, "seed": self.seed}
        return {**fixed, "shuffled": self.shuffled, "most": self.most}

    @staticmethod
    def restored(state: Mapping[str, Any]) -> Dealer:
        """The dealer that ``state`` is of."""
        plan = {name: state[name] for name in ("samples", "batch", "epochs", "seed", "shuffled", "most")}
        dealer = Dealer(**plan)
        dealer._next, dealer._done = state["next"], Ledger((start, stop) for start, stop in state["done"])
        dealer._again = [number for number in range(dealer._next) if number not in dealer._done]
        heapify(dealer._again)
        return dealer

    def _check(self, number: int) -> None:
        if not 0 <= number < self._next:
            raise ElasticError(f"lease {number} was never dealt; expected 0 to {self._next - 1}")

    def _shuffled(self, epoch: int) -> NDArray[np.int64]:
        return np.random.default_rng([self.seed, epoch]).permutation(self.samples)


class Ledger:
    """A set of numbers from 0 on, kept as intervals: all below n, and a few beyond. So its size is that of the gaps, not of the numbers."""

    def __init__(self, intervals: Iterable[tuple[int, int]] = ()) -> None:
        """``intervals``: (start, stop), rising and apart from each other."""
        self._starts: list[int] = []
        self._stops: list[int] = []
        for start, stop in intervals:
            if start >= stop or start < 0 or (self._stops and start <= self._stops[-1]):
                raise ElasticError(f"interval {start}:{stop} of a ledger; expected intervals that rise and do not touch")
            self._starts.append(start)
            self._stops.append(stop)

    def __contains__(self, number: int) -> bool:
        at = bisect_right(self._starts, number) - 1
        return at >= 0 and number < self._stops[at]

    def __len__(self) -> int:
        """How many numbers there are."""
        return sum(self._stops) - sum(self._starts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ledger) and self.intervals == other.intervals

    __hash__ = None  # type: ignore[assignment]

    @property
    def intervals(self) -> tuple[tuple[int, int], ...]:
        """The numbers as intervals (start, stop)."""
        return tuple(zip(self._starts, self._stops, strict=True))

    def add(self, number: int) -> bool:
        """Add a number; False if it is there already."""
        if number < 0:
            raise ElasticError(f"lease {number}; expected a number from 0 on")
        if number in self:
            return False
        at = bisect_right(self._starts, number)
        joins_before = at > 0 and self._stops[at - 1] == number
        joins_after = at < len(self._starts) and self._starts[at] == number + 1
        if joins_before and joins_after:
            self._stops[at - 1] = self._stops.pop(at)
            self._starts.pop(at)
        elif joins_before:
            self._stops[at - 1] = number + 1
        elif joins_after:
            self._starts[at] = number
        else:
            self._starts.insert(at, number)
            self._stops.insert(at, number + 1)
        return True

    def copy(self) -> Ledger:
        """A ledger of its own."""
        return Ledger(self.intervals)

    def array(self) -> NDArray[np.int64]:
        """(intervals, 2), int64."""
        return np.array(self.intervals, dtype=np.int64).reshape(-1, 2)

    @staticmethod
    def of(array: NDArray[np.int64]) -> Ledger:
        """From ``array``. ElasticError in one line if it is none."""
        if array.ndim != 2 or array.shape[1] != 2:
            raise ElasticError(f"a ledger of shape {list(array.shape)}; expected (intervals, 2)")
        return Ledger((int(start), int(stop)) for start, stop in array)


@dataclass(frozen=True)
class Steps:
    """An epoch of so many ``leases``; as many as there are ``workers``, one after the other, are a step, the last perhaps of fewer."""

    leases: int
    workers: int

    @property
    def of_epoch(self) -> int:
        """How many steps an epoch has."""
        return -(-self.leases // self.workers)

    def of(self, lease: int) -> int:
        """The step to which a lease belongs."""
        epoch, place = divmod(lease, self.leases)
        return epoch * self.of_epoch + place // self.workers

    def members(self, step: int) -> range:
        """The leases of a step."""
        epoch, place = divmod(step, self.of_epoch)
        first = epoch * self.leases + place * self.workers
        return range(first, min(first + self.workers, (epoch + 1) * self.leases))


LEASES = "leases.json"
HOSTS = "hosts"
COMPARED = ("samples", "batch", "seed", "shuffled")
"""What must be as before. There may be more epochs."""


class Noted:
    """What is noted of a run."""

    def __init__(self, dealer: Dealer) -> None:
        self._dealer = dealer

    @property
    def seed(self) -> int:
        """The run's seed."""
        return self._dealer.seed

    def steps(self, workers: int) -> int:
        """How many steps of so many workers are done, all of their leases."""
        return Steps(self._dealer.batches, workers).of(self._dealer.first_left)


def noted_run(folder: str | Path) -> Noted:
    """What a folder says. ElasticError in one line if it is no run's."""
    path = Path(folder) / LEASES
    if not path.exists():
        raise ElasticError(f"{str(folder)!r} has no run of servers and workers; expected the folder of soap-run --save")
    return Noted(_read(path, {})[0])


def note_leases(folder: str | Path, dealer: Dealer, hosts: Sequence[str]) -> None:
    """Write down where a dealer is, and on which machine each server is."""
    noted = {**dealer.state(), HOSTS: [*hosts]}
    write_text_atomically(Path(folder) / LEASES, json.dumps(noted), error=ElasticError)


def continued_dealer(folder: str | Path, wanted: Dealer, servers: int) -> tuple[Dealer, list[str] | None]:
    """The dealer that is noted, for as many leases as the one that is wanted, and the machine that each server was on; the wanted one
    where nothing is noted. ElasticError in one line if they are of different runs."""
    path = Path(folder) / LEASES
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        return wanted, None
    before, hosts = _read(path, {"epochs": wanted.epochs, "most": wanted.most})
    for name in COMPARED:
        if getattr(before, name) != getattr(wanted, name):
            raise ElasticError(
                f"{str(folder)!r} is of a run with {name} {getattr(before, name)}, not {getattr(wanted, name)}; expected the same, or an "
                "empty folder"
            )
    if len(hosts) != servers:
        raise ElasticError(f"{str(folder)!r} is of a run with {len(hosts)} servers, not {servers}; expected as many")
    return before, hosts


def _read(path: Path, instead: dict[str, int | None]) -> tuple[Dealer, list[str]]:
    try:
        found = json.loads(read_text(path, what="leases", error=ElasticError))
        return Dealer.restored({**found, **instead}), [str(host) for host in found[HOSTS]]
    except (ValueError, KeyError, TypeError, RecursionError) as cause:
        raise ElasticError(
            f"leases {str(path)!r} are damaged: {first_line(cause)}; bring the file back, or choose another folder"
        ) from None
