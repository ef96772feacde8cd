"""Data-parallel copies in a strategy: which devices of two copies correspond, and the same strategy reduced to two copies.

A *copy* computes one of D equal parts of the samples, on devices of its own. An operator is

- *split*: one of its factors is cut into a multiple of D equal parts. They form D equal runs, and copy j computes the j-th run. Each
  operand either follows that factor exactly in one dimension (its *folded* dimension, in which producer and readers agree) or is the same
  for all copies. If the factor is summed, the sum goes over all copies. If micro-batches cut the same factor, they are of equal size, each
  is divided so, and the operand is *striped*: a copy has its part of every micro-batch. Producer and readers agree in that, too;
- *repeated*: it has a multiple of D replicas, in D equal runs, and copy j computes the j-th run;
- *alone*: only copy 0 computes it (such as what follows a summed loss, on one device).

One map per copy takes each device of copy 0 to the corresponding device of that copy. It is the same for all operators, and it keeps the
order of the devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np
from numpy.typing import NDArray

from soap.model.batch import MicroBatches
from soap.model.graph import Operand, Operator, OperatorGraph, TensorKind
from soap.strategy.config import OpConfig, Strategy

LEFT = 2
"""Copies in the reduced strategy: copy 0, which may differ from the others, and copy 1, which represents all others."""

Ints = NDArray[np.int64]


class UnfoldableError(Exception):
    """Why something cannot be folded, in one line."""


@dataclass(frozen=True)
class Copies:
    """A strategy as D copies, reduced to two of them.

    ``images[j, i]``: the device of copy j that corresponds to device ``images[0, i]`` of copy 0; each row ascends. ``graph``, ``strategy``:
    those of two copies, whose devices are numbered by their positions in ``devices`` (the devices of both copies, ascending). ``folded``:
    activation -> its folded dimension, for those that have one.
    """

    images: Ints
    graph: OperatorGraph
    strategy: Strategy
    devices: tuple[int, ...]
    folded: Mapping[str, int]


def candidates(strategy: Strategy) -> list[int]:
    """Numbers of copies worth trying, largest first: the divisors, above ``LEFT``, of the number of devices in use."""
    rows = {id(config.devices): config.devices for config in strategy.operators.values()}
    used = len(set().union(*rows.values()))
    return [count for count in range(used, LEFT, -1) if used % count == 0]


def find_copies(graph: OperatorGraph, strategy: Strategy, count: int) -> Copies:
    """The strategy as ``count`` copies. UnfoldableError if it does not consist of so many."""
    cut = MicroBatches(graph, strategy.microbatches)
    if cut.count > 1 and (cut.samples or 0) % cut.count:
        raise UnfoldableError(f"{cut.count} micro-batches of different sizes")
    return _Finding(graph, count, cut).find(strategy)


class _Finding:
    """One attempt to see a strategy as ``count`` copies. ``_columns``: device of copy 0 -> its counterparts in all copies."""

    def __init__(self, graph: OperatorGraph, count: int, cut: MicroBatches) -> None:
        self._graph, self._count, self._cut = graph, count, cut
        self._folded: dict[str, int] = {}
        self._striped: set[str] = set()
        self._columns: dict[int, Ints] = {}
        self._alone: set[int] = set()
        self._seen: dict[tuple[int, tuple[int, ...]], Ints] = {}
        self._sizes: dict[str, Operator] = {}

    def find(self, strategy: Strategy) -> Copies:
        rows = [self._operator(position, op, strategy.operators[op.name]) for position, op in enumerate(self._graph.operators)]
        images = self._images()
        devices = tuple(sorted(images[:LEFT].ravel().tolist()))
        rank = {device: i for i, device in enumerate(devices)}
        configs = {}
        placed: dict[int, tuple[int, ...]] = {}  # operators with one tuple of devices go on sharing one
        for op, (degrees, replicas, own) in zip(self._graph.operators, rows, strict=True):
            config = strategy.operators[op.name]  # what is divided among copies has no shares
            if id(own) not in placed:
                placed[id(own)] = tuple([rank[int(device)] for device in own])
            configs[op.name] = config.placed(degrees, placed[id(own)], replicas, config.shares)
        operators = tuple(self._sizes.get(op.name, op) for op in self._graph.operators)
        tensors = dict(self._graph.tensors)
        for name, dim in self._folded.items():
            shape = list(tensors[name].shape)
            shape[dim] = shape[dim] // self._count * LEFT
            tensors[name] = replace(tensors[name], shape=tuple(shape))
        whole = self._graph
        graph = OperatorGraph(whole.name, operators, tensors, whole.loss, whole.aliases, loss_terms=whole.loss_terms, copies_of=whole)
        return Copies(images, graph, replace(strategy, operators=configs), devices, self._folded)

    def _operator(self, position: int, op: Operator, config: OpConfig) -> tuple[tuple[int, ...], int, Sequence[int] | Ints]:
        """The operator's degrees, replicas and devices when two copies are left."""
        for factor in self._splits(position, op, config):
            shape = (config.replicas * prod(config.degrees[:factor]), self._count, prod(config.degrees[factor:]) // self._count)
            own = self._own(config, shape)
            if own is None:
                continue
            degrees = list(config.degrees)
            degrees[factor] = degrees[factor] // self._count * LEFT
            self._note_split(position, op, factor)
            return tuple(degrees), config.replicas, own
        common = not any(operand.tensor in self._folded for operand in op.inputs)
        if common and config.replicas % self._count == 0:
            own = self._own(config, (1, self._count, len(config.devices) // self._count))
            if own is not None:
                return config.degrees, config.replicas // self._count * LEFT, own
        if common:
            self._alone.update(config.devices)
            return config.degrees, config.replicas, config.devices
        raise UnfoldableError(f"operator {op.name!r} is not split into {self._count} equal copies")

    def _splits(self, position: int, op: Operator, config: OpConfig) -> Iterator[int]:
        """The factors that may divide the operator among the copies."""
        for factor, degree in enumerate(config.degrees):
            size, striped = op.factors[factor].size, self._cut.factors[position] == factor
            if config.shares or degree % self._count or size % (degree * (self._cut.count if striped else 1)):
                continue
            inputs = all(self._follows(operand, factor, size, striped=striped) for operand in op.inputs)
            parameters = not any(dim.factor == factor for operand in op.parameters for dim in operand.dims)
            if inputs and parameters and all(self._leaves(operand, factor, size, op.factors[factor].summed) for operand in op.outputs):
                yield factor

    def _follows(self, operand: Operand, factor: int, size: int, *, striped: bool) -> bool:
        """Whether an input follows the factor in its folded dimension and in no other."""
        tensor = self._graph.tensors[operand.tensor]
        dims = [d for d, dim in enumerate(operand.dims) if dim.factor == factor]
        if any(not operand.dims[d].exact or tensor.shape[d] != size * operand.dims[d].scale for d in dims):
            return False
        if tensor.kind is not TensorKind.ACTIVATION:  # every device has the model's inputs and constants
            return True
        if operand.tensor in self._folded:
            return dims == [self._folded[operand.tensor]] and striped == (operand.tensor in self._striped)
        return dims == []

    def _leaves(self, operand: Operand, factor: int, size: int, summed: bool) -> bool:
        """Whether an output follows the factor in exactly one dimension; if the factor is summed, in none."""
        dims = [d for d, dim in enumerate(operand.dims) if dim.factor == factor]
        if summed:
            return not dims
        shape = self._graph.tensors[operand.tensor].shape
        return len(dims) == 1 and operand.dims[dims[0]].exact and shape[dims[0]] == size * operand.dims[dims[0]].scale

    def _note_split(self, position: int, op: Operator, factor: int) -> None:
        factors = list(op.factors)
        factors[factor] = replace(factors[factor], size=factors[factor].size // self._count * LEFT)
        self._sizes[op.name] = replace(op, factors=tuple(factors))
        if op.factors[factor].summed:
            return
        for operand in op.outputs:
            self._folded[operand.tensor] = next(d for d, dim in enumerate(operand.dims) if dim.factor == factor)
            if self._cut.factors[position] == factor:
                self._striped.add(operand.tensor)

    def _own(self, config: OpConfig, shape: tuple[int, int, int]) -> Ints | None:
        """The devices of copies 0 and 1, in tile order; None if the devices contradict the map between copies that is known so far.

        ``shape`` arranges the operator's tiles as (tiles outside of the copies' axis, copies, tiles inside of it).
        """
        key = (id(config.devices), shape)
        if key not in self._seen:
            tiles = np.array(config.devices, np.int64).reshape(shape)
            copies = np.moveaxis(tiles, 1, 0).reshape(self._count, -1)
            devices, first, inverse = np.unique(copies[0], return_index=True, return_inverse=True)
            columns = copies[:, first]
            if not np.array_equal(columns[:, inverse.ravel()], copies):
                return None
            known = [self._columns.get(int(device)) for device in devices]
            if any(column is not None and not np.array_equal(column, columns[:, i]) for i, column in enumerate(known)):
                return None
            self._columns.update((int(device), columns[:, i]) for i, device in enumerate(devices))
            self._seen[key] = tiles[:, :LEFT].ravel()
        return self._seen[key]

    def _images(self) -> Ints:
        if not self._columns:
            raise UnfoldableError("no operator has copies")
        images = np.stack([self._columns[device] for device in sorted(self._columns)], axis=1)
        if len(np.unique(images)) < images.size:
            raise UnfoldableError(f"{self._count} copies share devices")
        if not self._alone <= set(images[0].tolist()):
            raise UnfoldableError(f"device {min(self._alone - set(images[0].tolist()))} works outside of {self._count} equal copies")
        if (np.diff(images, axis=1) <= 0).any():
            raise UnfoldableError(f"{self._count} copies have their devices in different orders")
        return images
