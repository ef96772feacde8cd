"""Meshes inside a host: pairs of devices that are joined by links of their own, one or several, such as the hybrid cube mesh of a DGX-1."""

from __future__ import annotations

from soap.cluster.fields import Fields
from soap.errors import TopologyError

MESH = "mesh"
"""The kind of such wiring in a cluster description."""

MOST_LINKS = 64
"""Between two devices; more is taken for a typing error."""


def joined_pairs(intra: Fields, count: int) -> list[tuple[int, int, int]]:
    """Read ``joined``: (place in the host, another place, number of links between them), first place < second. Pairs of places beyond the
    host's devices are left out, so that one description serves smaller hosts. TopologyError for a pair that is joined twice."""
    found: dict[tuple[int, int], int] = {}
    for item, path in intra.items("joined", required=True):
        if not isinstance(item, list) or len(item) not in (2, 3) or not all(type(x) is int for x in item):
            raise TopologyError(f"{path}: {item!r:.60}; expected two places in the host, and the number of links if it is not 1: [0, 3, 2]")
        (first, second), links = sorted(item[:2]), item[2] if len(item) == 3 else 1
        if first < 0 or first == second or not 1 <= links <= MOST_LINKS:
            raise TopologyError(f"{path}: {item!r:.60}; expected two different places from 0 on, and 1 to {MOST_LINKS} links")
        if (first, second) in found:
            raise TopologyError(f"{path}: devices {first} and {second} are joined above; expected each pair once, with its number of links")
        found[first, second] = links
    return [(first, second, links) for (first, second), links in sorted(found.items()) if second < count]
