"""Strategies of servers and workers: tables are looked up at the servers that own them, and workers with a part of the samples each compute
the rest. Weights of tables stay where they are; of all other parameters servers keep the values, too.

With ``consistency`` ``sync`` such a strategy is an exact one like any other. A stale one is read as a plan for workers without state
(``soap.elastic.planned``): each tile of the samples is a batch of its own.

A *fully connected* cluster has all on all devices, a *bipartite* one servers and workers apart (Twitter's two designs for sparse layers).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from soap.cluster.topology import Topology
from soap.errors import StrategyError
from soap.model.batch import samples_of
from soap.model.graph import DimMap, OperatorGraph
from soap.strategy.config import OpConfig, Strategy
from soap.strategy.consistency import SYNC
from soap.strategy.grids import device_order, fill, largest_divisor
from soap.strategy.sync import fitted, parameter_server

Parts = Mapping[str, tuple[int, ...]]
DENSE_SERVERS = 2
"""At most so many servers have a piece of the dense variables, which are small. A default."""


@dataclass(frozen=True, slots=True)
class LookUp:
    """A use of a table. ``operator``: its position. ``factors``: those that the table's rows and its columns follow."""

    operator: int
    factors: tuple[int, int]


@dataclass(frozen=True, slots=True)
class TableAt:
    """A table in equal parts along ``axis`` (0: rows, 1: columns), one on each of ``parts_at`` (devices); a device may have several."""

    axis: int
    parts_at: tuple[int, ...]


def look_ups(graph: OperatorGraph, table: str) -> tuple[LookUp, ...]:
    """The uses of a parameter that servers can compute with. StrategyError in one line if they cannot."""
    if table not in graph.sparse:
        known = ", ".join(list(graph.sparse)[:3]) or "none"
        raise StrategyError(f"parameter {table!r} is no table that only ids of the batch look up; expected one of those: {known}")
    found = []
    for use in graph.sparse[table].lookups:
        op = graph.operators[use.operator]
        dims = op.parameters[use.parameter].dims
        factors = tuple(dim.factor for dim in dims if dim.factor is not None and dim == DimMap(dim.factor))
        if len(dims) != 2 or len(factors) != 2 or not op.partitionable:
            raise StrategyError(
                f"operator {op.name!r} cannot be split by rows of {table!r}, so that it is no sum of them (a maximum?); expected a table "
                "that is summed or averaged"
            )
        found.append(LookUp(use.operator, (factors[0], factors[1])))
    return tuple(found)


def tables_of(graph: OperatorGraph) -> tuple[str, ...]:
    """The parameters that servers can compute with."""
    return tuple(name for name in graph.sparse if _is_served(graph, name))


def _is_served(graph: OperatorGraph, table: str) -> bool:
    try:
        return bool(look_ups(graph, table))
    except StrategyError:
        return False


def served(graph: OperatorGraph, workers: Sequence[int], tables: Mapping[str, TableAt], dense: int, consistency: str = SYNC) -> Strategy:
    """Samples split over ``workers`` (devices), look-ups of ``tables`` at their parts, and all else that is trained in ``dense`` pieces on
    servers. StrategyError if a table cannot be computed so."""
    chosen: dict[int, OpConfig] = {}
    for name, place in tables.items():
        for use in look_ups(graph, name):
            degrees = [1] * len(graph.operators[use.operator].factors)
            degrees[use.factors[place.axis]] = len(place.parts_at)
            chosen[use.operator] = OpConfig(tuple(degrees), place.parts_at)
    strategy = fill(graph, [tuple(workers)] * len(graph.operators), chosen)
    rest = [tensor.name for tensor in graph.parameters if tensor.requires_grad and tensor.name not in tables]
    syncs = {name: fitted(graph, name, parameter_server(dense)) for name in rest} if dense else {}
    return replace(strategy, parameters=syncs, consistency=consistency)


def fully_connected(graph: OperatorGraph, topology: Topology, count: int | None = None) -> Strategy:
    """Each device is a worker and a server. ``count``: of the devices; default: as many as divide the samples."""
    order = device_order(topology)
    most = len(order) if count is None else _within(count, len(order), "devices")
    chosen = order[: largest_divisor(samples_to_divide(graph), most)]
    return _dealt_out(graph, chosen, chosen)


