"""The language of operator rules.

A rule says how the dimensions of a call's operands follow its factors, and, where plain execution on local regions would be wrong, how to
run a tile of it. ``einsum`` notation covers most rules in one line::

    "*b k, n k, n -> *b n"        linear: k is summed (not in the output)
    "*b [h], [h], [h] -> *b [h]"  layer norm: h must be whole

Tokens: a letter or word is a factor; ``*b`` is any number of leading factors; ``[x]`` is a dimension that is needed whole; ``^x`` is a
factor of which the size in this operand may be 1 (broadcast). Dimensions of size 1 never become factors.

The registry of operator rules: from an ATen call to what may be split in it.

Adding an operator is one line (``register("aten.linear", einsum…)``) or one small function decorated with ``@rule("aten.name", …)``. A name
covers all overloads; ``aten.name.overload`` covers one and wins. A rule raises ValueError or NotImplementedError for a form of the
operator that it does not describe. Calls without a rule but with ATen's ``pointwise`` tag follow broadcasting; any other call is kept
whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch

from soap.model.dtypes import COMPLEX_PRODUCT, is_complex
from soap.model.graph import WHOLE, DimMap
from soap.model.regions import Box, Interval, lengths
from soap.tracing.calls import Call, Ref, TileContext, Value, argument, is_random, parameters_of, substitute, walk

Maps = tuple[DimMap, ...]


@dataclass(frozen=True, slots=True)
class Tiled:
    """What a rule says of one call.

    ``factors``: (name, size). ``operands``: one map per tensor operand, in ``Call.operands`` order. ``outputs``: one per output; must be
    exact or whole in every dimension, or, for calls that select (slices), clipped. ``summed``: indices of factors that no output follows
    and whose split gives partial sums. ``light``: may be fused into neighbours (views and pointwise calls). ``linear``: commutes with
    summing partial results (views). ``run``: computes the local outputs from a ``Local``; None runs the call's target on the local
    operands. ``flops``: of the whole call. ``saved_bytes``: kept for the backward pass beside operands and outputs. ``known``: False if
    no rule covers the call. ``skipped_share``: of ``flops``, what kernels leave out. ``fused_bytes``: of ``saved_bytes``, what kernels on
    GPUs never write. ``looks_up``: it reads rows (dimension 0) of its first operand by indices that are its second one, and no more.
    ``picks``: which of these a tile looks up, from a ``Local`` in which operands that come from elsewhere may be missing; None for all.
    ``lean``: whole tensors go to ``run`` as well, which holds less memory than the ATen call.
    ``drawn``: random numbers of the whole call, in blocks along dimension 0 of its first output; ``drawn_at_once``: each tile draws all.
    ``count``: of a mean, how much of the number that it divides by a tile's labels are: added up over the tiles, it is that number, which
    the context tells (``TileContext.counts``). ``own_operands``: ``operands`` of a tile that is told it.
    """

    factors: tuple[tuple[str, int], ...]
    operands: tuple[Maps, ...]
    outputs: tuple[Maps, ...]
    summed: tuple[int, ...] = ()
    light: bool = False
    linear: bool = False
    run: Callable[[Local], Any] | None = None
    flops: int = 0
    saved_bytes: int = 0
    known: bool = True
    skipped_share: float = 0.0
    fused_bytes: int = 0
    looks_up: bool = False
    picks: Callable[[Local], torch.Tensor] | None = None
    lean: bool = False
    drawn: int = 0
    drawn_at_once: bool = False
    count: Callable[[Local], torch.Tensor] | None = None
    own_operands: tuple[Maps, ...] = ()


@dataclass(slots=True)
class View:
    """The call and the shapes of its values, for which a rule is asked."""

    call: Call
    values: Mapping[str, Value]

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Operand shapes, in ``Call.operands`` order."""
        return [self.values[name].shape for name in self.call.operands]

    @property
    def output_shapes(self) -> list[tuple[int, ...]]:
        """Output shapes."""
        return [self.values[name].shape for name in self.call.outputs]

    @property
    def itemsize(self) -> int:
        """Bytes per element of the first output."""
        return int(self.values[self.call.outputs[0]].dtype.itemsize)

    def get(self, name: str, default: Any = None) -> Any:
        """An argument by schema name."""
        return argument(self.call, name, default)

    def has(self, name: str) -> bool:
        """Whether a tensor is passed for the argument."""
        return isinstance(self.get(name), Ref)


