"""In-place calls: their out-of-place forms, and which nodes of an exported graph share the memory that they change."""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from soap.errors import ModelError
from soap.tracing.calls import Call, Target
from soap.tracing.rules.complex import with_imag, with_real

_FUNCTIONAL = {("normal_", "default"): "normal_functional", ("bernoulli_", "float"): "bernoulli.p"}
"""Out-of-place forms whose names do not follow from the in-place ones."""


def moving_fake_quantize(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
    """Torch's fake quantization by a moving range, out of place. It computes in float32 only."""
    given = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)]
    narrow: Callable[[Any], Any] = lambda a: a.float() if isinstance(a, torch.Tensor) and a.is_floating_point() else a  # noqa: E731
    function = torch.ops.aten._fused_moving_avg_obs_fq_helper_functional.default
    out, mask, *moved = function(*map(narrow, args), **{name: narrow(a) for name, a in kwargs.items()})
    return (out.to(given[0].dtype), mask, *(new.to(old.dtype) for new, old in zip(moved, given[3:], strict=True)))


_SEVERAL = {"fused_moving_avg_obs_fake_quant": moving_fake_quantize}
"""Calls that change several arguments -> a function that gives their result, a mask, and then the new values of these arguments."""


class Aliasing:
    """Memory relations between graph nodes, noted in the order in which the nodes run.

    Nodes form families that share memory: a root that made it, and views of views of it. After a change through one of them, those on
    its way to the root get the new elements put back. The others become *stale*: they are taken from their base anew when somebody
    reads them. ``plain``: roots that carry no gradient, so that a detached copy of them is as good as a view.
    """

    def __init__(self, plain: Container[torch.fx.Node] = ()) -> None:
        self._plain = plain
        self._base: dict[torch.fx.Node, tuple[torch.fx.Node, ViewOf | None]] = {}
        self._root: dict[torch.fx.Node, torch.fx.Node] = {}
        self._stale: dict[torch.fx.Node, str] = {}
        self._given: dict[torch.fx.Node, list[tuple[torch.fx.Node, ViewOf | None] | None]] = {}

    def root(self, node: torch.fx.Node) -> torch.fx.Node:
        """The node that made the memory."""
        return self._root.get(node, node)

    def base(self, node: torch.fx.Node) -> tuple[torch.fx.Node, ViewOf | None] | None:
        """The base that this node is a view of, and how it is taken from it if that is known; None for a root."""
        return self._base.get(node)

    def view(self, node: torch.fx.Node, base: torch.fx.Node, how: ViewOf | None) -> None:
        """Note that ``node`` shares memory with ``base``."""
        self._root[node] = self.root(base)
        self._base[node] = (base, how)

    def follow(self, node: torch.fx.Node) -> None:
        """Note whether the call ``node`` returns a view of its first argument."""
        base = node.args[0] if node.args else None
        target = node.target
        if not isinstance(base, torch.fx.Node) or not isinstance(target, torch._ops.OpOverload) or not may_alias(target):
            return
        fake = base.meta.get("val")
        if not isinstance(fake, torch.Tensor):
            return
        source = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device="meta")
        result = target(source, *(_meta(a) for a in node.args[1:]), **{k: _meta(v) for k, v in node.kwargs.items() if k != "device"})
        if isinstance(result, (tuple, list)):  # a list of views: ``part`` relates its items to the base
            self.view(node, base, None)
        elif result.untyped_storage()._cdata == source.untyped_storage()._cdata:
            if target is torch.ops.aten.detach.default:
                self.view(node, base, self._detached(base))
                return
            self.view(node, base, SAME if _read_as(result) == _read_as(source) else view_of(node, base))

    def _detached(self, base: torch.fx.Node) -> ViewOf | None:
        """A detached tensor as a view of ``base``: it has the same elements, but passes no gradient back."""
        return DETACHED if self.root(base) in self._plain else None

    def passed_on(self, node: torch.fx.Node, leaves: Sequence[Any], how: ViewOf | None) -> None:
        """Note that the block ``node`` returns ``leaves`` of its graph, each seen through ``how``; None: detached."""
        nodes = [leaf if isinstance(leaf, torch.fx.Node) else None for leaf in leaves]
        self._given[node] = [None if n is None else (n, self._detached(n) if how is None else how) for n in nodes]

    def part(self, node: torch.fx.Node, several: torch.fx.Node, index: int) -> None:
        """Note that ``node`` is an item of a call with several results: a view if they are views, else memory of its own."""
        given = self._given.get(several)
        if given is not None:
            if (found := given[index]) is not None:
                self.view(node, *found)
        elif several in self._base:
            base = self._base[several][0]
            self.view(node, base, view_of(node, base))
        if several in self._stale:  # the parts were taken before the change
            self._stale[node] = self._stale[several]

    def same(self, node: torch.fx.Node) -> list[torch.fx.Node]:
        """All nodes that are the same tensor as ``node``."""
        first = self._first(node)
        return [n for n in self._family(node) if self._first(n) is first]

    def is_root(self, node: torch.fx.Node) -> bool:
        """Whether ``node`` has all elements of its root, in the same order."""
        return self._first(node) is self.root(node)

    def _first(self, node: torch.fx.Node) -> torch.fx.Node:
        while (found := self._base.get(node)) is not None and found[1] is SAME:
            node = found[0]
        return node

    def outer(self, node: torch.fx.Node) -> tuple[torch.fx.Node, ViewOf | None] | None:
        """The nearest base that is a different tensor, and how ``node`` is taken from it."""
        return self._base.get(self._first(node))

    def _family(self, node: torch.fx.Node) -> list[torch.fx.Node]:
        root = self.root(node)
        return [root, *(n for n, r in self._root.items() if r is root)]

    def changed(self, target: torch.fx.Node, by: str) -> None:
        """Note that the memory of ``target`` has changed: all nodes that share it become stale, until they are renewed."""
        self._stale.update(dict.fromkeys(self._family(target), by))

    def renew(self, node: torch.fx.Node) -> None:
        """Note that the node's value is up to date."""
        self._stale.pop(node, None)

    def stale(self, node: torch.fx.Node) -> bool:
        """Whether the node's memory has changed since its value was taken."""
        return node in self._stale

    def refusal(self, node: torch.fx.Node) -> ModelError:
        """Error for a stale node that cannot be renewed."""
        return ModelError(
            f"{node.name!r} is read after {self._stale[node]!r} has changed memory that it shares through a view that cannot be undone; "
            "expected in-place calls on slices, transposes and reshapes only: write it out of place"
        )


