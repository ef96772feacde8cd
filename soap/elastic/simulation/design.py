"""Who does what in a training with servers and workers, as the simulator takes it: lanes that leases run along, and where partitions are.

A *lane* is what works on one lease after the other: a worker, which reads the batch and computes the rest of the model on one device. In
the *naive* design these are two devices. Twitter's three designs ("Distributed training of sparse machine learning models", parts 1 and 2)
differ in nothing but which devices lanes and partitions have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from soap.elastic.faults import ElasticError
from soap.elastic.layout import Layout, Place, lay_out_planned
from soap.elastic.plan import ElasticPlan, TableCut
from soap.model.graph import OperatorGraph
from soap.strategy.consistency import Consistency
from soap.strategy.grids import largest_divisor
from soap.strategy.served import DENSE_SERVERS, dealt_out, samples_to_divide, tables_of

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Lane:
    """``front``: the device that reads the batch and asks; ``rest``: the one that gets the sums and computes the rest of the model."""

    front: int
    rest: int


@dataclass(frozen=True)
class Design:
    """``servers``: devices by number; ``layout``: which has what. ``in_flight``: leases of a lane at once. ``batch``: of a lease."""

    lanes: tuple[Lane, ...]
    servers: tuple[int, ...]
    layout: Layout
    batch: int
    consistency: Consistency
    in_flight: int = 1

    def __post_init__(self) -> None:
        if not self.lanes or not self.servers or self.batch < 1 or self.in_flight < 1:
            raise ElasticError(
                f"{len(self.lanes)} workers, {len(self.servers)} servers, leases of {self.batch} samples, {self.in_flight} at once; "
                "expected at least 1 of each"
            )

    def device(self, place: Place) -> int:
        """The device of a partition's owner."""
        return self.servers[place.server]

    @property
    def averaged(self) -> bool:
        """Whether the leases of a step, one of each lane, are one update together (``launcher.Options.averaged``)."""
        return not self.consistency.stale

    @property
    def stateful(self) -> tuple[int, ...]:
        """Devices whose loss is a loss of state."""
        return tuple(sorted({self.device(place) for place in self.layout.places}))

    @property
    def roles(self) -> Mapping[int, str]:
        """By device, what it is: "input" and "rest" in the naive design, else "worker", "server". Dense variables alone make no server."""
        found: dict[int, list[str]] = {}
        for lane in self.lanes:
            for device, role in ((lane.front, "input"), (lane.rest, "rest")) if lane.front != lane.rest else ((lane.rest, "worker"),):
                found.setdefault(device, []).append(role)
        tables = {self.device(place) for places in self.layout.tables.values() for place in places}
        for device in self.servers:
            if device in tables or device not in found:
                found.setdefault(device, []).append("server")
        return {device: " and ".join(dict.fromkeys(roles)) for device, roles in sorted(found.items())}


def shapes_of(graph: OperatorGraph, tables: Sequence[str]) -> tuple[Shapes, Shapes]:
    """(tables, dense variables): shapes by name. ElasticError in one line for a table that the graph does not look up."""
    for name in tables:
        if name not in graph.sparse:
            raise ElasticError(f"{name!r} is no table that is looked up; expected some of {', '.join(graph.sparse) or 'none'}")
    trained = [tensor for tensor in graph.parameters if tensor.requires_grad]
    dense = {tensor.name: tensor.shape for tensor in trained if tensor.name not in tables}
    return {name: graph.tensors[name].shape for name in tables}, dense


def layout_of(plan: ElasticPlan, graph: OperatorGraph) -> Layout:
    """Which server owns what, as a plan says. ElasticError in one line for a server that it does not have."""
    return lay_out_planned(*shapes_of(graph, [*plan.tables]), len(plan.servers), plan.tables, plan.dense)


def design_of(plan: ElasticPlan, graph: OperatorGraph) -> Design:
    """A plan, as the simulator takes it."""
    lanes = tuple(Lane(device, device) for device in plan.workers)
    layout = layout_of(plan, graph)
    return Design(lanes, plan.servers, layout, plan.batch, plan.consistency)


def bipartite(
    graph: OperatorGraph,
    workers: Sequence[int],
    servers: Sequence[int],
    batch: int,
    consistency: Consistency,
    *,
    partitions: int | None = None,
    axis: int | Mapping[str, int] = 0,
) -> ElasticPlan:
    """Workers and servers on these devices, tables as ``served.dealt_out`` deals them; dense variables on the first servers."""
    axes = dict.fromkeys(tables_of(graph), axis) if isinstance(axis, int) else axis
    tables = {name: TableCut(axes.get(name, 0), own) for name, own in dealt_out(graph, len(servers), partitions, axes).items()}
    return ElasticPlan(tuple(workers), tuple(servers), tables, tuple(range(min(DENSE_SERVERS, len(servers)))), batch, consistency)


def fully_connected(
    graph: OperatorGraph, devices: Sequence[int], batch: int, consistency: Consistency, *, axis: int | Mapping[str, int] = 0
) -> ElasticPlan:
    """Each device is a worker and has a partition of each table."""
    return bipartite(graph, devices, devices, batch, consistency, axis=axis)


def naive(
    graph: OperatorGraph,
    inputs: Sequence[int],
    servers: Sequence[int],
    rests: Sequence[int],
    batch: int,
    consistency: Consistency,
    *,
    axis: int | Mapping[str, int] = 0,
) -> Design:
    """Nodes of their own for input, partitions, and the rest of the model, whose variables are there, too. It is simulated alone."""
    partitioned = bipartite(graph, inputs, servers, batch, consistency, axis=axis)
    dense = tuple(len(servers) + k for k in range(len(rests)))
    plan = ElasticPlan(partitioned.workers, (*servers, *rests), partitioned.tables, dense, batch, consistency)
    layout = layout_of(plan, graph)
    lanes = tuple(Lane(device, rests[number % len(rests)]) for number, device in enumerate(inputs))
    return Design(lanes, plan.servers, layout, batch, consistency)


def three_designs(graph: OperatorGraph, machines: Sequence[int], consistency: Consistency, batch: int | None = None) -> dict[str, Design]:
    """Twitter's two designs and the naive one, which takes three machines, by name: a quarter of the devices are servers of their own, and
    in the naive design as many have the rest. ``batch``: of a lease; None: workers share the graph's."""
    quarter = max(1, len(machines) // 4)
    servers, others = machines[:quarter], machines[quarter:]

    def shared(among: Sequence[int]) -> tuple[Sequence[int], int]:
        if batch is not None:
            return among, batch
        samples = samples_to_divide(graph)
        workers = largest_divisor(samples, len(among))
        return among[:workers], samples // workers

    found = dict[str, Design]()
    if others[quarter:]:
        inputs, part = shared(others[quarter:])
        found["naive"] = naive(graph, inputs, servers, others[:quarter], part, consistency)
    everyone, part = shared(machines)
    found["fully connected"] = design_of(fully_connected(graph, everyone, part, consistency), graph)
    if others:
        workers, part = shared(others)
        found["bipartite"] = design_of(bipartite(graph, workers, servers, part, consistency), graph)
    return found
