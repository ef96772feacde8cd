"""Routes through a network of directed links: the fastest path for a message, with ties broken the same way everywhere.

Large clusters are trees of small parts: a host hangs on the network by one cable. So the network is divided into *parts* at its cut
nodes (biconnected components, Hopcroft & Tarjan, "Efficient algorithms for graph manipulation", 1973). Every path from one node to another
passes the same parts in the same order, and only inside a part there is something to choose.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from soap.cluster.topology import Link
    from soap.cluster.tree_routes import Ints, TreeRoutes

REFERENCE_MESSAGE_BYTES = 2**20
"""Routes are the fastest ones for a message of this size: large enough that bandwidth counts, small enough that latency does."""

PICOSECONDS = 10**12

KEPT_PATHS = 2**17

Path = tuple[int, ...]
Reached = tuple[int, int, Path]
Stretch = tuple[int, str, str]
"""One part on a path: (its number, node where the path enters, node where it leaves)."""


class Router:
    """Answers for pairs of nodes, computed on first use and kept.

    The time of a path is the sum of its latencies plus bytes over its narrowest link. Among equals fewer links win, then lower link
    numbers. That time is no sum over links, so a plain shortest path would be wrong. But among the paths that avoid all links narrower
    than some bandwidth the one of least latency is best, and there are few distinct bandwidths. The least (latency, links, link
    numbers) is least in each part, so each part's path is found by itself and the paths are joined.
    """

    def __init__(self, links: Sequence[Link]) -> None:
        self._links = tuple(links)
        self._bandwidths = tuple(sorted({link.bandwidth_bytes_per_second for link in links}, reverse=True))
        self._leaving: dict[str, list[Link]] = {}
        for link in links:
            self._leaving.setdefault(link.source, []).append(link)
        self._numbers = {(link.source, link.target): link.index for link in links}
        self._parts = NetworkParts(links)
        self._known: dict[tuple[str, str], Path | None] = {}
        self._inside: dict[tuple[int, str, float], tuple[dict[str, Reached], list[tuple[int, int, Path, str]]]] = {}

    @property
    def is_tree(self) -> bool:
        """Whether there is at most one path between any two nodes."""
        return self._parts.all_bridges

    def path(self, source: str, target: str) -> Path | None:
        """Link numbers in order, () from a node to itself; None if the target cannot be reached."""
        key = (source, target)
        if key not in self._known:
            if len(self._known) >= KEPT_PATHS:
                self._known.clear()
            self._known[key] = self._find(source, target)
        return self._known[key]

    def paths(self, sources: Sequence[str], targets: Sequence[str]) -> Ints:
        """Paths of many pairs at once: [pair, place], padded with -1. All targets must be reachable."""
        import numpy as np  # imported here because it is slow to import, and reading a cluster does not need it

        if self.is_tree:
            return self._tree.paths(sources, targets)
        found = [self.path(source, target) or () for source, target in zip(sources, targets, strict=True)]
        links = np.full((len(found), max(map(len, found), default=0)), -1, np.int64)
        for row, path in zip(links, found, strict=True):
            row[: len(path)] = path
        return links

    @cached_property
    def _tree(self) -> TreeRoutes:
        from soap.cluster.tree_routes import TreeRoutes

        return TreeRoutes(self._parts, self._numbers)

    def _find(self, source: str, target: str) -> Path | None:
        if source == target:
            return ()
        stretches = self._parts.between(source, target)
        if stretches is None:
            return None
        if all(self._parts.bridge[part] for part, *_ in stretches):
            found = [self._numbers.get((a, b)) for _, a, b in stretches]
            return None if None in found else tuple(link for link in found if link is not None)
        best: tuple[int, int, Path] | None = None
        for bandwidth in self._bandwidths:
            limit_ps = None if best is None else best[0] - _moving_ps(bandwidth)  # a path that is new here has a link of this bandwidth
            pieces = [self._least_latency(part, a, b, bandwidth, limit_ps) for part, a, b in stretches]
            whole = [piece for piece in pieces if piece is not None]
            if len(whole) == len(pieces):
                path = tuple(link for *_, links in whole for link in links)
                narrowest = min(self._links[i].bandwidth_bytes_per_second for i in path)
                key = sum(latency_ps for latency_ps, *_ in whole) + _moving_ps(narrowest), len(path), path
                best = key if best is None else min(best, key)
        return None if best is None else best[2]

    def _least_latency(self, part: int, source: str, target: str, bandwidth: float, limit_ps: int | None) -> Reached | None:
        """Dijkstra over a part's links of at least ``bandwidth``: (latency in whole ps, hops, links) to the target; None if it is not
        reached, or not within the limit. Whole numbers make ties exact. The search stops at the target, and goes on from there when a
        farther one is asked for."""
        done, queue = self._inside.setdefault((part, source, bandwidth), ({}, [(0, 0, (), source)]))
        while queue and target not in done and (limit_ps is None or queue[0][0] <= limit_ps):
            latency_ps, hops, path, node = heapq.heappop(queue)
            if node in done:
                continue
            done[node] = (latency_ps, hops, path)
            for link in self._leaving.get(node, ()):
                inside = self._parts.of_link[link.index] == part
                if inside and link.bandwidth_bytes_per_second >= bandwidth and link.target not in done:
                    step_ps = round(link.latency_seconds * PICOSECONDS)
                    heapq.heappush(queue, (latency_ps + step_ps, hops + 1, (*path, link.index), link.target))
        return done.get(target)


def _moving_ps(bandwidth: float) -> int:
    return round(REFERENCE_MESSAGE_BYTES / bandwidth * PICOSECONDS)


class NetworkParts:
    """The parts of a network, whatever the direction of its links, as a forest. ``of_link``: link -> its part. ``bridge``: part ->
    whether it consists of two neighbours only. Every node except the roots belongs to one part (``above``), which hangs from the node
    ``top``, ``depth`` parts below its root."""

    def __init__(self, links: Sequence[Link]) -> None:
        self._neighbours: dict[str, list[str]] = {}
        for a, b in sorted({(min(link.source, link.target), max(link.source, link.target)) for link in links}):
            self._neighbours.setdefault(a, []).append(b)
            self._neighbours.setdefault(b, []).append(a)
        self.bridge: list[bool] = []
        self.top: list[str] = []
        self.above: dict[str, int] = {}
        self.depth: dict[str, int] = {}
        self._root: dict[str, str] = {}
        for node in self._neighbours:
            if node not in self._root:
                self._divide(node)
        self.all_bridges = all(self.bridge)
        self.of_link = [self._of(link.source, link.target) for link in links]

    def between(self, source: str, target: str) -> list[Stretch] | None:
        """The parts that every path between two nodes passes, in order; None if the nodes are not connected."""
        a, b = source, target
        if self._root.get(a) is None or self._root.get(a) != self._root.get(b):
            return None
        up: list[Stretch] = []
        down: list[Stretch] = []
        while a != b:
            if self.depth[a] == self.depth[b] and self.above[a] == self.above[b]:
                up.append((self.above[a], a, b))
                break
            climb_a, climb_b = self.depth[a] >= self.depth[b], self.depth[b] >= self.depth[a]
            if climb_a:
                part = self.above[a]
                up.append((part, a, self.top[part]))
                a = self.top[part]
            if climb_b:
                part = self.above[b]
                down.append((part, self.top[part], b))
                b = self.top[part]
        return up + down[::-1]

    def _of(self, a: str, b: str) -> int:
        """The part of a link: that of its lower end, or of both ends if they are in the same one."""
        return self.above[a] if self.depth[a] >= self.depth[b] else self.above[b]

    def _divide(self, root: str) -> None:
        """Depth-first search from a root. A part is complete when nothing below a node leads above it."""
        order, low = {root: 0}, {root: 0}
        self._root[root], self.depth[root] = root, 0
        todo = [(root, "", iter(self._neighbours[root]))]
        open_nodes: list[str] = []
        place: dict[str, int] = {}
        closed: list[tuple[str, list[str]]] = []
        while todo:
            node, parent, rest = todo[-1]
            for other in rest:
                if other not in order:
                    order[other] = low[other] = len(order)
                    self._root[other] = root
                    place[other] = len(open_nodes)
                    open_nodes.append(other)
                    todo.append((other, node, iter(self._neighbours[other])))
                    break
                if other != parent:
                    low[node] = min(low[node], order[other])
            else:
                todo.pop()
                if todo:
                    low[parent] = min(low[parent], low[node])
                    if low[node] >= order[parent]:
                        closed.append((parent, open_nodes[place[node] :]))
                        del open_nodes[place[node] :]
        for top, members in reversed(closed):  # upper parts are completed after lower ones
            number = len(self.top)
            self.top.append(top)
            self.bridge.append(len(members) == 1)
            for member in members:
                self.above[member], self.depth[member] = number, self.depth[top] + 1
