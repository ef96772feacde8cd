"""Routes through a network of directed links: the fastest path for a message, with ties broken the same way everywhere."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from soap.topology import Link

REFERENCE_MESSAGE_BYTES = 2**20
"""Routes are those that are fastest for a message of this size: large enough that bandwidth counts, small enough that latency does."""

PICOSECONDS = 10**12

Path = tuple[int, ...]


class Router:
    """Answers from ``source`` to all nodes, computed on first use and kept.

    The time of a path is the sum of its latencies plus bytes over its narrowest link; among equals fewer links win, then lower link
    numbers. That time is no sum over links, so a plain shortest path would be wrong. But among the paths that avoid all links narrower
    than some bandwidth, the one of least latency is best, and there are few distinct bandwidths.
    """

    def __init__(self, links: Sequence[Link]) -> None:
        self._links = tuple(links)
        self._bandwidths = tuple(sorted({link.bandwidth_bytes_per_second for link in links}, reverse=True))
        self._leaving: dict[str, list[Link]] = {}
        for link in links:
            self._leaving.setdefault(link.source, []).append(link)
        self._known: dict[str, Mapping[str, Path]] = {}

    def paths(self, source: str) -> Mapping[str, Path]:
        """Node -> link numbers in order; nodes that cannot be reached are missing, and ``source`` itself has ()."""
        known = self._known.get(source)
        if known is None:
            known = self._known[source] = self._fastest(source)
        return known

    def _fastest(self, source: str) -> Mapping[str, Path]:
        best: dict[str, tuple[int, int, Path]] = {source: (0, 0, ())}
        for bandwidth in self._bandwidths:
            for node, (latency_ps, hops, path) in self._least_latency(source, bandwidth).items():
                if node != source:
                    narrowest = min(self._links[i].bandwidth_bytes_per_second for i in path)
                    key = (latency_ps + round(REFERENCE_MESSAGE_BYTES / narrowest * PICOSECONDS), hops, path)
                    best[node] = min(key, best.get(node, key))
        return {node: path for node, (_, _, path) in best.items()}

    def _least_latency(self, source: str, bandwidth: float) -> dict[str, tuple[int, int, Path]]:
        """Dijkstra over the links of at least ``bandwidth``: node -> (latency in whole ps, hops, links); whole numbers make ties exact."""
        done: dict[str, tuple[int, int, Path]] = {}
        queue: list[tuple[int, int, Path, str]] = [(0, 0, (), source)]
        while queue:
            latency_ps, hops, path, node = heapq.heappop(queue)
            if node in done:
                continue
            done[node] = (latency_ps, hops, path)
            for link in self._leaving.get(node, ()):
                if link.bandwidth_bytes_per_second >= bandwidth and link.target not in done:
                    step_ps = round(link.latency_seconds * PICOSECONDS)
                    heapq.heappush(queue, (latency_ps + step_ps, hops + 1, (*path, link.index), link.target))
        return done
