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

DENSE = "dense variables"
"""Name of the vector."""
DENSE_SERVERS = 2
"""At most so many servers have a piece of it."""


@dataclass(frozen=True)
class Place:
    """A partition's server, and its number there."""

    partition: Partition
    server: int
    number: int


@dataclass(frozen=True)
class Layout:
    """``tables``: the partitions of each, in their order. ``dense``: those of the vector; none if there are no dense variables.
    ``shapes``: of the dense variables, in their order in it."""

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


def lay_out(
    tables: Mapping[str, Sequence[int]],
    dense: Mapping[str, Sequence[int]],
    servers: int,
    *,
    partitions: int | None = None,
    axis: int | Mapping[str, int] = 0,
) -> Layout:
    """Cut tables of these shapes into so many partitions along an axis (for each table, or all), and deal these out in turn: each table
    goes on where the last one has ended. A table with fewer positions than ``partitions`` (default: the number of servers) is cut into as
    many as it has."""
    if servers < 1:
        raise ElasticError(f"{servers} servers; expected at least 1")
    count = partitions or servers
    found: dict[str, tuple[Place, ...]] = {}
    numbers, turn = [0] * servers, 0

    def placed(partition: Partition) -> Place:
        nonlocal turn
        server, turn = turn % servers, turn + 1
        numbers[server] += 1
        return Place(partition, server, numbers[server] - 1)

    for name, shape in tables.items():
        along = axis if isinstance(axis, int) else axis.get(name, 0)
        size = shape[along] if 0 <= along < len(shape) else 1
        found[name] = tuple(placed(partition) for partition in cut(name, shape, min(count, max(1, size)), along))
    size = sum(prod(shape) for shape in dense.values())
    pieces = cut(DENSE, (size,), min(servers, DENSE_SERVERS, size)) if size else ()
    return Layout(servers, found, tuple(map(placed, pieces)), {name: tuple(shape) for name, shape in dense.items()})
