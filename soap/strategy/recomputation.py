"""Which operators may be recomputed: run a second time before their backward pass, instead of keeping what they made.

A second run must change nothing. Random numbers repeat, because they follow from seed, step, call and block. Running statistics are noted
by the first run alone. What is refused here must not repeat, or has nothing to be made again.

An operator with a product of matrices, a convolution or attention in it may keep what it makes, and run its light calls alone again
(``LIGHT``). Then nothing that costs much is computed twice, and yet what it reads need not stay, if that is made again, too: selective
recomputation (Korthikanti et al., "Reducing activation recomputation in large transformer models", 2022), as
``torch.utils.checkpoint`` does it with ``create_selective_checkpoint_contexts``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from soap.errors import StrategyError
from soap.model.graph import KEEP_STATE, NEXT_STATE, Operator, OperatorGraph
from soap.model.micro_batches import MicroBatches

if TYPE_CHECKING:
    from soap.strategy.config import Strategy

STAYS, RECOMPUTED, LIGHT = range(3)
"""What an operator keeps stays until its backward pass, or all of it is made again then, or what its light calls make
(``OpConfig.recompute``)."""
LEVELS = (STAYS, RECOMPUTED, LIGHT)

WRITTEN = MappingProxyType({STAYS: False, RECOMPUTED: True, LIGHT: "light"})
"""A level -> what files say of it."""

PRODUCTS = frozenset(
    {"linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "conv1d", "conv2d", "conv3d", "convolution", "scaled_dot_product_attention"}
)
"""Kinds of operators whose light calls may run again without their product."""


def read_level(written: Any) -> int:
    """The reverse of ``WRITTEN``."""
    return LIGHT if written == WRITTEN[LIGHT] else int(written)


def said_level(written: Any) -> str:
    """What people are told of a level as it is written."""
    return {False: "no", True: "yes"}.get(written, str(written))


def has_product(op: Operator) -> bool:
    """Whether an operator has a product that it may keep while it is recomputed: nothing else in it takes long. With dropout attention is
    several calls, of which some are not light."""
    return op.kind in PRODUCTS and not op.drawn


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


def require_repeatable(graph: OperatorGraph, op: Operator, recompute: int) -> None:
    """StrategyError if an operator is to be recomputed that must not be, or is to keep a product that it does not have."""
    why = refusal(graph, op) if recompute else None
    if why is not None:
        raise StrategyError(f"operator {op.name!r} is marked to be recomputed, but {why}; expected recompute false")
    if recompute == LIGHT and not has_product(op):
        raise StrategyError(f"operator {op.name!r} ({op.kind}) has no product to keep; expected recompute true or false, not 'light'")


def runs_of(graph: OperatorGraph) -> tuple[tuple[str, ...], ...]:
    """Operators that are worth recomputing together, run by run in the order of the graph; each operator is in one run at most.

    A run ends where few bytes go on: at an operator behind which at most half as many bytes are still to be read as at most before it and
    behind it, from the last and to the next such low (in a transformer, each addition to the residual stream). That operator is in no run:
    so what it makes is kept, and the next run starts from there. What follows the last such place is no run, as the backward pass needs it
    at once. Chen et al., "Training deep nets with sublinear memory cost", 2016, keep such values alone.
    """
    return tuple(run for run, _ in _runs_and_ends(graph))


def run_levels(graph: OperatorGraph, extent: int) -> tuple[dict[str, int], ...]:
    """For each of ``runs_of`` the graph, how its operators are recomputed at an extent (``level_at``), and the operator at its end, if that
    can keep what it makes and nothing else: ``LIGHT``, unless nothing is recomputed."""
    found = []
    for run, end in _runs_and_ends(graph):
        levels = {name: level_at(graph.operators[graph.index[name]], extent) for name in run}
        if end is not None:
            levels[end] = min(extent, 1) * LIGHT
        found.append(levels)
    return tuple(found)


def _runs_and_ends(graph: OperatorGraph) -> list[tuple[tuple[str, ...], str | None]]:
    """``runs_of``, each with the operator at its end if that may be ``LIGHT``."""
    widths = _bytes_to_be_read(graph)
    own, found, current = repeatable(graph), list[tuple[tuple[str, ...], str | None]](), list[str]()
    ends = _narrow_places(widths)
    for position, op in enumerate(graph.operators):
        if position in ends:
            found.append((tuple(current), op.name if op.name in own and has_product(op) else None))
            current = []
        elif op.name in own:
            current.append(op.name)
    return [(run, end) for run, end in found if run]


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
    """The strategy with these operators recomputed, beside those that are; by default all ``run_levels``. As ``with_repeatable_levels``."""
    return with_repeatable_levels(graph, strategy, _all_runs(graph, RECOMPUTED) if names is None else dict.fromkeys(names, RECOMPUTED))


def selectively_recomputed(graph: OperatorGraph, strategy: Strategy) -> Strategy:
    """The strategy with all runs recomputed but for their products. As ``with_repeatable_levels``."""
    return with_repeatable_levels(graph, strategy, _all_runs(graph, LIGHT))


def _all_runs(graph: OperatorGraph, extent: int) -> dict[str, int]:
    return {name: level for levels in run_levels(graph, extent) for name, level in levels.items()}


def level_at(op: Operator, extent: int) -> int:
    """How an operator is recomputed where several are together: at the extent ``LIGHT`` those with products keep them, others are
    recomputed."""
    return extent if extent != LIGHT or has_product(op) else RECOMPUTED


def with_marks(strategy: Strategy, names: Iterable[str], recompute: int) -> Strategy:
    """The strategy in which these operators are recomputed, or not."""
    return with_levels(strategy, dict.fromkeys(names, int(recompute)))


def with_levels(strategy: Strategy, levels: Mapping[str, int]) -> Strategy:
    """The strategy in which these operators are recomputed so. Those that are do not offload what they keep."""
    own = ((name, strategy.operators[name], level) for name, level in levels.items())
    return strategy.with_changes({name: replace(c, recompute=level, offload=c.offload and level == STAYS) for name, c, level in own})


def with_repeatable_levels(graph: OperatorGraph, strategy: Strategy, levels: Mapping[str, int]) -> Strategy:
    """``with_levels``, without those operators that run once for all of the strategy's micro-batches, or need several of them."""
    if strategy.microbatches > 1:
        cut = MicroBatches(graph, strategy.microbatches)
        levels = {name: level for name, level in levels.items() if cut.may_repeat(graph.index[name])}
    return with_levels(strategy, levels)
