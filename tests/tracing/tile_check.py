"""Checks one call's rule on real tensors: tiles are cut as the interval maps say, and together give what the whole call gives."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from math import prod
from typing import Any

import torch
from torch import Tensor

from soap.model.dtypes import is_differentiable
from soap.model.graph import DimMap
from soap.model.regions import Box, Interval, balanced, lengths, relative, whole
from soap.tracing.calls import Call, Ref, TileContext, Value, is_random, substitute, walk
from soap.tracing.rules import tiled
from soap.tracing.rules.notation import Local, Maps, Tiled
from tests.tracing.drawing import Drawn

SEED = 1234
Pieces = tuple[list[Interval], ...]


@dataclass
class Problem:
    """A call with its operands, its results as a whole, and its rule."""

    drawn: Drawn
    call: Call
    tensors: list[Tensor]
    results: list[Tensor]
    rule: Tiled

    @property
    def differentiable(self) -> list[bool]:
        """Which operands carry a gradient."""
        fixed = {id(t) for t in self.drawn.fixed}
        return [is_differentiable(t.dtype) and id(t) not in fixed for t in self.tensors]

    def leaves(self) -> list[Tensor]:
        """Copies of the operands to differentiate by."""
        return [t.detach().clone().requires_grad_(grad) for t, grad in zip(self.tensors, self.differentiable, strict=True)]

    def boxes(self, tile: Sequence[Interval]) -> tuple[list[Box], list[Box]]:
        """The regions of operands and results that a tile reads and makes."""
        reads = [_box(maps, tile, t.shape) for maps, t in zip(self.rule.operands, self.tensors, strict=True)]
        return reads, [_box(maps, tile, r.shape) for maps, r in zip(self.rule.outputs, self.results, strict=True)]

    def run_all(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The outputs that the rule computes as a single tile."""
        boxes, output_boxes = self.boxes([(0, size) for _, size in self.rule.factors])
        regions = [t[relative(box, whole(t.shape))] for t, box in zip(tensors, boxes, strict=True)]
        return self.run(boxes, output_boxes, regions)

    def run(self, boxes: Sequence[Box], output_boxes: Sequence[Box], tensors: Sequence[Tensor]) -> list[Tensor]:
        """The outputs that the rule computes on these regions."""
        shapes = [tuple(t.shape) for t in self.tensors]
        local = Local(self.call, tensors, boxes, output_boxes, shapes, [tuple(r.shape) for r in self.results], TileContext(SEED))
        result = self.rule.run(local) if self.rule.run is not None else local.plain()
        return list(result) if isinstance(result, (tuple, list)) else [result]


def problem(drawn: Drawn) -> Problem:
    """The call in plain form, computed as a whole, with what its rule says."""
    tensors = [leaf for leaf in walk((drawn.args, dict(drawn.kwargs))) if isinstance(leaf, Tensor)]
    values = {f"t{i}": Value(f"t{i}", tuple(t.shape), t.dtype) for i, t in enumerate(tensors)}
    names = iter(values)
    change = lambda leaf: Ref(next(names)) if isinstance(leaf, Tensor) else leaf  # noqa: E731
    args, kwargs = substitute(tuple(drawn.args), change), substitute(dict(drawn.kwargs), change)
    results = _results(drawn, tensors)
    outputs = tuple(f"r{i}" for i in range(len(results)))
    values |= {n: Value(n, tuple(r.shape), r.dtype) for n, r in zip(outputs, results, strict=True)}
    made = Call("call", drawn.target, args, kwargs, outputs)
    assert drawn.random == is_random(made)
    return Problem(drawn, made, tensors, results, tiled(made, values))


