"""A start from a dynamic programme: OptCNN's elimination of nodes and edges (Jia et al., "Exploring Hidden Dimensions in Parallelizing
Convolutional Neural Networks", 2018).

It minimises a sum: each operator's time on its busiest device with the sum of its gradients and its update, and each edge's transfers,
forward and back. Nothing overlaps in this sum, so it is no prediction. Its minimum is a good place to begin.

An operator with two neighbours is eliminated: for each pair of its neighbours' configurations its best one is remembered. Two edges
between the same operators are added up. An operator with one neighbour, or none, is eliminated in the same way. If every operator has
more neighbours (not so with chains, branches that join again, and residual connections), the one with the fewest is fixed to the
configuration that is best with its neighbours' best, and the elimination goes on. The result is then no longer the minimum of the sum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from soap.search.rough_costs import Laid, RoughCosts
from soap.search.space import OperatorSpace, Space, make_config
from soap.strategy.config import OpConfig, Strategy

if TYPE_CHECKING:
    pass

Costs = NDArray[np.float64]

MAX_CANDIDATES = 48
"""Configurations per operator; see ``candidates``."""

MOST_SINGLES = 8
"""Of them on single devices, where there are more."""

MAX_PAIRS = 100_000
"""A search makes this start if all edges together have at most so many pairs of configurations: it takes a few seconds."""


@dataclass
class Additive:
    """A cost that is a sum. ``nodes``: by operator and candidate. ``edges``: (i, j) with i < j, by both candidates."""

    nodes: list[Costs]
    edges: dict[tuple[int, int], Costs]


@dataclass
class _Elimination:
    """The remaining problem. ``decisions``: how to choose an eliminated operator once those after it are chosen."""

    nodes: dict[int, Costs]
    edges: dict[int, dict[int, Costs]] = field(default_factory=dict)
    decisions: list[tuple[int, Callable[[dict[int, int]], int]]] = field(default_factory=list)
    exact: bool = True

    def join(self, i: int, j: int, cost: Costs) -> None:
        """Add a cost between i (rows) and j."""
        known = self.edges.setdefault(i, {}).get(j)
        total = cost if known is None else known + cost
        self.edges[i][j] = total
        self.edges.setdefault(j, {})[i] = total.T

    def run(self) -> None:
        """Eliminate everything."""
        while self.nodes:
            i = min(self.nodes, key=lambda n: (len(self.edges.get(n, {})), n))
            around = self.edges.pop(i, {})
            for j in around:
                del self.edges[j][i]
            own = self.nodes.pop(i)
            if len(around) > 2:
                self._fix(i, own, around)
            elif len(around) == 2:
                (j, to_j), (k, to_k) = around.items()
                table = own[:, None, None] + to_j[:, :, None] + to_k[:, None, :]
                best = table.argmin(axis=0)
                self.decisions.append((i, lambda chosen, best=best, j=j, k=k: int(best[chosen[j], chosen[k]])))  # type: ignore[misc]
                self.join(j, k, table.min(axis=0))
            elif around:
                ((j, to_j),) = around.items()
                pair = own[:, None] + to_j
                best = pair.argmin(axis=0)
                self.decisions.append((i, lambda chosen, best=best, j=j: int(best[chosen[j]])))  # type: ignore[misc]
                self.nodes[j] = self.nodes[j] + pair.min(axis=0)
            else:
                alone = int(own.argmin())
                self.decisions.append((i, lambda chosen, alone=alone: alone))  # type: ignore[misc]

    def _fix(self, i: int, own: Costs, around: dict[int, Costs]) -> None:
        """Fix one configuration for good: the best one if each neighbour may choose for itself."""
        self.exact = False
        best = int((own + sum((cost + self.nodes[j]).min(axis=1) for j, cost in around.items())).argmin())
        self.decisions.append((i, lambda chosen: best))
        for j, cost in around.items():
            self.nodes[j] = self.nodes[j] + cost[best]


def minimise(problem: Additive) -> tuple[list[int], bool]:
    """One candidate per operator, and whether they are certainly the minimum of the sum."""
    left = _Elimination(dict(enumerate(problem.nodes)))
    for (i, j), cost in problem.edges.items():
        left.join(i, j, cost)
    left.run()
    chosen: dict[int, int] = {}
    for i, decide in reversed(left.decisions):
        chosen[i] = decide(chosen)
    return [chosen[i] for i in range(len(problem.nodes))], left.exact


def candidates(space: OperatorSpace, most: int = MAX_CANDIDATES) -> list[OpConfig]:
    """Structured configurations: all of them, or some on single devices and the first placement of each grid in the order of preference."""
    if space.structured_count <= most:
        return list(space.structured())
    singles = [(grid, devices) for grid in space.grids if prod(grid) == 1 for devices in space.placements(grid)]
    firsts = [(grid, own[0]) for grid in space.grids if (own := space.placements(grid))]
    return [make_config(*one) for one in list(dict.fromkeys([*singles[:MOST_SINGLES], *firsts]))[:most]]


def pair_count(space: Space) -> int:
    """Roughly how many pairs of candidates the costs are made for: those on edges that differ in more than names."""
    graph = space.graph
    counts = [min(MAX_CANDIDATES, own.structured_count) for own in space.operators]
    seen: dict[tuple[object, ...], int] = {}
    for j, op in enumerate(graph.operators):
        for k, operand in enumerate(op.inputs):
            if operand.tensor in graph.producers:
                i, output = graph.producers[operand.tensor]
                other = graph.operators[i]
                seen[other.kind, other.factors, output, op.kind, op.factors, k] = counts[i] * counts[j]
    return sum(seen.values())


def dynamic_strategy(space: Space, rough: RoughCosts) -> Strategy:
    """The strategy of structured configurations that the dynamic programme finds."""
    problem, choices = additive_costs(space, rough)
    chosen, _ = minimise(problem)
    names = [op.name for op in space.graph.operators]
    return Strategy({name: own[c] for name, own, c in zip(names, choices, chosen, strict=True)})


def additive_costs(space: Space, rough: RoughCosts) -> tuple[Additive, list[list[OpConfig]]]:
    """The sum to minimise, in seconds, and each operator's candidates."""
    graph = space.graph
    by_space = {own: candidates(own) for own in dict.fromkeys(space.operators)}
    choices = [by_space[own] for own in space.operators]
    laid, nodes = _laid(rough, choices)
    edges: dict[tuple[int, int], Costs] = {}
    known: dict[tuple[int, ...], Costs] = {}
    for j, op in enumerate(graph.operators):
        for k, operand in enumerate(op.inputs):
            if operand.tensor not in graph.producers:
                continue
            i, output = graph.producers[operand.tensor]
            key = (rough.cuts.class_of(i), output, rough.cuts.class_of(j), k)
            if key not in known:
                known[key] = rough.edges_seconds(operand, output, k, laid[i], laid[j])
            edges[i, j] = edges[i, j] + known[key] if (i, j) in edges else known[key]
    return Additive(nodes, edges), choices


def _laid(rough: RoughCosts, choices: list[list[OpConfig]]) -> tuple[list[list[Laid]], list[Costs]]:
    """(how the candidates of each operator are laid, what they take), worked out once for all operators that differ in names only."""
    known: dict[tuple[int, tuple[OpConfig, ...]], tuple[list[Laid], Costs]] = {}
    found = []
    for i, own in enumerate(choices):
        key = rough.cuts.class_of(i), tuple(own)
        if key not in known:
            laid, seconds = list[Laid](), list[float]()
            for config in own:
                laid.append(rough.lay(i, config))
                seconds.append(rough.node_seconds(i, config, laid[-1]))
            known[key] = laid, np.array(seconds)
        found.append(known[key])
    return [laid for laid, _ in found], [nodes for _, nodes in found]
