"""How much of the devices' memory plans may use, as people write it: ``80%`` of each device's, or ``20GB`` of it."""

from __future__ import annotations

import re
from dataclasses import replace
from fractions import Fraction

from soap.cluster.topology import Topology
from soap.errors import TopologyError, asked
from soap.units import format_bytes, parse_bytes

FIELD = "memory_budget"
EXPECTED = "a share of each device's memory, such as 80%, or a size such as 20GB"
_PERCENT = re.compile(r"\s*(\d{1,9}(?:\.\d{1,9})?)\s*%\s*", re.ASCII)


def read_budget(text: str) -> Fraction | int:
    """The share of a device's memory, or the bytes of it, that a text states. TopologyError in one line if it is neither."""
    percent = _PERCENT.fullmatch(text)
    if percent is None and "%" not in text:
        size_bytes = parse_bytes(text, asked(FIELD))
        if size_bytes < 1:
            raise TopologyError(f"{asked(FIELD)} {text!r}: nothing fits into that; expected {EXPECTED}")
        return size_bytes
    share = Fraction(percent[1]) / 100 if percent is not None else Fraction(0)
    if not 0 < share <= 1:
        raise TopologyError(f"{asked(FIELD)} {text[:80]!r}: expected {EXPECTED}: a share is above 0% and at most 100%")
    return share


def with_memory_budget(topology: Topology, text: str | None) -> Topology:
    """The same cluster, on each device of which plans may use so much memory at most; as it is if ``text`` is None.

    A size holds for each device; one with less memory has all of it. TopologyError in one line if no device has so much, or the text is no
    budget.
    """
    if text is None:
        return topology
    budget, have = read_budget(text), topology.memory_limits
    if isinstance(budget, Fraction):
        return replace(topology, limits=tuple([max(1, int(budget * own)) for own in have]))
    if budget > max(have):
        most = format_bytes(max(have))
        raise TopologyError(f"{asked(FIELD)} {text!r}: no device of cluster {topology.name!r} has more than {most}; expected at most that")
    return replace(topology, limits=tuple([min(budget, own) for own in have]))
