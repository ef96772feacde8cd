"""Which operators may be recomputed: run a second time before their backward pass, instead of keeping what they made.

A second run must change nothing. Random numbers repeat, because they follow from seed, step, call and block. Running statistics are noted
by the first run alone. What is refused here must not repeat, or has nothing to be made again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING

from soap.errors import StrategyError
from soap.model.graph import KEEP_STATE, NEXT_STATE, Operator, OperatorGraph
from soap.model.micro_batches import MicroBatches

if TYPE_CHECKING:
    from soap.strategy.config import Strategy


def refusal(graph: OperatorGraph, op: Operator) -> str | None:
    """Why an operator must not be recomputed; None if it may be."""
    if op.kind in (NEXT_STATE, KEEP_STATE):
        return "it keeps the buffers that a step changes, once"
    if graph.index[op.name] not in graph.backward_operators:
        return "it has no backward pass"
    if not op.partitionable:
        return "it has no rule, so that nobody knows what a second run would change"
    rows = [operand.tensor for operand in op.parameters if operand.tensor in graph.sparse]
    if rows:
        return f"it looks rows up in the sparse parameter {rows[0]!r}, which are brought for one use"
    return None


def repeatable(graph: OperatorGraph) -> frozenset[str]:
    """The names of the operators that may be recomputed."""
    return frozenset(op.name for op in graph.operators if refusal(graph, op) is None)


def require_repeatable(graph: OperatorGraph, op: Operator, recompute: bool) -> None:
    """StrategyError if an operator is to be recomputed that must not be."""
    why = refusal(graph, op) if recompute else None
    if why is not None:
        raise StrategyError(f"operator {op.name!r} is marked to be recomputed, but {why}; expected recompute false")


def runs_of(graph: OperatorGraph) -> tuple[tuple[str, ...], ...]:
    """Operators that are worth recomputing together, run by run in the order of the graph; each operator is in one run at most.

    A run ends where few bytes go on: at an operator behind which at most half as many bytes are still to be read as at most before it and
    behind it, from the last and to the next such low (in a transformer, each addition to the residual stream). That operator is in no run:
    so what it makes is kept, and the next run starts from there. What follows the last such place is no run, as the backward pass needs it
    at once. Chen et al., "Training deep nets with sublinear memory cost", 2016, keep such values alone.
    """
    widths = _bytes_to_be_read(graph)
    own, found, current = repeatable(graph), list[tuple[str, ...]](), list[str]()
    ends = _narrow_places(widths)
    for position, op in enumerate(graph.operators):
        if position in ends:
            found.append(tuple(current))
            current = []
        elif op.name in own:
            current.append(op.name)
    return tuple(run for run in found if run)


def _narrow_places(widths: Sequence[int]) -> set[int]:
    """Lows at most half as high as both sides."""
    inner = range(1, len(widths) - 1)
    lows = [place for place in inner if widths[place] <= widths[place - 1] and widths[place] < widths[place + 1]]
    around = zip([0, *lows[:-1]], lows, [*lows[1:], len(widths)], strict=True) if lows else ()
    return {low for before, low, after in around if 2 * widths[low] <= min(max(widths[before:low]), max(widths[low + 1 : after]))}


def _bytes_to_be_read(graph: OperatorGraph) -> list[int]:
    """Position -> bytes of what operators up to there have made that operators behind it read."""
    changes = [0] * (len(graph.operators) + 1)
    for name, (producer, _) in graph.producers.items():
        last = max((reader for reader, _ in graph.consumers.get(name, ())), default=producer)
        changes[producer] += graph.tensors[name].bytes
        changes[last] -= graph.tensors[name].bytes
    return list(accumulate(changes[:-1]))


def recomputed(graph: OperatorGraph, strategy: Strategy, names: Iterable[str] | None = None) -> Strategy:
    """The strategy with these operators recomputed, beside those that are; by default those of all ``runs_of`` the graph. Without those
    that run once for all of the strategy's micro-batches, or need several of them."""
    chosen = [name for run in runs_of(graph) for name in run] if names is None else names
    if strategy.microbatches > 1:
        cut = MicroBatches(graph, strategy.microbatches)
        chosen = [name for name in chosen if cut.may_repeat(graph.index[name])]
    return with_marks(strategy, chosen, True)


def with_marks(strategy: Strategy, names: Iterable[str], recompute: bool) -> Strategy:
    """The strategy in which these operators are recomputed, or not. Those that are do not offload what they keep."""
    own = ((name, strategy.operators[name]) for name in names)
    return strategy.with_changes({name: replace(c, recompute=recompute, offload=c.offload and not recompute) for name, c in own})
