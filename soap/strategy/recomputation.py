"""Which operators may be recomputed: run a second time before their backward pass, instead of keeping what they made.

A second run must change nothing. Random numbers repeat, because they follow from seed, step, call and block. Running statistics are noted
by the first run alone. What is refused here must not repeat, or has nothing to be made again.

An operator may keep what it makes and run again all the same (``LIGHT``), so that what it has made inside, and what it reads, need not
stay. If it has a product of matrices, a convolution or attention in it, its light calls alone run again. Then nothing that costs much is
computed twice: selective recomputation (Korthikanti et al., "Reducing activation recomputation in large transformer models", 2022), as
``torch.utils.checkpoint`` does it with ``create_selective_checkpoint_contexts``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING

from soap.model.batch import MicroBatches
from soap.model.graph import KEEP_STATE, NEXT_STATE, RECURRENT_KINDS, Operator, OperatorGraph
from soap.model.json_text import Form
from soap.model.likeness import layers_of

if TYPE_CHECKING:
    from soap.strategy.config import Strategy

STAYS, RECOMPUTED, LIGHT = range(3)
"""What an operator keeps stays until its backward pass, or all of it is made again then, or all but its outputs
(``OpConfig.recompute``)."""
LEVELS = (STAYS, RECOMPUTED, LIGHT)
"""Those that searches try."""
GATHERING = MappingProxyType({STAYS: 3, RECOMPUTED: 4, LIGHT: 5})
"""Each of these levels -> the same where operands that are gathered from several devices are not kept either, but gathered again
(``plan.recomputation.gathered_again``)."""
ALL_LEVELS = (*LEVELS, *GATHERING.values())
_KEPT = {again: level for level, again in GATHERING.items()}
GATHERING_SAID = ("gathering again", "recomputed and gathering again", "recomputed but for products and gathering again")

WRITTEN = MappingProxyType({STAYS: False, RECOMPUTED: True, LIGHT: "light", 3: "gather", 4: "all_gather", 5: "light_gather"})
"""A level -> what files say of it."""
_READ = {said: level for level, said in WRITTEN.items()}
LEVEL_FORM = Form(lambda: {"enum": [*_READ]}, _READ.__getitem__, WRITTEN.__getitem__)
"""A level in files."""

PRODUCTS = frozenset(
    {"linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "conv1d", "conv2d", "conv3d", "convolution", "scaled_dot_product_attention"}
)
"""Kinds of operators whose light calls may run again without their product."""

WORTH = 2
"""Runs between lows that are not half as high as both sides have to make this many times what is held because of them."""
MOST_LOWS = 256
"""So many of these lows are weighed, the lowest ones."""


def without_gathering(level: int) -> int:
    """The level whose gathered operands are kept."""
    return _KEPT.get(level, level)


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


def runs_of(graph: OperatorGraph) -> tuple[tuple[str, ...], ...]:
    """Operators that are worth recomputing together, run by run in the order of the graph; each operator is in one run at most.

    A run ends where few bytes go on: at an operator behind which at most half as many bytes are still to be read as at most before it and
    behind it, from the last and to the next such low (in a transformer, each addition to the residual stream); of several in a repeated
    layer, at the last one. That operator is in no run: so what it makes is kept, and the next run starts from there. Nor are those in one
    that make what is read behind it. Behind the last such
    place, lows need not be so deep: in convolutional networks what goes on is nearly as wide as what blocks make inside, but all that they
    make inside is several times as much. There runs end at those lows with which least is held (``_shallow_places``), without recurrent
    layers (``run_levels``). What follows the last end is no run, as the backward pass needs it at once. Chen et al., "Training deep nets
    with sublinear memory cost", 2016, keep such values alone.
    """
    return tuple(run for run, _ in _runs_and_light(graph))


def run_levels(graph: OperatorGraph, extent: int) -> tuple[dict[str, int], ...]:
    """For each of ``runs_of`` the graph, how its operators are recomputed at an extent (``level_at``), and the operator at its end, if that
    may run again: ``LIGHT``, so that it keeps what it makes and not what it reads, unless nothing is recomputed. Then the recurrent layers
    in none of them, each by itself: what they keep inside is far more than what they read and make. They run again as wholes, or not at
    all."""
    found = []
    for run, light in _runs_and_light(graph):
        levels = {name: level_at(graph.operators[graph.index[name]], extent) for name in run}
        found.append({**levels, **dict.fromkeys(light, min(extent, 1) * LIGHT)})
    inside, own = set[str]().union(*found), repeatable(graph)
    alone = (op.name for op in graph.operators if op.kind in RECURRENT_KINDS and op.name in own and op.name not in inside)
    return (*found, *({name: LIGHT if extent == RECOMPUTED else STAYS} for name in alone))


def _runs_and_light(graph: OperatorGraph) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    """``runs_of``, each with those operators that keep what they make, if it is recomputed: the one at its end, and others that make what
    is read behind a shallow end, as runs would go on across it else."""
    widths = _bytes_to_be_read(graph)
    own, found, current = repeatable(graph), list[tuple[tuple[str, ...], tuple[str, ...]]](), list[str]()
    deep = _ends_of_layers(graph, _narrow_places(widths))
    last = max(deep, default=-1)
    shallow = _shallow_places(graph, widths, last + 1)
    for position, op in enumerate(graph.operators):
        if position in deep or position in shallow:
            before = [name for name in current if _last_reader(graph, name) > position]
            if position in deep:  # the first to go back may read it, and would need all of the run then: a router's loss
                current, before = [name for name in current if name not in before], []
            found.append((tuple(current), (*before, op.name) if op.name in own else tuple(before)))
            current = []
        elif op.name in own and not (position > last and op.kind in RECURRENT_KINDS):
            current.append(op.name)
    return [(run, light) for run, light in found if run]


def _last_reader(graph: OperatorGraph, name: str) -> int:
    """The position of the last operator that reads what this one makes; its own if none does."""
    position = graph.index[name]
    made = (out.tensor for out in graph.operators[position].outputs)
    return max((reader for tensor in made for reader, _ in graph.consumers.get(tensor, ())), default=position)


def _lows(widths: Sequence[int]) -> list[int]:
    return [place for place in range(1, len(widths) - 1) if widths[place] <= widths[place - 1] and widths[place] < widths[place + 1]]


def _narrow_places(widths: Sequence[int]) -> set[int]:
    """Lows at most half as high as both sides."""
    lows = _lows(widths)
    around = zip([0, *lows[:-1]], lows, [*lows[1:], len(widths)], strict=True) if lows else ()
    return {low for before, low, after in around if 2 * widths[low] <= min(max(widths[before:low]), max(widths[low + 1 : after]))}


def _ends_of_layers(graph: OperatorGraph, places: Iterable[int]) -> set[int]:
    """Those of these places that no other follows in the same repeated layer."""
    layers, ordered = layers_of(graph), sorted(places)
    followed = {place for place, after in pairwise(ordered) if layers[place] is not None and layers[place] == layers[after]}
    return {*ordered} - followed


def _shallow_places(graph: OperatorGraph, widths: Sequence[int], first: int) -> set[int]:
    """The lows from ``first`` on at which runs are to end, so that least is held while one of them goes back: what goes on at the ends
    before it, and what it makes. None if that is not ``WORTH`` times less than what all operators make. Recurrent layers are not counted,
    as they keep what they make."""
    operators = graph.operators[first:]
    made = [0 if op.kind in RECURRENT_KINDS else sum(graph.tensors[out.tensor].bytes for out in op.outputs) for op in operators]
    before = [*accumulate(made, initial=0)]
    lows = (place for place in _lows(widths) if place >= first and graph.operators[place].kind not in RECURRENT_KINDS)
    places = sorted(sorted(lows, key=lambda place: widths[place])[:MOST_LOWS])
    ends = [(widths[place], before[place - first]) for place in places]
    low, high, chosen = 0, before[-1] // WORTH, list[int]()
    while high - low > max(1, before[-1] // 100):
        middle = (low + high) // 2
        found = _ends_of_runs(ends, before[-1], middle)
        low, high, chosen = (middle, high, chosen) if found is None else (low, middle, found)
    return {places[k] for k in chosen}


def _ends_of_runs(ends: Sequence[tuple[int, int]], made: int, most: int) -> list[int] | None:
    """Which of these places have least width together, if no run makes more than ``most`` with the widths of the ends before it; None if
    that cannot be. ``ends``: (width, what is made before it); ``made``: all of it."""
    sums, before, came_from = [0], [0], [-1]  # by place, of the best choice that ends there; 0 is the beginning
    for width, own in (*ends, (0, made)):
        near = [k for k in range(len(sums)) if sums[k] + own - before[k] <= most]
        best = min(near, key=lambda k: sums[k], default=None)
        sums.append(most + 1 if best is None else sums[best] + width)
        before.append(own)
        came_from.append(-1 if best is None else best)
    found, place = list[int](), came_from[-1]
    while place > 0:
        found.append(place - 1)
        place = came_from[place]
    return None if place < 0 else found[::-1]


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


def gathering_again(graph: OperatorGraph, strategy: Strategy) -> Strategy:
    """The strategy in which operators with products do not keep operands that are gathered from several devices, but gather them again for
    the backward pass, as Megatron-LM does with sequence parallelism (Korthikanti et al., section 4.2.2). Those that are recomputed
    communicate again for their second runs: what they gather, and sums that are made again. As ``with_repeatable_levels``. Those with other
    marks keep what they read, and so do those that read rows of experts."""
    levels = {}
    for op in graph.operators:
        config, routed = strategy.operators[op.name], any(operand.tensor in graph.routed for operand in op.inputs)
        if (op.kind in PRODUCTS or config.recompute) and not config.offload and not routed and refusal(graph, op) is None:
            levels[op.name] = GATHERING.get(config.recompute, config.recompute)
    return with_repeatable_levels(graph, strategy, levels)


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
    """The strategy in which these operators are recomputed so. Those that are have no other mark."""
    return strategy.with_changes({name: strategy.operators[name].marked("recompute", level) for name, level in levels.items()})


def in_micro_batches(graph: OperatorGraph, strategy: Strategy, count: int) -> Strategy:
    """The strategy in so many micro-batches. Operators that run once for all of them, or need several, are not recomputed."""
    cut, strategy = MicroBatches(graph, count), replace(strategy, microbatches=count)
    return with_marks(strategy, (op.name for i, op in enumerate(graph.operators) if not cut.may_repeat(i)), STAYS)


def with_repeatable_levels(graph: OperatorGraph, strategy: Strategy, levels: Mapping[str, int]) -> Strategy:
    """``with_levels``, without those operators that run once for all of the strategy's micro-batches, or need several of them."""
    if strategy.microbatches > 1:
        cut = MicroBatches(graph, strategy.microbatches)
        levels = {name: level for name, level in levels.items() if cut.may_repeat(graph.index[name])}
    return with_levels(strategy, levels)
