"""In which order rings of an all-reduce pass their devices: one ring, one for each NIC of a host, or several over a mesh inside it.

A single ring enters and leaves each host once, so that it uses one NIC, however many there are. NCCL makes as many rings as NICs (its
channels), each of an equal part of the bytes: ring c enters every host at the device of NIC c, passes the others inside, and leaves by
NIC c again, so that it stays on one rail (NVIDIA/nccl, issues 412 and 1933). Where the devices of a host are joined by links of their own
instead of a switch, one ring would leave most of these idle; as many as find links of their own share the bytes.

How many disjoint rings there can be is limited by the node with the fewest links. A complete graph of n nodes has n-1 of them, each in one
direction, unless n is 4 or 6 (Tillson, "A Hamiltonian decomposition of K*2m, 2m >= 8", 1980). They are found by trying, within a budget.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise
from math import gcd

from soap.cluster.topology import Topology

MOST_NODES = 8
"""Larger meshes, which nobody builds with GPUs, are not searched: there are rings with equal steps alone."""

BUDGET = 20_000
"""Rings that are tried."""

Capacities = tuple[tuple[int, ...], ...]
"""[source][target]: number of links from one node to another."""

Ring = tuple[int, ...]


@cache
def disjoint_rings(links: Capacities) -> tuple[Ring, ...]:
    """As many rings as are found that share no link, each from node 0 on; none if there is none. Where whole links leave some unused, as
    between four nodes, rings of half a link each are tried: twice as many may then use each."""
    if len(links) > MOST_NODES:
        return tuple(_equal_steps(links))
    found, most = _Search(links).rings(), _most(links)
    if len(found) == most:
        return found
    halves = _Search(tuple(tuple(2 * one for one in row) for row in links)).rings()
    return halves if len(halves) > 2 * len(found) else found


def _most(links: Capacities) -> int:
    return min(min(map(sum, links)), min(map(sum, zip(*links, strict=True))))


def _equal_steps(links: Capacities) -> Iterator[Ring]:
    count = len(links)
    for step in range(1, count):
        if gcd(step, count) == 1 and all(links[node][(node + step) % count] for node in range(count)):
            yield tuple(place * step % count for place in range(count))


class _Search:
    """Takes rings one by one, each over a link from node 0 of the lowest number, and goes back where no more fit."""

    def __init__(self, links: Capacities) -> None:
        self._left = [list(row) for row in links]
        self._most = _most(links)
        self._budget = BUDGET
        self._taken: list[Ring] = []
        self._best: tuple[Ring, ...] = ()

    def rings(self) -> tuple[Ring, ...]:
        self._extend()
        return self._best

    def _extend(self) -> bool:
        """Whether the search is over."""
        if len(self._taken) > len(self._best):
            self._best = tuple(self._taken)
        if len(self._best) == self._most or self._budget <= 0:
            return True
        first = next((node for node, left in enumerate(self._left[0]) if left), None)
        for ring in self._through([0, first]) if first is not None else ():
            self._budget -= 1
            self._take(ring, -1)
            self._taken.append(ring)
            over = self._extend()
            self._taken.pop()
            self._take(ring, 1)
            if over:
                return True
        return False

    def _through(self, path: list[int]) -> Iterator[Ring]:
        """All rings that begin with this path."""
        if len(path) == len(self._left):
            if self._left[path[-1]][0]:
                yield tuple(path)
            return
        for node in self._by_links_left(path):
            yield from self._through([*path, node])

    def _by_links_left(self, path: Sequence[int]) -> list[int]:
        """Next nodes, those with most links left first: they must not be left over."""
        row = self._left[path[-1]]
        return sorted((node for node, left in enumerate(row) if left and node not in path), key=lambda node: (-sum(self._left[node]), node))

    def _take(self, ring: Ring, change: int) -> None:
        for source, target in zip(ring, (*ring[1:], ring[0]), strict=True):
            self._left[source][target] += change


Orders = tuple[tuple[int, ...], ...]


def is_gloo(topology: Topology, devices: Sequence[int]) -> bool:
    """Whether the devices' backend is gloo, that of processors; else it is NCCL."""
    return any(topology.devices[device].type.kind == "cpu" for device in devices)


def ring_orders(topology: Topology, devices: Sequence[int]) -> Orders:
    """The orders of the rings over these devices, each host by host. One ring in ascending order, unless they are GPUs, and either are
    joined by a mesh inside a host, or, on several hosts, messages between those of the same places in their hosts take ways of their own:
    then rings start at each place that has one. Rings over a mesh that share the way to other hosts start at all places."""
    members = tuple(sorted(set(devices)))
    if len(members) < 2 or is_gloo(topology, members):  # gloo has one ring
        return (members,)
    hosts: dict[int, list[int]] = {}
    for device in members:
        hosts.setdefault(topology.devices[device].host, []).append(device)
    groups = list(hosts.values())
    rings = [_mesh_rings(topology, group) for group in groups]
    numbers, starts = range(max(map(len, rings))), _apart(topology, groups) if len(groups) > 1 else (0,)
    if len(groups) > 1 and len(starts) < 2:
        starts = range(min(map(len, groups))) if len(numbers) > 1 else (0,)
    return tuple(
        tuple(device for group, own in zip(groups, rings, strict=True) for device in _turned(own[number % len(own)], group[start]))
        for start in starts
        for number in numbers
    )


def _turned(ring: Sequence[int], first: int) -> Sequence[int]:
    at = ring.index(first)
    return (*ring[at:], *ring[:at])


def _mesh_rings(topology: Topology, group: Sequence[int]) -> Orders:
    """Rings over devices of one host; one in ascending order unless links join them directly."""
    one = (tuple(group),)
    if len(group) < 3 or not topology.direct_links:
        return one
    joined = [[topology.direct_links.get((a, b)) for b in group] for a in group]
    bandwidths = [[0.0 if link is None else topology.links[link].bandwidth_bytes_per_second for link in row] for row in joined]
    least = min((one for row in bandwidths for one in row if one), default=0.0)
    if not least:
        return one
    found = disjoint_rings(tuple(tuple(int(one / least + 1e-9) for one in row) for row in bandwidths))
    return tuple(tuple(group[place] for place in ring) for ring in found) or one


def _apart(topology: Topology, groups: Sequence[Sequence[int]]) -> Sequence[int]:
    """Places that all hosts have, and whose routes from host to host share no link with those of other places here."""
    steps, places = [*pairwise(groups), (groups[-1], groups[0])], range(min(map(len, groups)))
    return _disjoint(topology, steps, _disjoint(topology, steps[:1], places))  # most clusters are told by their first two hosts


def _disjoint(topology: Topology, steps: Sequence[tuple[Sequence[int], Sequence[int]]], places: Sequence[int]) -> Sequence[int]:
    if len(places) < 2:
        return places
    chosen: list[int] = []
    taken: set[int] = set()
    for place in places:
        links = {link for one, following in steps for link in topology.route(one[place], following[place])}
        if not links & taken:
            chosen.append(place)
            taken |= links
    return chosen
