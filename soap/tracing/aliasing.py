"""In-place calls: their out-of-place forms, and which nodes of an exported graph share the memory that they change."""

from __future__ import annotations

from typing import Any

import torch

from soap.errors import ModelError
from soap.tracing.calls import Call

_FUNCTIONAL = {("normal_", "default"): "normal_functional", ("bernoulli_", "float"): "bernoulli.p"}
"""Out-of-place forms that are not called like the in-place ones."""


class Aliasing:
    """Memory relations between graph nodes, noted in the order in which the nodes run."""

    def __init__(self) -> None:
        self._root: dict[torch.fx.Node, torch.fx.Node] = {}
        self._same: dict[torch.fx.Node, torch.fx.Node] = {}
        self._stale: dict[torch.fx.Node, str] = {}

    def root(self, node: torch.fx.Node) -> torch.fx.Node:
        """The node that made the memory."""
        return self._root.get(node, node)

    def view(self, node: torch.fx.Node, base: torch.fx.Node, *, identical: bool) -> None:
        """``node`` shares memory with ``base``; ``identical``: both are the same tensor."""
        self._root[node] = self.root(base)
        if identical:
            self._same[node] = self._same.get(base, base)

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
        if isinstance(result, (tuple, list)):
            self.view(node, base, identical=False)
        elif result.untyped_storage()._cdata == source.untyped_storage()._cdata:
            self.view(node, base, identical=result.shape == source.shape and result.stride() == source.stride())

    def change(self, node: torch.fx.Node, target: torch.fx.Node) -> list[torch.fx.Node]:
        """``node`` changes ``target`` in place: returns the nodes that now mean the new value; other views of the memory go stale."""
        own, root = self._same.get(target, target), self.root(target)
        family = [n for n in {*self._root, root, target} if self.root(n) is root]
        meant = [n for n in family if self._same.get(n, n) is own]
        self._stale.update({n: node.name for n in family if n not in meant})
        self.view(node, target, identical=True)
        return [*meant, node]

    def check(self, node: torch.fx.Node) -> None:
        """Raise ModelError if the node's value was changed through another view of its memory."""
        if node in self._stale:
            raise ModelError(
                f"{node.name!r} is read after {self._stale[node]!r} has changed memory that it shares; expected no in-place calls on "
                "views: write it out of place"
            )


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
