"""In-place calls: their out-of-place forms, and which nodes of an exported graph share the memory that they change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from soap.errors import ModelError
from soap.tracing.calls import Call
from soap.tracing.views import SAME, ViewOf, view_of

_FUNCTIONAL = {("normal_", "default"): "normal_functional", ("bernoulli_", "float"): "bernoulli.p"}
"""Out-of-place forms that are not called like the in-place ones."""


class Aliasing:
    """Memory relations between graph nodes, noted in the order in which the nodes run.

    Nodes form families that share memory: a root that made it, and views of views of it. After a change through one of them, those on
    its way to the root get the new elements put back; what the others stand for is *stale*, and taken from their base anew when
    somebody reads it.
    """

    def __init__(self) -> None:
        self._base: dict[torch.fx.Node, tuple[torch.fx.Node, ViewOf | None]] = {}
        self._root: dict[torch.fx.Node, torch.fx.Node] = {}
        self._stale: dict[torch.fx.Node, str] = {}
        self._given: dict[torch.fx.Node, list[tuple[torch.fx.Node, ViewOf | None] | None]] = {}

    def root(self, node: torch.fx.Node) -> torch.fx.Node:
        """The node that made the memory."""
        return self._root.get(node, node)

    def base(self, node: torch.fx.Node) -> tuple[torch.fx.Node, ViewOf | None] | None:
        """Which node this one is a view of, and how if that is known; None for a root."""
        return self._base.get(node)

    def view(self, node: torch.fx.Node, base: torch.fx.Node, how: ViewOf | None) -> None:
        """``node`` shares memory with ``base``."""
        self._root[node] = self.root(base)
        self._base[node] = (base, how)

    def follow(self, node: torch.fx.Node) -> None:
        """Note whether the call ``node`` returns a view of its first argument."""
        base = node.args[0] if node.args else None
        target = node.target
        if not isinstance(base, torch.fx.Node) or not isinstance(target, torch._ops.OpOverload) or not _may_alias(target):
            return
        fake = base.meta.get("val")
        if not isinstance(fake, torch.Tensor):
            return
        source = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device="meta")
        result = target(source, *(_meta(a) for a in node.args[1:]), **{k: _meta(v) for k, v in node.kwargs.items() if k != "device"})
        if isinstance(result, (tuple, list)):  # a list of views: ``part`` relates its items to the base
            self.view(node, base, None)
        elif result.untyped_storage()._cdata == source.untyped_storage()._cdata:
            # a detached tensor has the same elements, but no gradient to give back
            same = _read_as(result) == _read_as(source)
            self.view(node, base, SAME if same and target is not torch.ops.aten.detach.default else view_of(node, base))

    def passed_on(self, node: torch.fx.Node, leaves: Sequence[Any], how: ViewOf | None) -> None:
        """The block ``node`` gives out ``leaves`` of its graph, each seen through ``how``."""
        self._given[node] = [(leaf, how) if isinstance(leaf, torch.fx.Node) else None for leaf in leaves]

    def part(self, node: torch.fx.Node, several: torch.fx.Node, index: int) -> None:
        """``node`` is an item of a call with several results: a view if they are views, else memory of its own."""
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

    def _first(self, node: torch.fx.Node) -> torch.fx.Node:
        while (found := self._base.get(node)) is not None and found[1] is SAME:
            node = found[0]
        return node

    def outer(self, node: torch.fx.Node) -> tuple[torch.fx.Node, ViewOf | None] | None:
        """The nearest base that is another tensor than ``node``, and how that has ``node`` in it."""
        return self._base.get(self._first(node))

    def _family(self, node: torch.fx.Node) -> list[torch.fx.Node]:
        root = self.root(node)
        return [root, *(n for n, r in self._root.items() if r is root)]

    def changed(self, target: torch.fx.Node, by: str) -> None:
        """The memory of ``target`` has changed: all that shares it goes stale, until it is renewed."""
        self._stale.update(dict.fromkeys(self._family(target), by))

    def renew(self, node: torch.fx.Node) -> None:
        """What the node stands for is up to date."""
        self._stale.pop(node, None)

    def stale(self, node: torch.fx.Node) -> bool:
        """Whether memory of the node has changed since it was read."""
        return node in self._stale

    def refusal(self, node: torch.fx.Node) -> ModelError:
        """Why a stale node cannot be renewed."""
        return ModelError(
            f"{node.name!r} is read after {self._stale[node]!r} has changed memory that it shares through a view that cannot be undone; "
            "expected in-place calls on slices, transposes and reshapes only: write it out of place"
        )


def _read_as(tensor: torch.Tensor) -> tuple[Any, ...]:
    """How memory is taken for a tensor's elements."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg()


def _may_alias(target: torch._ops.OpOverload) -> bool:
    arguments = target._schema.arguments
    return bool(arguments) and arguments[0].alias_info is not None and not arguments[0].alias_info.is_write


def _meta(leaf: Any) -> Any:
    """An argument as a call on the meta device takes it."""
    if isinstance(leaf, torch.fx.Node):
        fake = leaf.meta.get("val")
        return torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device="meta") if isinstance(fake, torch.Tensor) else fake
    if isinstance(leaf, (list, tuple)):
        return [_meta(item) for item in leaf]
    return torch.device("meta") if isinstance(leaf, torch.device) else leaf


def mutates(target: torch._ops.OpOverload) -> bool:
    """Whether the call changes its first argument. Calls that change any other are refused."""
    writes = [a.alias_info is not None and a.alias_info.is_write for a in target._schema.arguments]
    if any(writes[1:]):
        raise ModelError(f"call of {target} changes an argument in place; write it out of place")
    return bool(writes) and writes[0]


def functional(call: Call) -> Call:
    """The out-of-place form of an in-place call."""
    overload = call.target._overloadname  # type: ignore[attr-defined]
    name, _, other = _FUNCTIONAL.get((call.kind, overload), call.kind.removesuffix("_")).partition(".")
    packet, overload = getattr(torch.ops.aten, name, None), other or overload
    if packet is None or overload not in packet.overloads():
        raise ModelError(f"in-place call {call.name!r} of {call.kind} has no functional form; write it out of place")
    return Call(call.name, getattr(packet, overload), call.args, call.kwargs, (call.name,), call.path)
