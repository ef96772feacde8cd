"""Rings through all nodes of a small mesh that share no link: how NCCL and RCCL use the links between GPUs without a switch.

How many there can be is limited by the node with the fewest links. A complete graph of n nodes has n-1 of them, each in one direction,
unless n is 4 or 6 (Tillson, "A Hamiltonian decomposition of K*2m, 2m >= 8", 1980). They are found by trying, within a budget.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from math import gcd

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
