"""The registry of operator rules: from an ATen call to what may be split in it.

Adding an operator is one line (``register("aten.linear", einsum…)``) or one small function decorated with ``@rule("aten.name", …)``. A name
covers all overloads; ``aten.name.overload`` covers one and wins. A rule raises ValueError or NotImplementedError for a form of the
operator that it does not describe. Calls without a rule but with ATen's ``pointwise`` tag follow broadcasting; any other call is kept
whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any

import torch

from soap.model.dtypes import COMPLEX_PRODUCT, is_complex
from soap.model.graph import WHOLE, DimMap
from soap.tracing.calls import Call, Value, is_random
from soap.tracing.rules.notation import Rule, Scope, Tiled, View, broadcast, broadcast_shape, einsum

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
