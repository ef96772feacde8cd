"""What tiles take whose memory is a sum of terms, each of which shrinks with other factors: no product of shares says it. So tiles of
several lengths are tried, along each factor two, in all combinations; along each factor memory lies on a line.

- Parts of sums that are computed in a wider type keep a copy of each operand.
- Tiles of strided convolutions of 16-bit types are computed in float32 on CPUs unless they have all of the image and the weight, with
  copies of both (``rules.windows.convolve``).
- Tiles of transposed convolutions make what their neighbours make, too, and cut it off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product

from soap.model.graph import NARROW, FactorKind, Footprint, OperatorGraph
from soap.plan.tiling import Tile, is_window, spatial_factors, windows

FINEST = 16
"""Tiles are tried in large parts and in so many: what takes the most of several terms is below a line between two tiles."""

PartFootprints = dict[tuple[int, ...], Footprint]
"""As in ``OperatorGraph.part_footprints``."""
Run = Callable[[Tile], Footprint]
"""What a tile takes."""


class Parts:
    """Tries tiles of one operator. ``run``: what a tile takes; any error ends all of it."""

    def __init__(self, graph: OperatorGraph, position: int, run: Run) -> None:
        self._graph, self._position, self._run = graph, position, run
        self._op = graph.operators[position]
        self._space = spatial_factors(self._op)

    def summed(self) -> PartFootprints:
        """Parts of a sum, in halves and in ``FINEST``. The image stays whole."""
        of_windows = {dim.factor for k in windows(self._op) for dim in self._op.inputs[k].dims if is_window(dim)}
        whole = of_windows | self._space
        return self._tried([[f.size] if i in whole else _parted(f.size) for i, f in enumerate(self._op.factors)])

    def of_images(self, *, on_gpus: bool) -> PartFootprints:
        """Tiles that are cut along the image, and tiles with a part of the weight: of strided convolutions of 16-bit types on CPUs, and of
        transposed ones along the image in any type, where parts of sums are tried apart from others. Empty for all others: what these take
        is in proportion to what they read (``simulator.memory.footprint._read_share``), but for the copies that padding makes."""
        op, spread = self._op, "transpose" in self._op.kind
        strided = any(dim.scale > 1 for o in (*op.inputs, *op.outputs) for dim in o.dims if dim.factor in self._space)
        wide = strided and op.arithmetic in NARROW and not on_gpus
        summed = {i for i, f in enumerate(op.factors) if f.summed}
        weight = {i for i, f in enumerate(op.factors) if f.kind is FactorKind.PARAMETER}
        found: PartFootprints = {}
        if self._space and (spread or wide):
            cut = _inner if spread else _near
            for parted in (_whole, _parted) if spread and summed else (_whole,):
                kinds = [cut if i in self._space else parted if i in summed else _ends for i in range(len(op.factors))]
                chosen = [kind(f.size) for kind, f in zip(kinds, op.factors, strict=True)]
                if spread and wide:
                    chosen = [self._within(i) if i in self._space else own for i, own in enumerate(chosen)]
                found |= self._tried(chosen, inside=spread, at_end=spread and wide)
        if weight and wide:
            kinds = [_near if i in weight else _whole if i in summed | self._space else _ends for i in range(len(op.factors))]
            found |= self._tried([kind(f.size) for kind, f in zip(kinds, op.factors, strict=True)], inside=spread)
        return found

    def _tried(self, lengths: Sequence[Sequence[int]], *, inside: bool = False, at_end: bool = False) -> PartFootprints:
        """Tiles with each combination of these lengths: ``inside`` the image, where windows see all that they may; or at the beginning of
        its first dimension, so that they are padded there. Kept is also what a tile inside keeps. ``at_end``: at the image's end as well,
        on each side, where more is made that is cut off."""
        choices = [sorted({*own}) for own in lengths]
        found = {chosen: self._run(self._tile(self._grown(chosen), inside)) for chosen in product(*choices)}
        if at_end:
            return {chosen: _most([own, *map(self._run, self._at_ends(chosen))]) for chosen, own in found.items()}
        if inside or not self._space:
            return found
        within = self._run(self._tile([own[0] for own in choices], True))
        return {
            chosen: replace(own, keeps=own.keeps | within.keeps, in_rows=own.in_rows & within.in_rows, spread=own.spread & within.spread)
            for chosen, own in found.items()
        }

    def _grown(self, lengths: Sequence[int]) -> Sequence[int]:
        """These lengths; but if the image is cut small along one side, all of a side along which it would nearly be whole: tiles may be as
        long as that, and what takes the most changes with the length."""
        pairs = [(own, f.size if i in self._space else 0) for i, (f, own) in enumerate(zip(self._op.factors, lengths, strict=True))]
        small = [size > 1 and own == _near(size)[1] for own, size in pairs]
        grown = [size if size and own == _near(size)[0] and not tiny else own for (own, size), tiny in zip(pairs, small, strict=True)]
        return grown if any(small) else lengths

    def _within(self, place: int) -> list[int]:
        """Lengths of a side of the image: as ``_inner``, but no longer than what a tile in the middle sees all neighbours with. Longer ones
        see no more than what there is, and one that sees all of the image may be computed in another type."""
        size, image = self._op.factors[place].size, self._op.inputs[0]
        whole = [f.size for f in self._op.factors]
        dims = [(k, dim) for k, dim in enumerate(image.dims) if dim.factor == place]
        shape = self._graph.tensors[image.tensor].shape
        for length in range(max(1, size // 2), 1, -1):
            box = self._tile([*whole[:place], length, *whole[place + 1 :]], True).inputs[0]
            if all(box[k][1] - box[k][0] == (length - 1) * dim.scale + dim.hi - dim.lo < shape[k] for k, dim in dims):
                return [length, max(1, length // FINEST)]
        return _inner(size)

    def _at_ends(self, lengths: Sequence[int]) -> Iterator[Tile]:
        """Tiles of these lengths that end where the image ends, along one or several of the sides that they cut, else inside of it."""
        cut = [i for i in sorted(self._space) if lengths[i] < self._op.factors[i].size]
        for chosen in product((False, True), repeat=len(cut)):
            if any(chosen):
                yield self._tile(lengths, True, frozenset(i for i, own in zip(cut, chosen, strict=True) if own))

    def _tile(self, lengths: Sequence[int], inside: bool, at_end: frozenset[int] = frozenset()) -> Tile:
        """A tile of these lengths. ``at_end``: the factors whose end it has."""
        op, tensors, first = self._op, self._graph.tensors, min(self._space, default=0)
        middle = [inside or (i in self._space and i != first) for i in range(len(lengths))]
        room = [f.size - own for f, own in zip(op.factors, lengths, strict=True)]
        starts = [own if i in at_end else own // 2 if middle[i] else 0 for i, own in enumerate(room)]
        cell = tuple([(start, start + own) for start, own in zip(starts, lengths, strict=True)])
        inputs, parameters, outputs = (
            tuple([o.box(cell, tensors[o.tensor].shape) for o in group]) for group in (op.inputs, op.parameters, op.outputs)
        )
        return Tile(self._position, 0, 0, 0, cell, inputs, parameters, outputs)


def _most(tried: Sequence[Footprint]) -> Footprint:
    """What each of these tiles takes at most, kept between its passes and while each of them runs."""
    kept, product_bytes = max(own.kept_bytes for own in tried), max(own.product_bytes for own in tried)
    forward, backward = (max(own.kept_bytes + getattr(own, use) for own in tried) - kept for use in ("forward_bytes", "backward_bytes"))
    keeps = frozenset[int]().union(*(own.keeps for own in tried))
    rows, spread = (own[0].intersection(*own) for own in ([own.in_rows for own in tried], [own.spread for own in tried]))
    return Footprint(kept, forward, backward, keeps, product_bytes=product_bytes, in_rows=rows, spread=spread)


def _whole(size: int) -> list[int]:
    return [size]


def _ends(size: int) -> list[int]:
    """Of a factor that may be whole."""
    return [size, -(-size // FINEST)]


def _parted(size: int) -> list[int]:
    """Of a factor that is cut evenly."""
    return [-(-size // 2), -(-size // FINEST)]


def _inner(size: int) -> list[int]:
    """Of a factor that is cut, so that a tile inside has neighbours on both sides."""
    return [max(1, size // 2), max(1, size // FINEST)]


def _near(size: int) -> list[int]:
    """Of a factor that is cut, wherever."""
    return [size - max(1, size // FINEST), max(1, size // FINEST)] if size > 1 else [size]
