"""Which server owns what: every table in partitions, dealt out over the servers, and all dense variables together as one long vector.

Dense variables are small and many. Laid end to end they are pulled and pushed by one message for each of the few servers that have a piece,
and an elementwise update, as servers demand it, is the same as for each by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from soap.elastic.faults import ElasticError
from soap.elastic.partitions import Partition, cut
from soap.elastic.plan import TableCut
from soap.strategy.served import DENSE_SERVERS

DENSE = "dense variables"
"""Name of the vector."""


@dataclass(frozen=True)
class Place:
    """A partition's server, and its number there."""

    partition: Partition
    server: int
    number: int


@dataclass(frozen=True)
class Layout:
    """``tables``: partitions of each, in order. ``dense``: those of the vector, if any. ``shapes``: of its dense variables, in order."""

    servers: int
    tables: Mapping[str, tuple[Place, ...]]
    dense: tuple[Place, ...]
    shapes: Mapping[str, tuple[int, ...]]

    def of_server(self, server: int) -> tuple[Partition, ...]:
        """The partitions of one server, by their numbers there."""
        own = [place for place in self.places if place.server == server]
        return tuple(place.partition for place in sorted(own, key=lambda place: place.number))

    @property
    def places(self) -> tuple[Place, ...]:
        """All partitions."""
        return (*(place for places in self.tables.values() for place in places), *self.dense)

    def initial(self, server: int, parameters: Mapping[str, Tensor]) -> list[Tensor]:
        """The values of a server's partitions in a whole model."""
        whole = {**parameters, DENSE: self.joined(parameters)} if self.dense else parameters
        return [partition.of(whole[partition.parameter]) for partition in self.of_server(server)]

    def joined(self, values: Mapping[str, Tensor]) -> Tensor:
        """The vector of all dense variables, or of their gradients."""
        return torch.cat([values[name].detach().reshape(-1) for name in self.shapes])

    def apart(self, vector: Tensor) -> dict[str, Tensor]:
        """The dense variables in it, as views."""
        parts = torch.split(vector, [prod(shape) for shape in self.shapes.values()])
        return {name: part.view(shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)}


def lay_out(tables: Mapping[str, Sequence[int]], dense: Mapping[str, Sequence[int]], servers: int) -> Layout:
    """Cut tables of these shapes by rows, each into as many partitions as there are servers, or rows if these are fewer, and deal these
    out in turn: each table goes on where the last one has ended, and the pieces of the dense variables behind the last table."""
    if servers < 1:
        raise ElasticError(f"{servers} servers; expected at least 1")
    turn, cuts = 0, dict[str, TableCut]()
    for name, shape in tables.items():
        parts = min(servers, max(1, shape[0]))
        cuts[name] = TableCut(0, tuple((turn + part) % servers for part in range(parts)))
        turn += parts
    return lay_out_planned(tables, dense, servers, cuts, [(turn + piece) % servers for piece in range(min(servers, DENSE_SERVERS))])


def lay_out_planned(
    tables: Mapping[str, Sequence[int]],
    dense: Mapping[str, Sequence[int]],
    servers: int,
    cuts: Mapping[str, TableCut],
    dense_servers: Sequence[int],
) -> Layout:
    """Tables of these shapes cut and placed as ``cuts`` says, and the dense variables with a piece on each of ``dense_servers``, as far as
    they have numbers enough. ElasticError in one line for servers that do not exist, or where a table is missing."""
    numbers = [0] * servers

    def placed(partition: Partition, server: int) -> Place:
        if not 0 <= server < servers:
            raise ElasticError(f"{partition.name!r} is on server {server}; expected 0 to {servers - 1}")
        numbers[server] += 1
        return Place(partition, server, numbers[server] - 1)

    found: dict[str, tuple[Place, ...]] = {}
    for name, shape in tables.items():
        if name not in cuts:
            raise ElasticError(f"table {name!r} has no servers; expected some for each of {', '.join(tables)}")
        own = cuts[name]
        found[name] = tuple(map(placed, cut(name, shape, len(own.servers), own.axis), own.servers))
    size = sum(prod(shape) for shape in dense.values())
    if size and not dense_servers:
        raise ElasticError(f"{next(iter(dense))!r} has no server; expected one at least for the dense variables")
    pieces = cut(DENSE, (size,), min(len(dense_servers), size)) if size else ()
    return Layout(servers, found, tuple(map(placed, pieces, dense_servers)), {name: tuple(shape) for name, shape in dense.items()})
