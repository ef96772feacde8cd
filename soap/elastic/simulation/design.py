"""Who does what in a training with servers and workers, as the simulator takes it: lanes that leases run along, and where partitions are.

A *lane* is what works on one lease after the other: a worker, which reads the batch and computes the rest of the model on one device. In
the *naive* design these are two devices. Twitter's three designs ("Distributed training of sparse machine learning models", parts 1 and 2)
differ in nothing but which devices lanes and partitions have.

What a lease asks for, and how many bytes each of its messages has: the formulas of ``messages`` and ``transport``, without the numbers.

Of a table, a lease names *entries* (ids, perhaps with values) in *bags* (for each bag the owners give a sum). They follow from a graph, or
exactly from a batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from soap.elastic.faults import ElasticError
from soap.elastic.layout import SMALL, ElasticPlan, Layout, Place, TableCut, lay_out_planned
from soap.elastic.messages import Kind, Message, size_bytes
from soap.elastic.transport import HEADER
from soap.model.batch import samples_of
from soap.model.dtypes import is_differentiable
from soap.model.graph import OperatorGraph, TensorKind
from soap.model.sparse_access import Lookup
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


def fully_connected(graph: OperatorGraph, devices: Sequence[int], batch: int, consistency: Consistency) -> ElasticPlan:
    """Each device is a worker and has a partition of each table."""
    return bipartite(graph, devices, devices, batch, consistency)


def naive(
    graph: OperatorGraph, inputs: Sequence[int], servers: Sequence[int], rests: Sequence[int], batch: int, consistency: Consistency
) -> Design:
    """Nodes of their own for input, partitions, and the rest of the model, whose variables are there, too. It is simulated alone."""
    partitioned = bipartite(graph, inputs, servers, batch, consistency)
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


@dataclass(frozen=True)
class Asked:
    """Of one table by one lease. ``shares``: of its entries, how many each partition of axis 0 gets, if that is known; else in proportion
    to their rows. ``value_bytes``: of an entry's value; 0 if all are 1."""

    bags: int
    entries: int
    value_bytes: int
    item_bytes: int
    shares: tuple[int, ...] = ()

    def entries_of(self, places: Sequence[Place]) -> tuple[int, ...]:
        """By partition, how many entries it is asked for."""
        if places[0].partition.axis == 1:
            return (self.entries,) * len(places)
        if self.shares:
            return self.shares
        rows = places[0].partition.shape[0]
        return tuple(self.entries * p.partition.stop // rows - self.entries * p.partition.start // rows for p in places)


@dataclass(frozen=True)
class Needs:
    """All that a lease asks for. ``input_bytes``: of the batch beside ids and values."""

    tables: Mapping[str, Asked]
    dense_item_bytes: int
    input_bytes: int


def needs_of_graph(graph: OperatorGraph, tables: Sequence[str], batch: int) -> Needs:
    """What a lease of ``batch`` samples asks for, by the shapes of a graph. ElasticError if ``batch`` does not divide the graph's."""
    samples = samples_of(graph) or batch
    if batch < 1 or samples % batch:
        raise ElasticError(f"leases of {batch} samples of a model for {samples}; expected a number that divides it")
    part, found, read = samples // batch, {}, set[str]()
    for name in tables:
        bags = entries = value_bytes = 0
        table = graph.tensors[name]
        for lookup in graph.sparse[name].lookups:
            op = graph.operators[lookup.operator]
            bags += max(1, graph.tensors[op.outputs[0].tensor].bytes // (table.itemsize * table.shape[1]) // part)
            entries += lookup.indices // part
            values = _values(graph, lookup)
            value_bytes = max([value_bytes, *(graph.tensors[values].itemsize for _ in range(1) if values)])
            read.update([*([values] if values else []), *(op.inputs[place].tensor for place in lookup.inputs)])
        found[name] = Asked(bags, entries, value_bytes, table.itemsize)
    _, dense = shapes_of(graph, tables)
    inputs = [tensor for tensor in graph.tensors.values() if tensor.kind is TensorKind.INPUT and tensor.name not in read]
    return Needs(found, max((graph.tensors[name].itemsize for name in dense), default=4), sum(tensor.bytes for tensor in inputs) // part)


def _values(graph: OperatorGraph, lookup: Lookup) -> str | None:
    """The input that holds a look-up's values: numbers that lie as the ids do."""
    op = graph.operators[lookup.operator]
    ids = [op.inputs[place] for place in lookup.inputs]
    for place, operand in enumerate(op.inputs):
        tensor = graph.tensors[operand.tensor]
        alike = any(operand.dims == own.dims and tensor.shape == graph.tensors[own.tensor].shape for own in ids)
        if place not in lookup.inputs and is_differentiable(tensor.dtype) and alike:
            return operand.tensor
    return None


@dataclass(frozen=True)
class Traffic:
    """Bytes of the frames of a lease."""

    design: Design
    needs: Needs

    def asking(self, place: Place) -> int:
        """A question for sums."""
        return frame_bytes(Kind.LOOK_UP, *self._entries(place))

    def sums(self, place: Place) -> int:
        """Its answer."""
        return frame_bytes(Kind.SUMS, self._outputs(place))

    def push(self, place: Place) -> int:
        """A push: of the gradient of sums, or of a piece of the dense variables."""
        if place.partition.parameter not in self.needs.tables:
            return frame_bytes(Kind.PUSH, self._piece(place))
        return frame_bytes(Kind.PUSH_OUTPUTS, self._outputs(place), *self._entries(place))

    def counted(self) -> int:
        """The answer to a push."""
        return frame_bytes(Kind.VERSION)

    def pulling(self) -> int:
        """A question for a piece of the dense variables."""
        return frame_bytes(Kind.PULL)

    def values(self, place: Place) -> int:
        """Its answer."""
        return frame_bytes(Kind.VALUES, self._piece(place))

    def entries_of(self, place: Place) -> int:
        """How many entries a partition is asked for."""
        places = self.design.layout.tables[place.partition.parameter]
        return self.needs.tables[place.partition.parameter].entries_of(places)[places.index(place)]

    def _entries(self, place: Place) -> tuple[_Array, ...]:
        asked, count = self.needs.tables[place.partition.parameter], self.entries_of(place)
        cell = place.partition.cell
        whole = "<i4" if cell[0] <= SMALL and count < SMALL else "<i8"
        ids: tuple[_Array, ...] = ((whole, (count,)), (whole, (asked.bags + 1,)))
        return (*ids, (f"<f{asked.value_bytes}", (count,))) if asked.value_bytes else ids

    def _outputs(self, place: Place) -> _Array:
        asked = self.needs.tables[place.partition.parameter]
        return f"<f{asked.item_bytes}", (asked.bags, place.partition.cell[1])

    def _piece(self, place: Place) -> _Array:
        return f"<f{self.needs.dense_item_bytes}", place.partition.cell


_Array = tuple[str, tuple[int, ...]]
"""Type and shape."""


@lru_cache(2**14)
def frame_bytes(kind: Kind, *arrays: _Array) -> int:
    """Bytes of a message with arrays of these types and shapes, in its frame."""
    without_memory = tuple(np.broadcast_to(np.zeros((), np.dtype(dtype)), shape) for dtype, shape in arrays)
    return HEADER.size + size_bytes(Message(kind, 0, arrays=without_memory))