def bipartite(graph: OperatorGraph, topology: Topology, count: int | None = None) -> Strategy:
    """Servers and workers on different devices. ``count``: of the servers; default: all devices of hosts that are servers; if none is, as
    few as leave workers that divide the samples. They are the first devices, servers' before others; of the rest as many work as divide
    the samples."""
    marked = topology.servers
    order, samples = (*marked, *device_order(topology)), samples_to_divide(graph)
    if len(order) < 2:
        raise StrategyError(
            f"servers and workers apart on cluster {topology.name!r} of one device; expected two or more, or fully_connected"
        )
    usual = len(marked) or next(n for n in range(1, len(order)) if samples % (len(order) - n) == 0)
    servers = usual if count is None else count
    _within(servers, len(order) - 1, "servers")
    rest = order[servers:]
    return _dealt_out(graph, rest[: largest_divisor(samples, len(rest))], order[:servers])


SERVED: Mapping[str, Callable[[OperatorGraph, Topology, int | None], Strategy]] = MappingProxyType(
    {"bipartite": bipartite, "fully_connected": fully_connected}
)
"""These by name."""


def _dealt_out(graph: OperatorGraph, workers: Sequence[int], servers: Sequence[int]) -> Strategy:
    """All tables by rows, one part for each server."""
    found = {name: TableAt(0, tuple(servers[server] for server in own)) for name, own in dealt_out(graph, len(servers)).items()}
    used = {device for place in found.values() for device in place.parts_at}
    return served(graph, workers, found, min(DENSE_SERVERS, len(used)))


def dealt_out(graph: OperatorGraph, servers: int, partitions: int | None = None, axes: Mapping[str, int] = MappingProxyType({})) -> Parts:
    """By table, the server (a number) of each part: all tables in ``partitions`` (default: one for each server) along their ``axes``
    (default: rows), dealt out in turn: each goes on where the one before has ended. A table with fewer positions has as many parts.
    StrategyError in one line if there is no table."""
    names, turn, found = tables_of(graph), 0, dict[str, tuple[int, ...]]()
    if not names:
        raise StrategyError(f"model {graph.name!r} has no table that ids of the batch look up; expected an embedding, or a bag of one")
    for name in names:
        count = min(partitions or servers, graph.tensors[name].shape[axes.get(name, 0)])
        found[name] = tuple((turn + part) % servers for part in range(count))
        turn += count
    return found


def samples_to_divide(graph: OperatorGraph) -> int:
    """Samples of a step. StrategyError in one line if there are none."""
    found = samples_of(graph)
    if found is None:
        raise StrategyError(f"model {graph.name!r} has no dimension of samples; expected one, to divide among workers")
    return found


def _within(count: int, most: int, what: str) -> int:
    if not 1 <= count <= most:
        raise StrategyError(f"{count} {what}; expected 1 to {most} on this cluster")
    return count


def configured(graph: OperatorGraph, strategy: Strategy) -> Iterator[tuple[str, TableAt]]:
    """The tables of a strategy that ``served`` makes: those sparse parameters that servers do not synchronize. StrategyError in one line,
    naming the operator, if one is split otherwise, or its uses differ."""
    for name in graph.sparse:
        if strategy.sync(name).contract.has_servers:
            continue
        places = {_place(graph, strategy, name, use): graph.operators[use.operator].name for use in look_ups(graph, name)}
        if len(places) > 1:
            raise StrategyError(
                f"operators {' and '.join(map(repr, [*places.values()][:2]))} have table {name!r} in different parts, or on different "
                "devices; expected the same for all of its uses"
            )
        yield name, next(iter(places))


def _place(graph: OperatorGraph, strategy: Strategy, table: str, use: LookUp) -> TableAt:
    op, config = graph.operators[use.operator], strategy.operators[graph.operators[use.operator].name]
    split = [place for place, degree in enumerate(config.degrees) if degree > 1]
    if config.replicas > 1 or len(split) > 1 or not {*split} <= {*use.factors}:
        shown = ", ".join(f"{op.factors[place].name}:{config.degrees[place]}" for place in split) or "nothing"
        shown += f" in {config.replicas} replicas" if config.replicas > 1 else ""
        rows, columns = (op.factors[place].name for place in use.factors)
        raise StrategyError(
            f"operator {op.name!r}, which looks up table {table!r}, is split by {shown}"
            f"; expected its owners to compute it: by {rows} alone (rows) or {columns} alone (columns)"
        )
    return TableAt(1 if split and split[0] == use.factors[1] else 0, config.devices)
