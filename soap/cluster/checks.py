"""What is checked of the figures and names of a cluster."""

from __future__ import annotations

from collections.abc import Iterable
from math import isfinite
from typing import TYPE_CHECKING

from soap.errors import TopologyError

if TYPE_CHECKING:
    from soap.cluster.topology import DeviceType, Link


def reachable(start: str, edges: Iterable[tuple[str, str]]) -> set[str]:
    """All nodes to which edges lead from a node, and itself."""
    following: dict[str, list[str]] = {}
    for source, target in edges:
        following.setdefault(source, []).append(target)
    found, todo = {start}, [start]
    while todo:
        for node in following.get(todo.pop(), ()):
            if node not in found:
                found.add(node)
                todo.append(node)
    return found


def check_unique(what: str, names: Iterable[str]) -> None:
    """TopologyError if a name occurs twice."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise TopologyError(f"{what} name {name!r} occurs twice; expected unique names")
        seen.add(name)


def check_types(where: str, types: Iterable[DeviceType]) -> None:
    """TopologyError if two device types of different figures have one name, by which costs are looked up."""
    seen: dict[str, DeviceType] = {}
    for kind in types:
        known = seen.setdefault(kind.name, kind)
        if known is not kind and known.identity != kind.identity:
            raise TopologyError(f"{where}: two device types are named {kind.name!r}; rename one")


def check_positive(where: str, what: str, value: float) -> None:
    """TopologyError unless the value is finite and above 0."""
    if not (isfinite(value) and value > 0):
        raise TopologyError(f"{where}: {what} is {value!r}; expected a finite number above 0")


def check_parallel(links: Iterable[Link]) -> None:
    """TopologyError if two links lead from the same node to the same other one."""
    seen: dict[tuple[str, str], str] = {}
    for link in links:
        other = seen.setdefault((link.source, link.target), link.name)
        if other != link.name:
            raise TopologyError(
                f"links {other!r} and {link.name!r} both lead from {link.source!r} to {link.target!r}; "
                "give one link with the sum of their bandwidths"
            )
