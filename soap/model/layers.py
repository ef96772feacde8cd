"""Repeated layers of a model, by the names of its operators."""

from __future__ import annotations

import re
from collections import Counter

from soap.model.graph import OperatorGraph

_LAYER = re.compile(r"(?P<prefix>(?:[^.]+\.)*?)(?P<number>\d+)(?:\.|$)")


def layer_of(name: str) -> tuple[str, int] | None:
    """The layer that an operator or parameter may be in, as what stands before the first number in its name, and that number."""
    found = _LAYER.match(name)
    return None if found is None else (found["prefix"], int(found["number"]))


def layers_of(graph: OperatorGraph) -> tuple[str | None, ...]:
    """By operator, the name of its layer, such as ``blocks.0``; None if it is in none of several."""
    found = [layer_of(op.name) for op in graph.operators]
    repeated = {prefix for prefix, count in Counter(prefix for prefix, _ in set(filter(None, found))).items() if count > 1}
    return tuple(None if one is None or one[0] not in repeated else f"{one[0]}{one[1]}" for one in found)
