"""Counting elements: partial counts add up."""

from __future__ import annotations

from math import prod

from soap.model.graph import WHOLE
from soap.tracing.rules.notation import Scope, Tiled, View
from soap.tracing.rules.registry import rule


@rule("aten.histc")
def histc(view: View) -> Tiled:
    """Elements may be counted in parts if the bins are known without looking at all of them."""
    if float(view.get("min", 0)) >= float(view.get("max", 0)):
        raise NotImplementedError("the range of the bins depends on data")
    scope = Scope()
    maps = scope.like(view.shapes[0])
    return Tiled(tuple(scope.factors), (maps,), ((WHOLE,),), summed=tuple(range(len(scope.factors))), flops=prod(view.shapes[0]))
