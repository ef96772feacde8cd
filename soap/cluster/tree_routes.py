"""Routes through a network that is a tree, thousands at once: from both ends up to where they meet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from soap.cluster.routes import NetworkParts

Ints = NDArray[np.int64]


class TreeRoutes:
    """Finds many paths at once."""

    def __init__(self, parts: NetworkParts, numbers: Mapping[tuple[str, str], int]) -> None:
        self._place = {node: place for place, node in enumerate(parts.depth)}
        above = {node: parts.top[parts.above[node]] if node in parts.above else node for node in self._place}
        self._above = np.array([self._place[above[node]] for node in self._place], np.int64)
        self._depth = np.array(list(parts.depth.values()), np.int64)
        self._up = np.array([numbers.get((node, above[node]), -1) for node in self._place], np.int64)
        self._down = np.array([numbers.get((above[node], node), -1) for node in self._place], np.int64)

    def paths(self, sources: Sequence[str], targets: Sequence[str]) -> Ints:
        """[pair, place]: link numbers, padded with -1."""
        a = np.array([self._place.get(node, -1) for node in sources], np.int64)  # a node without links is only asked about itself
        b = np.array([self._place.get(node, -1) for node in targets], np.int64)
        up: list[Ints] = []
        down: list[Ints] = []
        while (apart := a != b).any():
            depth_a, depth_b = self._depth[a], self._depth[b]
            climb_a, climb_b = apart & (depth_a >= depth_b), apart & (depth_b >= depth_a)
            up.append(np.where(climb_a, self._up[a], -1))
            down.append(np.where(climb_b, self._down[b], -1))
            a, b = np.where(climb_a, self._above[a], a), np.where(climb_b, self._above[b], b)
        return np.stack([*up, *down[::-1]], axis=1) if up else np.empty((len(a), 0), np.int64)
