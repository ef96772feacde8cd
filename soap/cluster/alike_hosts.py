"""Routes between the devices of many hosts that are alike, found once for each pair of places in a host.

Alike hosts have the same links inside, and the same links to the same switches between hosts. So exchanging two of them changes no time:
the fastest route between two devices of hosts a and b is that between the devices of the same places in any other two hosts. Only which of
several equally fast routes is taken follows from the numbers of links. If it is the same for the first two hosts and for the last two, it
takes no third host, and it is the same for all: a third host's links would have won where they have lower numbers.

Few hosts are enough to find it. A route passes each switch between hosts at most once, so that it passes fewer third hosts than there are
such switches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from soap.cluster.routes import Path, Router

if TYPE_CHECKING:
    from soap.cluster.topology import Device, Link

Ints = NDArray[np.int64]
Template = tuple[tuple[int, int], ...]
"""A route: for each of its links whose it is (``SOURCE``, ``TARGET`` or ``BETWEEN``), and its place among that host's, or its number."""
Block = tuple[int, tuple[object, ...]]
"""A host's links: the number of the first one, and what is the same for all alike hosts."""

SOURCE, TARGET, BETWEEN = range(3)
SPARE = 4


class AlikeHosts:
    """``find`` makes it. ``hosts``, ``places`` [device]: its host, and its place in there."""

    def __init__(self, devices: Sequence[Device], links: Sequence[Link], first: Sequence[int], size: int, kept: int) -> None:
        """``first`` [host]: its first link. ``size``: links of a host. ``kept``: of how many hosts routes are found."""
        order = {host: number for number, host in enumerate(dict.fromkeys(device.host for device in devices))}
        self.hosts: Ints = np.array([order[device.host] for device in devices], np.int64)
        each = len(devices) // len(first)
        self.places: Ints = np.arange(len(devices), dtype=np.int64) % each
        self._first, self._size, self._each = np.array(first, np.int64), size, each
        self._names = [device.name for device in devices[: kept * each]]
        inside = range(first[0], first[kept - 1] + size)
        self._numbers = [*range(first[0]), *inside, *range(first[-1] + size, len(links))]
        self._router = Router([replace(links[number], index=place) for place, number in enumerate(self._numbers)])
        self._kept = kept
        self._known: dict[tuple[int, int, int], Template | None] = {}

    @classmethod
    def find(cls, devices: Sequence[Device], links: Sequence[Link]) -> AlikeHosts | None:
        """The hosts of a cluster if all are alike, and so many that it pays to know; else None."""
        blocks, between, switches = _blocks(devices, links)
        firsts = [first for first, _ in blocks]
        kept = len(switches) + SPARE
        if len(blocks) <= 2 * kept or any(own != blocks[0][1] for _, own in blocks) or len(devices) % len(blocks):
            return None
        size = len(blocks[0][1])
        if not size or any(b - a != size for a, b in pairwise(firsts)):
            return None
        if any(firsts[0] <= link.index < firsts[-1] + size for link in between):
            return None
        each = len(devices) // len(blocks)
        if any(device.host != devices[number // each * each].host for number, device in enumerate(devices)):
            return None
        return cls(devices, links, firsts, size, kept)

    def route(self, source: int, target: int) -> Path | None:
        """The route between two devices; None if that is not the same for all hosts."""
        if source == target:
            return ()
        a, b = int(self.hosts[source]), int(self.hosts[target])
        template = self._template(int(self.places[source]), int(self.places[target]), (b > a) - (b < a))
        if template is None:
            return None
        base = int(self._first[a]), int(self._first[b]), 0
        return tuple([base[whose] + place for whose, place in template])

    def routes(self, sources: Sequence[int] | Ints, targets: Sequence[int] | Ints) -> Ints | None:
        """[pair, place]: routes of many pairs, padded with -1; None if some are not the same for all hosts."""
        one, other = np.asarray(sources, np.int64), np.asarray(targets, np.int64)
        a, b = self.hosts[one], self.hosts[other]
        ways = (self.places[one] * self._each + self.places[other]) * 3 + np.sign(b - a) + 1
        asked = np.flatnonzero(np.bincount(ways, minlength=1))
        found = [self._template(*divmod(pair, self._each), way - 1) for pair, way in (divmod(own, 3) for own in asked.tolist())]
        known = [template for template in found if template is not None]
        if len(known) < len(found):
            return None
        longest = max(map(len, known), default=0)
        padded = [(*template, *[(BETWEEN, -1)] * (longest - len(template))) for template in known]
        table = np.array(padded, np.int64).reshape(len(known), longest, 2).transpose(1, 2, 0)
        rows = np.zeros(3 * self._each**2, np.int64)
        rows[asked] = np.arange(len(asked))
        row, bases = rows[ways], [self._first[a], self._first[b], np.zeros_like(a)]
        links: Ints = np.empty((len(one), longest), np.int64)
        for column, (whose, place) in zip(links.T, table, strict=True):
            column[:] = np.choose(whose[row], bases) + place[row]
        return links

    def form(self, devices: Sequence[int]) -> tuple[object, Ints] | None:
        """(equal for devices that lie alike, the numbers of the first links of their hosts), of ascending devices. None if some routes
        between such places are not the same for all hosts."""
        hosts, pattern = np.unique(self.hosts[list(devices)], return_inverse=True)
        places = self.places[list(devices)].tolist()
        ways = [(a, b, way) for a in {*places} for b in {*places} for way in (-1, 0, 1) if way or a != b]
        if any(self._template(*way) is None for way in ways):
            return None
        return (tuple(places), tuple(pattern.tolist())), self._first[hosts]

    def moved(self, links: Sequence[int], theirs: Ints, ours: Ints) -> tuple[int, ...]:
        """Links of hosts with these first links as those of other hosts, and links between hosts as they are."""
        numbers = np.array(links, np.int64)
        at = np.searchsorted(theirs, numbers, side="right") - 1
        inside = (at >= 0) & (numbers < theirs[at] + self._size)
        return tuple((numbers + np.where(inside, (ours - theirs)[at], 0)).tolist())

    def _template(self, source: int, target: int, way: int) -> Template | None:
        key = source, target, way
        if key not in self._known:
            last = self._kept - 1
            first = (0, 0) if way == 0 else (0, 1)[::way]
            after = (last, last) if way == 0 else (last - 1, last)[::way]
            found = self._between(source, target, *first)
            self._known[key] = found if found == self._between(source, target, *after) else None
        return self._known[key]

    def _between(self, source: int, target: int, a: int, b: int) -> Template | None:
        """The route from one place in host a to another in host b; None if it passes a third host, or there is none."""
        path = self._router.path(self._names[a * self._each + source], self._names[b * self._each + target])
        found: list[tuple[int, int]] = []
        for number in [-1] if path is None else [self._numbers[place] for place in path]:
            host, place = divmod(number - int(self._first[0]), self._size)
            if 0 <= host < len(self._first):
                if host not in (a, b):
                    return None
                found.append((SOURCE if host == a else TARGET, place))
            elif number < 0:
                return None
            else:
                found.append((BETWEEN, number))
        return tuple(found)


def _blocks(devices: Sequence[Device], links: Sequence[Link]) -> tuple[list[Block], list[Link], set[str]]:
    """(each host's links, links between no hosts' nodes, switches between hosts). A switch is a host's if devices hang on it, all of them
    that host's."""
    owner = {device.name: device.host for device in devices}
    hung: dict[str, set[int]] = {}
    for link in links:
        for end, switch in ((link.source, link.target), (link.target, link.source)):
            if end in owner and switch not in owner:
                hung.setdefault(switch, set()).add(owner[end])
    owner |= {switch: next(iter(own)) for switch, own in hung.items() if len(own) == 1}
    places: dict[int, dict[str, int]] = {device.host: {} for device in devices}
    for device in devices:
        places[device.host][device.name] = len(places[device.host])
    first: dict[int, int] = {}
    told: dict[int, list[object]] = {host: [] for host in places}
    between: list[Link] = []
    switches: set[str] = set()
    for link in links:
        host = owner.get(link.source, owner.get(link.target))
        switches.update(end for end in (link.source, link.target) if end not in owner)
        if host is None:
            between.append(link)
            continue
        own, ends = places[host], list[object]()
        for end in (link.source, link.target):
            ends.append(own.setdefault(end, len(own)) if owner.get(end) == host else end)
        first.setdefault(host, link.index)
        told[host].append((*ends, link.bandwidth_bytes_per_second, link.latency_seconds, link.interconnect))
    return [(first.get(host, -1), tuple(own)) for host, own in told.items()], between, switches
