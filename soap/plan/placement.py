"""Which server, or which reader, owns which part of a parameter. Each host has one server, beside its first device; if the cluster says
which hosts are servers (``Host.server``), only they do.

Partitions on servers are placed by load, as in Parallax. Parameters are taken largest first; each starts at the server with the fewest
bytes so far, and all its bytes count there, although its further partitions go to the following servers. Parts of readers are dealt out
like cards. So a parameter's place does not depend on how other parameters are synchronized, and changing one parameter moves no other.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import product

from soap.cluster.topology import Topology
from soap.model.graph import OperatorGraph
from soap.model.regions import Box, balanced, lengths


def first_devices(topology: Topology) -> tuple[int, ...]:
    """The first device of each host that has devices, by host number."""
    first: dict[int, int] = {}
    for number, device in enumerate(topology.devices):
        first.setdefault(device.host, number)
    return tuple(first[host] for host in sorted(first))


def server_devices(topology: Topology) -> tuple[int, ...]:
    """The devices beside which servers run: the first one of each host that is a server, by host number; of each host if none is."""
    marked = set(topology.servers)
    return tuple(device for device in first_devices(topology) if not marked or device in marked)


def first_servers(graph: OperatorGraph, servers: int) -> dict[str, int]:
    """Parameter -> the server (below ``servers``) at which its partitions begin. Sparse parameters are placed before dense ones."""
    load = [0] * servers
    found = {}
    for tensor in sorted(graph.parameters, key=lambda tensor: (tensor.name not in graph.sparse, -tensor.bytes, tensor.name)):
        found[tensor.name] = server = load.index(min(load))
        load[server] += tensor.bytes
    return found


def first_readers(graph: OperatorGraph) -> dict[str, int]:
    """Parameter -> the reader, modulo the number of readers, that owns the first of its parts.

    Rows are dealt out one after the other, the largest first: a parameter begins where the one before has ended. So readers' loads differ
    by a row at most if the same devices read all parameters whole, and small parameters do not all lie on the first reader.
    """
    rows = {tensor.name: max(1, tensor.shape[0]) if tensor.shape else 1 for tensor in graph.parameters}
    found, dealt = {}, 0
    for tensor in sorted(graph.parameters, key=lambda tensor: (-(tensor.bytes // rows[tensor.name]), tensor.name)):
        found[tensor.name] = dealt
        dealt += rows[tensor.name] if tensor.requires_grad else 0
    return found


def cut_rows(box: Box, partitions: int) -> list[Box]:
    """A region cut along dimension 0 into ``partitions`` balanced parts, at most one per row; a scalar is one part."""
    if not box:
        return [box]
    (start, stop), *rest = box
    return [((start + first, start + last), *rest) for first, last in balanced(stop - start, min(partitions, stop - start))]


@lru_cache(1024)
def reader_parts(box: Box, readers: int) -> tuple[Box, ...]:
    """A region cut into a part for each of so many readers, or one for each element if these are fewer. Each part is one piece of the
    region's memory: if dimension 0 has too few entries, as of a single expert's matrix, parts lie inside of them, along the next one."""
    if not box:
        return (box,)
    sizes = lengths(box)
    leading, entries, along = cut_place(sizes, readers)
    (start, _), rest, found = box[along], box[along + 1 :], list[Box]()
    outer = product(*(range(first, last) for first, last in box[:along]))
    for place, (first, last) in zip(outer, balanced(min(readers, leading * entries), leading), strict=True):
        head = tuple([(at, at + 1) for at in place])
        found += [(*head, (start + a, start + b), *rest) for a, b in balanced(entries, last - first)]
    return tuple(found)


def cut_place(sizes: Sequence[int], parts: int) -> tuple[int, int, int]:
    """(leading, entries, along): a region of these sizes is cut into so many parts along dimension ``along``, of so many entries; those
    before it have ``leading`` together, fewer than the parts."""
    leading = 1
    for along, size in enumerate(sizes[:-1]):
        if leading * size >= parts:
            return leading, size, along
        leading *= size
    return leading, sizes[-1] if sizes else 1, max(0, len(sizes) - 1)


def are_even(box: Box, readers: int) -> bool:
    """Whether the parts of all readers have as many elements."""
    leading, entries, _ = cut_place(lengths(box), readers)
    return not leading or (readers % leading == 0 and entries % (readers // leading) == 0)


def owner_of(first: int, cell: int, part: int, owners: int) -> int:
    """The owner (below ``owners``) of a part of a parameter's region number ``cell``, if the parameter begins at ``first``."""
    return (first + cell + part) % owners
