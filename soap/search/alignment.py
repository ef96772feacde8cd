"""Aligning an operator with a neighbour: configurations under which its tiles find their data where the neighbour left them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from soap.model.graph import Operand, OperatorGraph
from soap.model.regions import proportional
from soap.strategy.config import OpConfig, settled_config
from soap.strategy.shares import shares_of

KEPT = 2**10
"""Answers of ``aligned_with`` that are kept: a search asks again and again for the same few, of layers that are alike."""


@dataclass(frozen=True, slots=True)
class Edge:
    """An activation between an operator and a neighbour (its producer or one of its consumers).

    ``factors``: (factor of the neighbour, factor of the operator) for each dimension that both split.
    """

    neighbour: int
    factors: tuple[tuple[int, int], ...]


def edges_of(graph: OperatorGraph) -> tuple[tuple[Edge, ...], ...]:
    """Per operator, the edges to its producers and consumers, without repetitions."""
    found: list[dict[Edge, None]] = [{} for _ in graph.operators]
    for i, op in enumerate(graph.operators):
        for operand in op.inputs:
            if operand.tensor not in graph.producers:
                continue
            j, k = graph.producers[operand.tensor]
            produced = graph.operators[j].outputs[k]
            found[i][Edge(j, _matched(produced, operand))] = None
            found[j][Edge(i, _matched(operand, produced))] = None
    return tuple(tuple(edges) for edges in found)


def _matched(theirs: Operand, mine: Operand) -> tuple[tuple[int, int], ...]:
    """Pairs of factors that follow the same dimension; each factor at most once."""
    pairs: dict[int, int] = {}
    for a, b in zip(theirs.dims, mine.dims, strict=True):
        if a.factor is not None and b.factor is not None and a.factor not in pairs and b.factor not in pairs.values():
            pairs[a.factor] = b.factor
    return tuple(pairs.items())


def aligned_with(graph: OperatorGraph, source: OpConfig, position: int, edge: Edge) -> list[OpConfig]:
    """The configurations that follow one neighbour, in a fixed order.

    First the shared dimensions are split alike, and the neighbour's other axes (replicas, factors the operator does not share) become
    replicas, are left out, or split one more factor. Then all of the neighbour's devices are given to a single axis, as a
    column-parallel layer behind a data-parallel one needs.
    """
    op = graph.operators[position]
    if settled_config(op, 1) is not None:  # this operator follows nobody
        return []
    sizes = tuple(f.size if op.partitionable else 1 for f in op.factors)
    return list(_aligned(source, sizes, tuple((theirs, mine) for theirs, mine in edge.factors if source.degrees[theirs] > 1)))


@lru_cache(KEPT)
def _aligned(source: OpConfig, sizes: tuple[int, ...], pairs: tuple[tuple[int, int], ...]) -> tuple[OpConfig, ...]:
    """``aligned_with`` for an operator with factors of these sizes. ``pairs``: the edge's factors that the source splits."""
    shared = dict(pairs)
    rest = source.replicas * prod(d for f, d in enumerate(source.degrees) if f not in shared)
    configs: list[OpConfig] = []
    if all(source.degrees[theirs] <= sizes[mine] for theirs, mine in shared.items()):
        configs.append(_follow(source, sizes, shared, None, drop=False))
        if rest > 1:
            configs.append(_follow(source, sizes, shared, None, drop=True))
            free = [f for f, size in enumerate(sizes) if f not in shared.values() and size >= rest]
            configs.extend(_follow(source, sizes, shared, f, drop=False) for f in free)
    if shared and len(source.devices) > 1:
        configs.extend(_single_axis(source, sizes))
    return tuple(configs)


def _follow(source: OpConfig, sizes: Sequence[int], shared: Mapping[int, int], extra: int | None, *, drop: bool) -> OpConfig:
    """Split the shared factors like the source; its other axes go to factor ``extra``, to replicas (None), or are dropped.
    Shares that would leave a part of a smaller factor without anything become equal."""
    axes = (source.replicas, *source.degrees)
    steps = [prod(axes[a + 1 :]) for a in range(len(axes))]  # in the source's devices, from one place along the axis to the next
    rest = [a for a in range(len(axes)) if a - 1 not in shared]
    others = _places([range(0, (1 if drop else axes[a]) * steps[a], steps[a]) for a in rest])
    theirs_of = {mine: theirs for theirs, mine in shared.items()}
    weights: list[tuple[int, ...]] = [(1,)] * len(sizes)
    along: list[Sequence[int]] = [[0]] * len(sizes)
    for mine, theirs in theirs_of.items():
        weights[mine] = source.weights[theirs]
        along[mine] = [place * steps[theirs + 1] for place in range(source.degrees[theirs])]
    if extra is not None:
        weights[extra], along[extra] = (1,) * len(others), others
    devices = tuple([source.devices[place] for place in _places([others if extra is None else [0], *along])])
    weights = [own if _suits(size, own) else (1,) * len(own) for size, own in zip(sizes, weights, strict=True)]
    degrees = tuple(map(len, along))
    return source.placed(degrees, devices, len(others) if extra is None else 1, shares_of(degrees, weights))


def _places(along: Iterable[Sequence[int]]) -> list[int]:
    """Sums of one number of each list, for all choices, the last list's varying fastest."""
    found = [0]
    for own in along:
        if len(own) > 1 or own[0]:
            found = [place + step for place in found for step in own]
    return found


def _suits(size: int, weights: Sequence[int]) -> bool:
    """Whether every part of a factor has something, or there are no shares anyway."""
    return max(weights) == 1 or all(start < stop for start, stop in proportional(size, weights))


def _single_axis(source: OpConfig, sizes: Sequence[int]) -> list[OpConfig]:
    """All of the source's devices given to the replicas, or to one factor that is large enough."""
    ones, devices = [1] * len(sizes), source.devices
    configs = [source.placed(tuple(ones), devices, len(devices))]
    for f, size in enumerate(sizes):
        if size >= len(devices):
            configs.append(source.placed((*ones[:f], len(devices), *ones[f + 1 :]), devices))
    return configs