def _read_as(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Memory for a tensor's elements."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg()


def may_alias(target: torch._ops.OpOverload) -> bool:
    """Whether a call's result may be a view of its first argument."""
    arguments = target._schema.arguments
    return bool(arguments) and arguments[0].alias_info is not None and not arguments[0].alias_info.is_write


def _meta(leaf: Any) -> Any:
    """An argument for a call on the meta device."""
    if isinstance(leaf, torch.fx.Node):
        fake = leaf.meta.get("val")
        return torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device="meta") if isinstance(fake, torch.Tensor) else fake
    if isinstance(leaf, (list, tuple)):
        return [_meta(item) for item in leaf]
    return torch.device("meta") if isinstance(leaf, torch.device) else leaf


def changed_together(node: torch.fx.Node) -> tuple[Target, list[torch.fx.Node]] | None:
    """For a call that changes several tensors: its out-of-place form (``_SEVERAL``), and the nodes of these tensors."""
    target = node.target
    assert isinstance(target, torch._ops.OpOverload)
    functional = _SEVERAL.get(str(target._schema.name.split("::")[-1]))
    if functional is None:
        return None
    places = [i for i, a in enumerate(target._schema.arguments) if a.alias_info is not None and a.alias_info.is_write]
    given = [node.args[i] if i < len(node.args) else node.kwargs[target._schema.arguments[i].name] for i in places]
    return functional, [n for n in given if isinstance(n, torch.fx.Node)]