@dataclass(slots=True)
class Local:
    """One tile of one call at run time: local operands, their regions, and the regions of the results. ``boxes`` and ``output_boxes``
    are global coordinates; ``shapes`` and ``output_shapes`` those of the whole tensors."""

    call: Call
    tensors: Sequence[torch.Tensor]
    boxes: Sequence[Box]
    output_boxes: Sequence[Box]
    shapes: Sequence[tuple[int, ...]]
    output_shapes: Sequence[tuple[int, ...]]
    context: TileContext = field(default_factory=TileContext)
    _fixed: dict[tuple[str, Any], Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Arguments that were asked for and hold no tensor: the same whenever the tile runs."""

    @property
    def random_seed(self) -> int:
        """The call's seed, a function of (seed, step, call): the same on every tile."""
        return self.context.random_seed(self.call.name)

    def note_statistics(self, channels: Interval, mean: torch.Tensor, variance: torch.Tensor) -> None:
        """Note batch norm's mean and variance of some channels."""
        self.context.note_statistics(self.call.name, channels, mean, variance)

    def get(self, name: str, default: Any = None) -> Any:
        """An argument by schema name, with tensors replaced by local ones."""
        if (name, default) in self._fixed:
            return self._fixed[name, default]
        value = argument(self.call, name, default)
        if not any(isinstance(leaf, Ref) for leaf in walk(value)):
            self._fixed[name, default] = value
            return value
        local = dict(reversed(list(zip(self.call.operands, self.tensors, strict=True))))
        return substitute(value, lambda leaf: local[leaf.name] if isinstance(leaf, Ref) else leaf)

    def plain(self, tensors: Sequence[torch.Tensor] | None = None, **changes: Any) -> Any:
        """Call the target with local operands; ``changes`` replace arguments by schema name."""
        following = iter(self.tensors if tensors is None else tensors)
        fill: Callable[[Any], Any] = lambda leaf: next(following) if isinstance(leaf, Ref) else leaf  # noqa: E731
        args = substitute(list(self.call.args), fill)
        kwargs = substitute(dict(self.call.kwargs), fill)
        for name, value in changes.items():
            place, _ = parameters_of(self.call.target).get(name, (len(args), None))
            if place < len(args):
                args[place] = value
            else:
                kwargs[name] = value
        return self.call.target(*args, **kwargs)

    @property
    def output_lengths(self) -> tuple[int, ...]:
        """Shape of the first local output."""
        return lengths(self.output_boxes[0])


class Scope:
    """Collects factors while a rule is written down by hand."""

    def __init__(self) -> None:
        self.factors: list[tuple[str, int]] = []

    def factor(self, name: str, size: int) -> DimMap:
        """A new factor of this size as an identity map; dimensions of size 1 get none."""
        if size <= 1:
            return WHOLE
        self.factors.append((name, size))
        return DimMap(len(self.factors) - 1)

    def like(self, shape: Sequence[int], prefix: str = "d") -> Maps:
        """One new factor per dimension."""
        return tuple(self.factor(f"{prefix}{i}", size) for i, size in enumerate(shape))


def blocks(dim: DimMap, size: int) -> DimMap:
    """The map of a dimension in which every element of an identity map's factor is a block of ``size`` elements."""
    return DimMap(dim.factor, size, 0, size) if dim.factor is not None else WHOLE


def broadcast_shape(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The shape that tensors of these shapes broadcast to; raises ValueError if they do not."""
    rank = max(map(len, shapes), default=0)
    result = [1] * rank
    for shape in shapes:
        for i, size in enumerate(shape, rank - len(shape)):
            if size != 1 and result[i] not in (1, size):
                raise ValueError(f"shapes {list(shapes)} do not broadcast")
            result[i] = size if size != 1 else result[i]
    return tuple(result)


def broadcast(maps: Maps, target_shape: Sequence[int], shape: Sequence[int]) -> Maps:
    """Maps of an operand that is broadcast (aligned at the right) to a tensor with ``maps``."""
    offset = len(target_shape) - len(shape)
    return tuple(WHOLE if size == 1 else maps[offset + i] for i, size in enumerate(shape))


def einsum(view: View, notation: str, **options: Any) -> Tiled:
    """A rule from its notation (see the module's docstring); sizes come from the call's operands and outputs.

    Operands that the call does not have (an absent bias) must be left out of the notation. Raises ValueError if it does not fit the shapes.
    """
    left, right = (side.strip() for side in notation.split("->"))
    texts = [text.split() for text in (*left.split(","), *right.split(","))]
    shapes = [*view.shapes, *view.output_shapes]
    if len(texts) != len(shapes):
        raise ValueError(f"rule {notation!r} has {len(texts)} tensors, the call {len(shapes)}")
    scope, maps, known = Scope(), [], dict[str, DimMap]()
    for tokens, shape in zip(texts, shapes, strict=True):
        maps.append(tuple(_dimension(token, size, scope, known) for token, size in zip(_expand(tokens, len(shape)), shape, strict=True)))
    outputs = maps[len(texts) - len(right.split(",")) :]
    followed = {dim.factor for out in outputs for dim in out}
    summed = tuple(i for i in range(len(scope.factors)) if i not in followed)
    operands = tuple(maps[: len(maps) - len(outputs)])
    return Tiled(tuple(scope.factors), operands, tuple(outputs), summed=summed, **options)


def _expand(tokens: list[str], rank: int) -> list[str]:
    result: list[str] = []
    for token in tokens:
        if token.startswith("*"):
            result += [f"{token[1:]}{i}" if i else token[1:] for i in range(rank - len(tokens) + 1)]
        else:
            result.append(token)
    return result


def _dimension(token: str, size: int, scope: Scope, known: dict[str, DimMap]) -> DimMap:
    if token.startswith("[") or size == 1:
        return WHOLE
    name = token.removeprefix("^")
    if name not in known:
        known[name] = scope.factor(name, size)
    elif (factor := known[name].factor) is not None and scope.factors[factor][1] != size:
        raise ValueError(f"factor {name} has sizes {scope.factors[factor][1]} and {size}")
    return known[name]


Rule = Callable[[View], Tiled]


_RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register the decorated function for these ATen names."""

    def decorate(function: Rule) -> Rule:
        for name in names:
            _RULES[name] = function
        return function

    return decorate


def register(name: str, notation: str, **options: Any) -> None:
    """Register a rule that is one line of notation."""
    _RULES[name] = lambda view: einsum(view, notation, **options)


def registered() -> tuple[str, ...]:
    """Names that have a rule, sorted."""
    return tuple(sorted(_RULES))


def target_name(target: object) -> str:
    """``aten.linear.default`` for an ATen overload, wrapped or not; ``soap.name`` for calls of our own."""
    target = getattr(target, "wrapped", target)
    if isinstance(target, torch._ops.OpOverload):
        return f"{target.namespace}.{target._schema.name.split('::')[-1]}.{target._overloadname}"
    return f"soap.{getattr(target, '__name__', target)}"


def tiled(call: Call, values: dict[str, Value]) -> Tiled:
    """What may be split in a call. ``known``: whether a rule covers it. A complex operation counts as its real ones."""
    found = _tiled(call, values)
    if found.flops and any(is_complex(values[name].dtype) for name in (*call.operands, *call.outputs)):
        return replace(found, flops=COMPLEX_PRODUCT * found.flops)
    return found


def _tiled(call: Call, values: dict[str, Value]) -> Tiled:
    view = View(call, values)
    found = _rule_of(call)
    if found is not None:
        try:
            return found(view)
        except (ValueError, RuntimeError):
            return unsplit(view)  # its rule does not describe this form of the operator
    if torch.Tag.pointwise in getattr(call.target, "tags", ()) and not is_random(call):
        try:
            return pointwise(view)
        except ValueError:
            return unsplit(view)
    return unsplit(view)


def _rule_of(call: Call) -> Rule | None:
    name = target_name(call.target)
    return _RULES.get(name) or _RULES.get(name.rsplit(".", 1)[0])


def is_pointwise(call: Call) -> bool:
    """Whether each element of the results follows from those at its place in the operands, which are broadcast."""
    tagged = torch.Tag.pointwise in getattr(call.target, "tags", ())
    return (tagged or call.kind == "to" or _rule_of(call) is pointwise) and not is_random(call)


def pointwise(view: View, **options: Any) -> Tiled:
    """Every output dimension is a factor; operands follow by broadcasting. Raises ValueError if they do not broadcast to the outputs."""
    shape = view.output_shapes[0]
    if any(out != shape for out in view.output_shapes) or (view.shapes and broadcast_shape(view.shapes) != shape):
        raise ValueError("shapes that do not broadcast")
    scope = Scope()
    out = scope.like(shape)
    operands = tuple(broadcast(out, shape, operand) for operand in view.shapes)
    return Tiled(tuple(scope.factors), operands, (out,) * len(view.output_shapes), light=True, flops=prod(shape), **options)


def unsplit(view: View) -> Tiled:
    """The call as one piece. What it keeps for the backward pass is not known; several times all its operands and results are assumed."""
    touched = (view.values[name] for name in (*view.call.operands, *view.call.outputs))
    saved = 4 * sum(prod(value.shape) * value.dtype.itemsize for value in touched)
    whole: Callable[[tuple[int, ...]], tuple[DimMap, ...]] = lambda shape: (WHOLE,) * len(shape)  # noqa: E731
    return Tiled((), tuple(map(whole, view.shapes)), tuple(map(whole, view.output_shapes)), known=False, saved_bytes=saved)