def _results(drawn: Drawn, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The whole call on tensors that take the place of those that were drawn."""
    following = iter(tensors)
    fill: Any = lambda leaf: next(following) if isinstance(leaf, Tensor) else leaf  # noqa: E731
    args, kwargs = substitute(tuple(drawn.args), fill), substitute(dict(drawn.kwargs), fill)
    with torch.random.fork_rng(devices=[]):
        result = drawn.target(*args, **kwargs) if drawn.whole is None else drawn.whole(*tensors)
    return list(result) if isinstance(result, (tuple, list)) else [result]


def splits(rule: Tiled, rng: random.Random, most: int | None, kept: Sequence[str] = ()) -> Iterator[Pieces]:
    """Each factor in 2 and 3, and cut unevenly; each pair of factors at once; all factors at once. ``most``: that many of these, drawn.

    ``kept``: names of factors that stay whole.
    """
    sizes = [size for _, size in rule.factors]

    def cut(**degrees: int) -> Pieces:
        return tuple(balanced(n, min(degrees.get(f"f{i}", 1), n)) for i, n in enumerate(sizes))

    found = [cut(**{f"f{i}": degree}) for i in range(len(sizes)) for degree in (2, 3)]
    for i, size in enumerate(sizes):
        place = rng.randrange(1, size)
        found.append(tuple([(0, place), (place, size)] if j == i else [(0, n)] for j, n in enumerate(sizes)))
    found += [cut(**{f"f{i}": rng.choice((2, 3)), f"f{j}": 2}) for i, j in combinations(range(len(sizes)), 2)]
    found.append(cut(**{f"f{i}": 2 for i in range(len(sizes))}))
    if most is not None and len(found) > most:
        singles = [found[2 * i + rng.randrange(2)] for i in range(len(sizes))]
        found = singles + rng.sample(found[2 * len(sizes) :], max(0, most - len(singles)))
    held = [i for i, (name, _) in enumerate(rule.factors) if name in kept]
    yield from (pieces for pieces in found if all(len(pieces[i]) == 1 for i in held))


def check(found: Problem, pieces: Pieces) -> None:
    """Outputs and gradients by tiles equal those of the whole call; each region is made once, or once per part of a sum."""
    parts = prod(len(pieces[i]) for i in found.rule.summed)
    leaves = found.leaves()
    counts = [torch.zeros(r.shape, dtype=torch.int64) for r in found.results]
    made = [torch.zeros_like(r) for r in found.results]
    returned = 0
    for tile in product(*pieces):
        boxes, output_boxes = found.boxes(tile)
        local = [t[relative(box, whole(t.shape))].clone() for t, box in zip(leaves, boxes, strict=True)]
        results = found.run(boxes, output_boxes, local)
        returned = len(results)
        for k, (result, box) in enumerate(zip(results, output_boxes, strict=False)):
            assert tuple(result.shape) == lengths(box), f"output {k} has shape {tuple(result.shape)} for region {box}"
            assert result.dtype == found.results[k].dtype
            region = relative(box, whole(found.results[k].shape))
            counts[k][region] += 1
            placed = torch.zeros_like(found.results[k])
            placed[region] = result
            made[k] = made[k] | placed if placed.dtype == torch.bool else made[k] + placed
    for count in counts[:returned]:
        assert bool((count == parts).all()), "a region is left out or made twice"
    _compare(found, made[:returned], leaves)


def _box(maps: Maps, tile: Sequence[Interval], shape: Sequence[int]) -> Box:
    return tuple(dim.interval(tile, size) for dim, size in zip(maps, shape, strict=True))


def _compare(found: Problem, made: Sequence[Tensor], leaves: Sequence[Tensor]) -> None:
    others = found.leaves()
    # What draws random numbers is compared with its rule on all of it.
    expected = found.run_all(others) if found.drawn.random else _results(found.drawn, others)
    for a, b in zip(made, expected, strict=False):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10, equal_nan=True)
    for mine, theirs in zip(_gradients(made, leaves), _gradients(expected[: len(made)], others), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-8, atol=1e-9, equal_nan=True)


def _gradients(results: Sequence[Tensor], leaves: Sequence[Tensor]) -> list[Tensor]:
    loss = torch.zeros((), dtype=torch.float64)
    for result in results:
        if result.requires_grad:
            weights = torch.arange(1, result.numel() + 1, dtype=torch.float64).reshape(result.shape)
            weighed = result * (torch.polar(torch.ones_like(weights), weights) if result.is_complex() else weights.sin())
            loss = loss + (weighed.real if result.is_complex() else weighed).sum()
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    if not loss.requires_grad or not wanted:
        return [torch.zeros_like(leaf) for leaf in wanted]
    grads = torch.autograd.grad(loss, wanted, allow_unused=True)
    return [torch.zeros_like(leaf) if grad is None else grad for leaf, grad in zip(wanted, grads, strict=True)]


def kept_bytes(found: Problem) -> tuple[int, int]:
    """What autograd keeps when the rule runs on all of the call, and the upper bound for it: what the rule says, operands and outputs."""
    storages: dict[int, tuple[torch.UntypedStorage, int]] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = (storage, storage.nbytes())
        return tensor

    leaves = found.leaves()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        results = found.run_all(leaves)
    if not any(result.requires_grad for result in results):  # nothing holds what was kept
        storages.clear()
    touched = sum(t.numel() * t.dtype.itemsize for t in (*leaves, *results))
    return sum(size for _, size in storages.values()), found.rule.saved_bytes + touched


def linear(found: Problem) -> bool:
    """Whether the call of the sum of two operands is the sum of the calls: what a rule calls ``linear`` must."""
    first = found.tensors[0]
    drawn = torch.complex128 if first.is_complex() else torch.float64
    other = torch.randn(first.shape, generator=torch.Generator().manual_seed(SEED), dtype=drawn).to(first.dtype)
    results = []
    for x in (first, other, first + other):
        with torch.no_grad():
            results.append(found.run_all([x, *found.tensors[1:]])[0])
    return torch.allclose(results[0] + results[1], results[2], rtol=1e-9)


def follows(rule: Tiled) -> bool:
    """Whether every factor has a part in some operand or output, and each output's map is exact, whole or cut off at the end."""
    used = {dim.factor for maps in (*rule.operands, *rule.outputs) for dim in maps}
    exact = all(dim.exact or dim == DimMap() for maps in rule.outputs for dim in maps)
    return exact and set(range(len(rule.factors))) <= used
