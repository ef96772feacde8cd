"""What communication between processors does to what they compute, and to other communication, beside holding links. As measured between
ranks (``soap.measure.link_probes``); where nothing was, nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite
from typing import NamedTuple

from soap.errors import TopologyError


class Share(NamedTuple):
    """For how long something that takes a time keeps a device busy: ``fixed_ns``, and ``permille`` of that time."""

    fixed_ns: int = 0
    permille: int = 0

    def busy_ns(self, held_ns: int) -> int:
        """fixed_ns + floor(permille * held_ns / 1000)."""
        return self.fixed_ns + self.permille * held_ns // 1000

    def check(self, where: str) -> None:
        """TopologyError unless both are at least 0."""
        check_not_negative(where, "fixed time", self.fixed_ns)
        check_not_negative(where, "part of the duration", self.permille)


@dataclass(frozen=True, slots=True)
class Port:
    """Where a processor does something for what goes over a link. ``device``: whose it is, None for a link that none of them sends or
    receives by. A message keeps it busy for ``fixed_ns``, and ``permille`` of the time for which it holds its links."""

    link: int
    device: int | None
    fixed_ns: int
    permille: int

    def __post_init__(self) -> None:
        Share(self.fixed_ns, self.permille).check(f"port of link {self.link}")


Shares = tuple[tuple[int, Share], ...]
"""(number of devices, share), numbers ascending."""


@dataclass(frozen=True, slots=True)
class CpuOverhead:
    """For how long a collective keeps each device busy that has a port at one of its links, by the number of devices. All of it is one call
    of a library, in which further devices cost less than messages of their own. Between these numbers linearly, beyond them as at the
    nearest; not at all if there are none."""

    all_reduce: Shares = ()
    exchange: Shares = ()

    def __post_init__(self) -> None:
        for devices, share in (*self.all_reduce, *self.exchange):
            share.check(f"collective of {devices} devices")

    def of_all_reduce(self, devices: int) -> Share:
        """Of a sum over so many devices, or a broadcast."""
        return _share(self.all_reduce, devices)

    def of_exchange(self, devices: int) -> Share:
        """Of an exchange in which a device sends the others of so many something, or they it."""
        return _share(self.exchange, devices)


Factors = tuple[tuple[int, float], ...]
"""(number of devices, factor), numbers ascending."""


@dataclass(frozen=True, slots=True)
class CollectiveLatencyFactor:
    """How many times a message's latency the latency of a collective's step is, since devices, or what serves them, wait for each other:
    by the number of devices, of all-reduces and of exchanges. Between these numbers linearly, beyond them as at the nearest; 1 if there are
    none."""

    all_reduce: Factors = ()
    exchange: Factors = ()

    def of_all_reduce(self, devices: int) -> float:
        """The factor for so many devices."""
        return _between(self.all_reduce, devices, 1.0)

    def of_exchange(self, devices: int) -> float:
        """The factor for so many devices, of which each sends the others something."""
        return _between(self.exchange, devices, 1.0)

    def of_tree(self, devices: int, rounds: int) -> float:
        """The factor for each round of a broadcast to so many devices, or of its transpose: one call of a library, as a sum is. All rounds
        take no less than a message."""
        return max(self.of_all_reduce(devices), 1 / max(1, rounds))


@dataclass(frozen=True, slots=True)
class ColdPenalty:
    """A device that has waited, or communicated, since its last tile is slower for a while: a processor that others have had meanwhile
    finds its caches cold, and one that has slept comes back at a lower clock. And where all wait for each other, the slowest tile decides.
    ``points``: (ns of tiles since then, how many ns longer they have taken together), both rising; between them linearly, from nothing at
    0, and no more behind the last. ``behind_messages``: the same where the last communication was a message, for which one device waited
    for one other; empty: as ``points``."""

    points: tuple[tuple[int, int], ...] = ()
    behind_messages: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        for points in (self.points, self.behind_messages):
            for (before, less), (after, more) in pairwise(((0, 0), *points)):
                if after <= before or more < less:
                    raise TopologyError(f"cold penalty of a device: {(after, more)} behind {(before, less)}; expected more of both")

    def points_behind(self, *, message: bool) -> tuple[tuple[int, int], ...]:
        """The points that hold behind a message, or behind anything else."""
        return (self.behind_messages if message else ()) or self.points

    def longer_ns(self, computed_ns: int, *, behind_message: bool = False) -> int:
        """How much longer so many ns of tiles take together."""
        before = less = 0
        for after, more in self.points_behind(message=behind_message):
            if computed_ns < after:
                return less + (more - less) * (computed_ns - before) // (after - before)
            before, less = after, more
        return less


NO_CPU_OVERHEAD, NO_LATENCY_FACTOR, NO_COLD_PENALTY = CpuOverhead(), CollectiveLatencyFactor(), ColdPenalty()
"""Where nothing was measured."""


def check_not_negative(where: str, what: str, value: float) -> None:
    """TopologyError unless the value is finite and at least 0."""
    if not (isfinite(value) and value >= 0):
        raise TopologyError(f"{where}: {what} is {value!r}; expected a finite number of at least 0")


def _share(shares: Shares, devices: int) -> Share:
    figures = zip(*((float(own.fixed_ns), float(own.permille)) for _, own in shares), strict=True)
    known = [count for count, _ in shares]
    return Share(*(round(_between(list(zip(known, own, strict=True)), devices, 0.0)) for own in figures))


def _between(factors: Sequence[tuple[int, float]], devices: int, without: float) -> float:
    before = factors[0] if factors else (0, without)
    for count, factor in factors:
        if count >= devices:
            low, at_low = before
            return factor if count <= low else at_low + (factor - at_low) * (max(devices, low) - low) / (count - low)
        before = (count, factor)
    return before[1]
