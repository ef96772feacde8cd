"""Segments of a space: operators that belong together (a layer, a kind, the whole model), and how reference strategies configure them."""

from __future__ import annotations

import re
from typing import NamedTuple

from soap.search.space import Space
from soap.strategy.config import OpConfig

_NUMBER = re.compile(r"\d+")
LONGEST = 512
"""The most operators in a segment: changing more amounts to another strategy."""


class Segment(NamedTuple):
    """``operators``: positions, ascending. ``alternatives``: the distinct ways in which reference strategies configure all of them, as far
    as these lie inside of the space."""

    operators: tuple[int, ...]
    alternatives: tuple[tuple[OpConfig, ...], ...]


def find_segments(space: Space) -> list[Segment]:
    """Segments with at least two alternatives, each set of operators once."""
    movable = set(space.movable)
    names: dict[str, list[int]] = {"": []}
    for position, op in enumerate(space.graph.operators):
        if position in movable:
            keys = {"", f"kind {op.kind}", *(op.name[: match.end()] for match in _NUMBER.finditer(op.name))}
            for key in sorted(keys):
                names.setdefault(key, []).append(position)
    found = []
    for operators in sorted({tuple(members) for members in names.values() if 1 < len(members) <= LONGEST}):
        segment = Segment(operators, _alternatives(space, operators))
        if len(segment.alternatives) > 1:
            found.append(segment)
    return found


def _alternatives(space: Space, operators: tuple[int, ...]) -> tuple[tuple[OpConfig, ...], ...]:
    found: dict[tuple[OpConfig, ...], None] = {}
    for strategy in space.references:
        configs = tuple(strategy.operators[space.graph.operators[i].name] for i in operators)
        if all(space.operators[i].log_weight(config) > float("-inf") for i, config in zip(operators, configs, strict=True)):
            found[configs] = None
    return tuple(found)
