"""Memory of a tile beside its operands: computed from its operator's footprints (``OperatorGraph.footprints``) and how it is cut."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from fractions import Fraction
from math import ceil
from typing import NamedTuple

from soap.model.graph import NARROW, FactorKind, Footprint, Operator, OperatorGraph
from soap.model.regions import Interval, volume
from soap.plan.tiling import iteration_points, spatial_factors
from soap.strategy.recomputation import has_product

NEGLIGIBLE = 50
"""An addition by a cut of less than this part of the whole is rounding."""


class Use(IntEnum):
    """Uses of memory in a footprint, in the order of ``Footprint.fixed_bytes``."""

    KEPT = 0
    FORWARD = 1
    BACKWARD = 2
    PRODUCT = 3


class Shares(NamedTuple):
    """Memory of a tile beside its operands. ``keeps``: the operands that autograd keeps for it; None if that is not known. ``in_rows``,
    ``spread``, ``views``, ``lies``: as in ``Footprint``; empty if nothing is known. In bytes, rounded up: ``kept`` for its backward pass;
    ``forward``, ``backward``: what its calls pass to each other but do not keep, while its forward task or its backward task runs (0 if the
    operator has no footprint: then ``kept`` is a bound that includes both); ``product``: what its products make beside its outputs and a
    second run needs, as much as the tile may keep if the operator has no footprint, 0 if the operator runs again as a whole."""

    keeps: frozenset[int] | None
    in_rows: frozenset[int]
    spread: frozenset[int]
    kept: int
    forward: int
    backward: int
    product: int
    views: frozenset[tuple[int, int]] = frozenset()
    lies: frozenset[int] = frozenset()

    @property
    def work(self) -> int:
        """Bytes that its calls pass to each other at most; if the operator has no footprint, as much as the tile may keep."""
        return self.kept if self.keeps is None else max(self.forward, self.backward)


def shares_of(graph: OperatorGraph, op: Operator, intervals: Sequence[Interval]) -> Shares:
    """The memory of a tile with these intervals, worked out once for tiles of equal lengths."""
    key = op.name, _lengths(intervals)
    found = graph.shares.get(key)
    if found is None:
        found = graph.shares[key] = _known(graph, op, intervals) if op.name in graph.footprints else _unknown(op, intervals)
    return found


def _unknown(op: Operator, intervals: Sequence[Interval]) -> Shares:
    nothing, kept = frozenset[int](), _share(op.saved_bytes, op, volume(tuple(intervals)))
    return Shares(None, nothing, nothing, kept, 0, 0, kept if has_product(op) else 0)


def _known(graph: OperatorGraph, op: Operator, intervals: Sequence[Interval]) -> Shares:
    parts = _of_part(graph, op, intervals)
    like = [*parts.values()] or _like(graph, op, intervals)

    def size(use: Use) -> int:
        return _part_bytes(parts, _lengths(intervals), use) if parts else tile_bytes(op, graph.footprints[op.name], intervals, use)

    return Shares(
        keeps=frozenset[int]().union(*(own.keeps for own in like)),
        in_rows=like[0].in_rows.intersection(*(own.in_rows for own in like)),
        spread=like[0].spread.intersection(*(own.spread for own in like)),
        kept=size(Use.KEPT),
        forward=size(Use.FORWARD),
        backward=size(Use.BACKWARD),
        product=size(Use.PRODUCT) if has_product(op) else 0,
        views=frozenset[tuple[int, int]]().union(*(own.views for own in like)),
        lies=like[0].lies.intersection(*(own.lies for own in like)),
    )


def _like(graph: OperatorGraph, op: Operator, intervals: Sequence[Interval]) -> list[Footprint]:
    """The footprints of tiles that are cut as this one is: by each of its factors alone, and by several."""
    known, cut = graph.footprints[op.name], _cut_factors(op, intervals)
    if not cut or len(known) == 1:
        return [known[0]]
    alone, together = _of_cuts(op, known, cut)
    return [*(alone[i] for i in cut), *(together if len(cut) > 1 else ())]


def kept_places(graph: OperatorGraph, op: Operator, intervals: Sequence[Interval]) -> frozenset[int] | None:
    """``Shares.keeps`` of a tile with these intervals."""
    return shares_of(graph, op, intervals).keeps


def kept_share(graph: OperatorGraph, op: Operator, intervals: Sequence[Interval]) -> int:
    """``Shares.kept`` of a tile with these intervals."""
    return shares_of(graph, op, intervals).kept


def product_share(graph: OperatorGraph, op: Operator, intervals: Sequence[Interval]) -> int:
    """``Shares.product`` of a tile with these intervals."""
    return shares_of(graph, op, intervals).product


def _of_part(graph: OperatorGraph, op: Operator, intervals: Sequence[Interval]) -> Mapping[tuple[int, ...], Footprint]:
    """Those in ``OperatorGraph.part_footprints`` of tiles like this one; empty if there are none."""
    known = graph.part_footprints.get(op.name, {})
    if not known:
        return {}
    wanted = _cuts(op, _lengths(intervals))
    for cuts in dict.fromkeys((wanted, replace(wanted, image=False))) if wanted.of_sum else (wanted,):
        found = {lengths: own for lengths, own in known.items() if _cuts(op, lengths) == cuts}
        if found:
            return found
    return {}


@dataclass(frozen=True)
class _Cuts:
    """How a tile is cut, as far as that decides in which type it computes and what it copies: along the image, into parts of a sum, or
    else into parts of the weight."""

    image: bool
    of_sum: bool
    weight: bool


def _cuts(op: Operator, lengths: Sequence[int]) -> _Cuts:
    cut = {i for i, (factor, own) in enumerate(zip(op.factors, lengths, strict=True)) if own != factor.size}
    image, of_sum = not cut.isdisjoint(spatial_factors(op)), any(op.factors[i].summed for i in cut)
    return _Cuts(image, of_sum, not image and not of_sum and any(op.factors[i].kind is FactorKind.PARAMETER for i in cut))


def copies_are_known(graph: OperatorGraph, op: Operator, intervals: Sequence[Interval]) -> bool:
    """Whether ``Shares`` of a tile have the copies that padding makes."""
    if op.name not in graph.part_footprints:
        return False
    own = _cuts(op, _lengths(intervals))
    return own.image and any(_cuts(op, lengths) == own for lengths in graph.part_footprints[op.name])


def _part_bytes(known: Mapping[tuple[int, ...], Footprint], lengths: tuple[int, ...], use: Use) -> int:
    """Bytes of one use by a part of a sum, rounded up: along each factor a line through the two lengths that were tried. Where only one
    was, longer tiles take more in proportion, and shorter ones as much. What takes less with more points counts as not shrinking."""
    if 0 in lengths:
        return 0
    sizes: dict[tuple[int, ...], Fraction] = {key: Fraction(own.sizes_bytes[use]) for key, own in known.items()}
    for length in lengths:
        ends: dict[tuple[int, ...], dict[int, Fraction]] = {}
        for key, size in sizes.items():
            ends.setdefault(key[1:], {})[key[0]] = size
        sizes = {rest: _along(tried, length) for rest, tried in ends.items()}
    (found,) = sizes.values()
    return ceil(found) if use is Use.BACKWARD else max(0, ceil(found))


def _along(tried: Mapping[int, Fraction], length: int) -> Fraction:
    (few, least), (many, most) = min(tried.items()), max(tried.items())
    if few == many:
        return least * max(Fraction(1), Fraction(length, few)) if least > 0 else least
    return least + max(Fraction(0), (most - least) / (many - few)) * (length - few) if most >= least else least


def _lengths(intervals: Sequence[Interval]) -> tuple[int, ...]:
    return tuple([stop - start for start, stop in intervals])


def tile_bytes(op: Operator, known: Sequence[Footprint], intervals: Sequence[Interval], use: Use) -> int:
    """Bytes of one use, rounded up. ``known``: as in ``OperatorGraph.footprints``.

    Memory that does not shrink when one factor is cut may shrink when another is. So each factor that is cut contributes its own share of
    the whole. Example: a tile that is cut by a linear layer's outputs keeps the whole activation that the layer reads; a tile that is cut
    by samples keeps only its samples' part.
    """
    points = volume(tuple(intervals))
    if points == 0:
        return 0
    cut = _cut_factors(op, intervals)
    if not cut or len(known) == 1:
        size, fixed = _size(known[0], use)
        return fixed + _share(size - fixed, op, points)
    cuts = _of_cuts(op, known, cut)
    shares = {i: _read_share(op, i, intervals[i]) for i in cut}
    alone, together = ([_part(_size(own[i], use), *shares[i]) for i in cut if own] for own in cuts)
    found = [_together(number, alone) for number in range(len(alone))]
    if len(cut) > 1 and together and together[0].bytes_times > 0:
        found.append(_together(0, together))
    return max(found)


class _Part(NamedTuple):
    """A tile that is cut by one factor alone. It takes ``bytes_times / whole`` bytes, which are ``above / below`` of an uncut tile's. The
    bytes of a tile that is cut by other factors as well are multiplied by this share."""

    bytes_times: int
    whole: int
    above: int
    below: int


def _read_share(op: Operator, factor: int, interval: Interval) -> tuple[int, int]:
    """(of how many, so many) points of a factor memory is in proportion to. Narrow convolutions copy what they read into another type: of
    the image more than their share."""
    size, length = op.factors[factor].size, interval[1] - interval[0]
    if op.arithmetic not in NARROW or factor not in spatial_factors(op):
        return size, length
    whole, most = 1, 1
    for dim in (dim for operand in op.inputs for dim in operand.dims if dim.factor == factor):
        inside, read = (size - 1) * dim.scale + 1, (length - 1) * dim.scale + dim.hi - dim.lo
        if min(read, inside) * whole > most * inside or whole == most == 1:
            whole, most = inside, min(read, inside)
    return whole, most


def _part(sizes: tuple[int, int], whole: int, length: int) -> _Part:
    size, fixed = sizes
    bytes_times = fixed * whole + (size - fixed) * length
    return _Part(bytes_times, whole, *((bytes_times, size * whole) if fixed > 0 else (length, whole)))


def _together(number: int, parts: Sequence[_Part]) -> int:
    """Bytes of a tile cut by this part's factor, multiplied by the shares of all other parts, rounded up."""
    above, below = parts[number].bytes_times, parts[number].whole
    for other in (*parts[:number], *parts[number + 1 :]):
        above, below = above * other.above, below * other.below
    return -(-above // below)


def _cut_factors(op: Operator, intervals: Sequence[Interval]) -> list[int]:
    return [i for i, (factor, span) in enumerate(zip(op.factors, intervals, strict=True)) if span != (0, factor.size)]


def costly_cuts(op: Operator, known: Sequence[Footprint]) -> frozenset[int]:
    """The factors by which a cut alone makes tiles take more than their share of the whole operator's memory, or keep other operands: by a
    copy of what does not lie in one piece, or a wider type of parts of a sum."""
    whole, found = known[0], set()
    for place, own in enumerate(known[1 : 1 + len(op.factors)]):
        more = any(size > other + other // NEGLIGIBLE for size, other in zip(own.sizes_bytes, whole.sizes_bytes, strict=True))
        if more or own.keeps != whole.keeps:
            found.add(place)
    return frozenset(found)


def _of_cuts(op: Operator, known: Sequence[Footprint], cut: Sequence[int]) -> tuple[Sequence[Footprint], Sequence[Footprint]]:
    """(footprints with one factor cut, footprints with several cut: all, or all but the costly ones if the tile cuts none of these), each
    by factor. The second is empty if it adds nothing."""
    count = len(op.factors)
    together, beside = known[1 + count : 1 + 2 * count], known[1 + 2 * count :]
    return known[1 : 1 + count], beside if beside and costly_cuts(op, known).isdisjoint(cut) else together


def _size(footprint: Footprint, use: Use) -> tuple[int, int]:
    return footprint.sizes_bytes[use], footprint.fixed_bytes[use]


def _share(size: int, op: Operator, points: int) -> int:
    return -(-size * points // iteration_points(op))
