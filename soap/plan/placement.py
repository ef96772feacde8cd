"""Where servers keep parameters: one server per host, on its first device, and which partition is on which.

Partitions are placed by load, as in Parallax: parameters are taken by size, largest first, and each begins at the host that has the
least so far, as if all of it stood there; its further partitions go to the hosts that follow. So where a parameter is does not depend on
how others are synchronized, and changing one moves no other.
"""

from __future__ import annotations

from soap.cluster.topology import Topology
from soap.model.graph import OperatorGraph
from soap.model.regions import Box, balanced


def server_devices(topology: Topology) -> tuple[int, ...]:
    """By host that has devices: its first device, beside which the server runs."""
    first: dict[int, int] = {}
    for number, device in enumerate(topology.devices):
        first.setdefault(device.host, number)
    return tuple(first[host] for host in sorted(first))


def first_servers(graph: OperatorGraph, servers: int) -> dict[str, int]:
    """Parameter -> the server (below ``servers``) at which its partitions begin. Sparse parameters are placed before dense ones."""
    load = [0] * servers
    found = {}
    for tensor in sorted(graph.parameters, key=lambda tensor: (tensor.name not in graph.sparse, -tensor.bytes, tensor.name)):
        found[tensor.name] = server = load.index(min(load))
        load[server] += tensor.bytes
    return found


def cut_rows(box: Box, partitions: int) -> list[Box]:
    """A region in so many balanced parts of dimension 0, or in as many as it has rows; a number is one part."""
    if not box:
        return [box]
    (start, stop), *rest = box
    return [((start + first, start + last), *rest) for first, last in balanced(stop - start, min(partitions, stop - start))]


def server_of(first: int, cell: int, partition: int, servers: int) -> int:
    """The server of a partition of a parameter's region number ``cell``, if the parameter begins at ``first``."""
    return (first + cell + partition) % servers
