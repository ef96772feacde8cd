"""What a lease asks for, and how many bytes each of its messages has: the formulas of ``messages`` and ``transport``, without the numbers.

Of a table, a lease names *entries* (ids, perhaps with values) in *bags* (for each bag the owners give a sum). They follow from a graph, or
exactly from a batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from soap.elastic.faults import ElasticError
from soap.elastic.layout import Place
from soap.elastic.lookups import SMALL
from soap.elastic.messages import Kind, Message, size_bytes
from soap.elastic.simulation.design import Design, shapes_of
from soap.elastic.transport import HEADER
from soap.model.batch import samples_of
from soap.model.dtypes import is_differentiable
from soap.model.graph import OperatorGraph, TensorKind
from soap.model.sparse_access import Lookup


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