def changed_by(node: torch.fx.Node) -> torch.fx.Node | None:
    """The node whose tensor a call changes: its first argument, or ``out``. Calls that change other arguments are refused."""
    target = node.target
    assert isinstance(target, torch._ops.OpOverload)
    writes = [a for a in target._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    if not writes:
        return None
    changed = node.kwargs.get("out") if _is_out(target) else node.args[0] if writes == list(target._schema.arguments[:1]) else None
    if not isinstance(changed, torch.fx.Node):
        raise ModelError(f"call {node.name!r} of {target} changes arguments in place; write it out of place")
    return changed


def _is_out(target: Any) -> bool:
    """Whether a call writes its only result to its argument ``out``."""
    return [a.name for a in target._schema.arguments if a.alias_info is not None and a.alias_info.is_write] == ["out"]


def functional(call: Call) -> Call:
    """The out-of-place form of an in-place call, or of one that writes to ``out``."""
    if _is_out(call.target):
        return _without_out(call)
    overload = call.target._overloadname  # type: ignore[attr-defined]
    name, _, other = _FUNCTIONAL.get((call.kind, overload), call.kind.removesuffix("_")).partition(".")
    packet, overload = getattr(torch.ops.aten, name, None), other or overload
    if packet is None or overload not in packet.overloads():
        raise ModelError(f"in-place call {call.name!r} of {call.kind} has no functional form; write it out of place")
    return Call(call.name, getattr(packet, overload), call.args, call.kwargs, (call.name,), call.path)


def _without_out(call: Call) -> Call:
    """The overload with the same arguments except ``out``."""
    packet = call.target.overloadpacket  # type: ignore[attr-defined]
    wanted = [(a.name, str(a.type)) for a in call.target._schema.arguments if a.name != "out"]  # type: ignore[attr-defined]
    for other in (getattr(packet, name) for name in packet.overloads()):
        if [(a.name, str(a.type)) for a in other._schema.arguments] == wanted and not other._schema.is_mutable:
            kwargs = {name: value for name, value in call.kwargs.items() if name != "out"}
            return Call(call.name, other, call.args, kwargs, (call.name,), call.path)
    raise ModelError(f"call {call.name!r} of {call.kind} with out= has no functional form; write it out of place")


aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class ViewOf:
    """``take(base, *take_args)`` gives the view; ``put`` gives the base with the view's elements replaced. ``onto``: whether ``put``
    takes (base, view, …), because the view has only a part of the elements, or the view alone."""

    take: Any
    take_args: tuple[Any, ...]
    put: Any
    put_args: tuple[Any, ...]
    onto: bool = False


SAME = ViewOf(aten.alias.default, (), aten.alias.default, ())
"""The same elements in the same order."""

DETACHED = ViewOf(aten.detach.default, (), aten.alias.default, ())
"""The same elements, through which no gradient flows."""


def view_of(node: torch.fx.Node, base: torch.fx.Node) -> ViewOf | None:
    """How the graph node ``node`` is a view of ``base``; None if that is not known, so that nothing can be put back."""
    source, view = base.meta["val"], node.meta["val"]
    if node.target is operator.getitem:
        return _part(node, source)
    kind = str(node.target._schema.name.split("::")[-1])  # type: ignore[union-attr]
    if kind in _OF_COMPLEX:
        return _OF_COMPLEX[kind]
    if source.dtype != view.dtype:
        return None
    if kind in _SELECTING:
        return _SELECTING[kind](node, source)
    if kind in _PERMUTING:
        return _permuted(node, source)
    if kind in _RESHAPING and source.numel() == view.numel():
        return ViewOf(aten.reshape.default, (list(view.shape),), aten.reshape.default, (list(source.shape),))
    return None


def _argument(node: torch.fx.Node, name: str) -> Any:
    """An argument by its schema name, a computed size as its value; the schema's default if it was not passed."""
    given = node.kwargs.get(name)
    for position, parameter in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if parameter.name == name and name not in node.kwargs:
            given = node.args[position] if position < len(node.args) else parameter.default_value
    return given.meta.get("val") if isinstance(given, torch.fx.Node) else given


def _sliced(dim: int, start: int, stop: int, step: int = 1) -> ViewOf:
    return ViewOf(aten.slice.Tensor, (dim, start, stop, step), aten.slice_scatter.default, (dim, start, stop, step), onto=True)


def _selected(dim: int, index: int) -> ViewOf:
    return ViewOf(aten.select.int, (dim, index), aten.select_scatter.default, (dim, index), onto=True)


def _slice(node: torch.fx.Node, source: torch.Tensor) -> ViewOf:
    dim = _argument(node, "dim") % source.dim()
    start, stop, step = slice(_argument(node, "start"), _argument(node, "end"), _argument(node, "step")).indices(source.shape[dim])
    return _sliced(dim, start, max(start, stop), step)


def _narrow(node: torch.fx.Node, source: torch.Tensor) -> ViewOf | None:
    dim, start = _argument(node, "dim") % source.dim(), _argument(node, "start")
    if not isinstance(start, int):
        return None
    start = start % source.shape[dim] if start < 0 else start
    return _sliced(dim, start, start + _argument(node, "length"))


def _select(node: torch.fx.Node, source: torch.Tensor) -> ViewOf:
    dim = _argument(node, "dim") % source.dim()
    return _selected(dim, _argument(node, "index") % source.shape[dim])


def _diagonal(node: torch.fx.Node, source: torch.Tensor) -> ViewOf:
    args = (_argument(node, "offset"), *(_argument(node, name) % source.dim() for name in ("dim1", "dim2")))
    return ViewOf(aten.diagonal.default, args, aten.diagonal_scatter.default, args, onto=True)


def _permuted(node: torch.fx.Node, source: torch.Tensor) -> ViewOf:
    """A permutation, found by moving dimensions of different sizes."""
    marks = torch.empty(tuple(range(2, 2 + source.dim())), device="meta")
    order = [size - 2 for size in node.target(marks, *node.args[1:], **node.kwargs).shape]  # type: ignore[operator]
    return ViewOf(aten.permute.default, (order,), aten.permute.default, ([order.index(d) for d in range(len(order))],))


def _part(node: torch.fx.Node, source: torch.Tensor) -> ViewOf | None:
    """One of the parts that a call splits its operand into."""
    several, index = node.args
    assert isinstance(several, torch.fx.Node) and isinstance(index, int)
    kind = str(several.target._schema.name.split("::")[-1])  # type: ignore[union-attr]
    if kind not in ("split", "split_with_sizes", "chunk", "tensor_split", "unbind", "unsafe_chunk"):
        return None
    dim = _argument(several, "dim") % source.dim()
    if kind == "unbind":
        return _selected(dim, index)
    stops = list(accumulate(part.shape[dim] for part in several.meta["val"]))
    return _sliced(dim, stops[index - 1] if index else 0, stops[index])


_OF_COMPLEX = {
    "view_as_real": ViewOf(aten.view_as_real.default, (), aten.view_as_complex.default, ()),
    "view_as_complex": ViewOf(aten.view_as_complex.default, (), aten.view_as_real.default, ()),
    "_conj": ViewOf(aten.conj_physical.default, (), aten.conj_physical.default, ()),
    "real": ViewOf(aten.real.default, (), with_real, (), onto=True),
    "imag": ViewOf(aten.imag.default, (), with_imag, (), onto=True),
}
_SELECTING: dict[str, Callable[[torch.fx.Node, torch.Tensor], ViewOf | None]] = {
    "slice": _slice,
    "narrow": _narrow,
    "select": _select,
    "diagonal": _diagonal,
}
_PERMUTING = {"permute", "transpose", "t", "movedim", "moveaxis", "swapaxes", "swapdims", "numpy_T", "mT"}
_RESHAPING = {"view", "reshape", "_unsafe_view", "flatten", "unflatten", "ravel", "squeeze", "unsqueeze", "view_as", "reshape_as"}
