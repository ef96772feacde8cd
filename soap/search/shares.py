"""Uneven shares as a choice of the search: samples are shifted from one device to another as long as that makes steps shorter.

A shift changes all operators at once whose samples are divided in the same proportion among the same devices: one alone would have to
fetch what its neighbours have elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import permutations

from soap.model.batch import sample_factor, samples_of
from soap.model.graph import OperatorGraph
from soap.model.regions import proportional
from soap.search.metropolis import Evaluator
from soap.strategy.config import Strategy
from soap.strategy.uneven import devices_of_parts, with_sample_weights

Division = tuple[tuple[frozenset[int], ...], tuple[int, ...]]
"""The devices of each part of the samples, and how many samples it has."""
MOST_PAIRS = 56
"""Pairs of parts between which shifts are tried: all of up to eight parts, else those of the heaviest and the lightest ones."""


def shifted(graph: OperatorGraph, evaluator: Evaluator, strategy: Strategy) -> Strategy:
    """The strategy with samples shifted until no shift by a sample makes it faster. Larger shifts are tried first."""
    best_ns = evaluator.makespan_ns(strategy)
    amount = max((max(counts) for _, counts in divisions(graph, strategy)), default=0) // 2
    while amount:
        better = next(
            ((cost_ns, own) for own in shifts(graph, strategy, amount) if (cost_ns := evaluator.makespan_ns(own)) < best_ns), None
        )
        if better is None:
            amount //= 2
        else:
            best_ns, strategy = better
    return strategy


def shifts(graph: OperatorGraph, strategy: Strategy, amount: int) -> Iterator[Strategy]:
    """The strategy with so many of the samples of one part given to another, for all pairs of parts of each division. Parts keep one
    sample at least."""
    for division, names in divisions(graph, strategy).items():
        counts = division[1]
        for giver, taker in _pairs(counts):
            if counts[giver] <= amount:
                continue
            moved = list(counts)
            moved[giver] -= amount
            moved[taker] += amount
            ops = [graph.operators[graph.index[name]] for name in names]
            yield strategy.with_changes({op.name: with_sample_weights(op, strategy.operators[op.name], moved) for op in ops})


def divisions(graph: OperatorGraph, strategy: Strategy) -> dict[Division, list[str]]:
    """The operators, by name, of each division of samples among devices, in equal or uneven shares."""
    found: dict[Division, list[str]] = {}
    samples = samples_of(graph) or 0
    for op in graph.operators:
        config, factor = strategy.operators[op.name], sample_factor(op)
        if factor is None or config.degrees[factor] == 1:
            continue
        counts = tuple([stop - start for start, stop in proportional(samples, config.weights[factor])])
        if min(counts) > 0:
            found.setdefault((tuple(map(frozenset, devices_of_parts(op, config))), counts), []).append(op.name)
    return found


def _pairs(counts: Sequence[int]) -> Iterator[tuple[int, int]]:
    parts: Sequence[int] = range(len(counts))
    if len(counts) * (len(counts) - 1) > MOST_PAIRS:
        ranked = sorted(parts, key=lambda part: counts[part])
        parts = (*ranked[:4], *ranked[-4:])
    yield from permutations(parts, 2)
