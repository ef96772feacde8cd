"""Who computes what and who owns what in a training with servers and workers: parameters cut into cells, the way of a batch through the
cells of a sparse layer, and which server has which cells.

A layer of shape (rows, outputs) is cut along axis 0, so that a cell owns a range of ids, or along axis 1, so that it owns one of outputs
(docs/internals/servers.md). Weights stay where they are. Dense variables are small and many. Laid end to end they are pulled and pushed
by one message for each of the few servers that have a piece, and an elementwise update, as servers demand it, is the same as for each by
itself.

What a batch asks of a sparse layer: for each sample, ids and their values; in other words, a sparse matrix by rows.

Owners compute with their cell of the layer's weights sums of rows forward, and the gradient of these rows backward. Bias, activation and a
bag's mean belong behind the sum over all cells (``combine``, ``means``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from soap.elastic.faults import ElasticError
from soap.model.regions import Box, balanced
from soap.runtime.sync.row_update import RowGradient
from soap.strategy.consistency import Consistency
from soap.strategy.served import DENSE_SERVERS

SMALL = 2**31
"""Ids and offsets below it travel as int32."""
_WHOLE = (torch.int32, torch.int64)


@dataclass(frozen=True)
class Lookups:
    """A ragged batch: sample b has the ids ``ids[offsets[b]:offsets[b + 1]]``.

    ``ids``: (entries,), int32 or int64; an id may come twice, and then counts twice. ``offsets``: (samples + 1,) of the same type, from 0
    to the number of entries. ``values``: (entries,), by which the ids' rows are multiplied; None where all are 1.
    """

    ids: Tensor
    offsets: Tensor
    values: Tensor | None = None

    @staticmethod
    def ragged(ids: Tensor, starts: Tensor, values: Tensor | None = None) -> Lookups:
        """From torch's form of a bag: ``starts`` (samples,) without the end of the last one."""
        return Lookups(ids, torch.cat([starts, starts.new_tensor([len(ids)])]), values)

    @staticmethod
    def padded(ids: Tensor, values: Tensor | None = None) -> Lookups:
        """From equally many ids a sample: ``ids``, ``values`` of shape (samples, ids)."""
        samples, each = ids.shape
        offsets = torch.arange(samples + 1, dtype=ids.dtype) * each
        return Lookups(ids.reshape(-1), offsets, None if values is None else values.reshape(-1))

    @property
    def samples(self) -> int:
        """How many samples there are, those without ids included."""
        return len(self.offsets) - 1

    @property
    def entries(self) -> int:
        """How many ids there are in all samples together."""
        return len(self.ids)

    def counts(self) -> Tensor:
        """(samples,), int64: how many ids each sample has."""
        return (self.offsets[1:] - self.offsets[:-1]).long()

    def owners(self) -> Tensor:
        """(entries,), int64: of which sample each entry is."""
        return torch.repeat_interleave(torch.arange(self.samples), self.counts(), output_size=self.entries)

    def checked(self, rows: int) -> Lookups:
        """Itself, if all ids are below ``rows`` and offsets fit. ElasticError in one line otherwise; what peers send is checked so."""
        if self.ids.dim() != 1 or self.ids.dtype not in _WHOLE or self.offsets.dtype is not self.ids.dtype:
            raise ElasticError(
                f"ids are {_told(self.ids)} and offsets {_told(self.offsets)}; expected one dimension and one of int32, int64 for both"
            )
        if self.offsets.dim() != 1 or not len(self.offsets) or int(self.offsets[0]) != 0 or int(self.offsets[-1]) != self.entries:
            raise ElasticError(f"offsets {_told(self.offsets)} do not lead from 0 to {self.entries}; expected samples + 1 of them")
        if self.samples and int((self.offsets[1:] - self.offsets[:-1]).min()) < 0:
            raise ElasticError("offsets fall; expected each sample's entries behind those of the sample before")
        if self.values is not None and (self.values.shape != self.ids.shape or not self.values.is_floating_point()):
            raise ElasticError(f"values are {_told(self.values)}; expected a floating-point number for each of {self.entries} ids")
        if self.entries:
            least, most = int(self.ids.min()), int(self.ids.max())
            if least < 0 or most >= rows:
                raise ElasticError(
                    f"id {least if least < 0 else most} is out of range; expected ids from 0 to {rows - 1}: make the layer larger, or "
                    "take ids modulo its size"
                )
        return self

    def without_ones(self) -> Lookups:
        """The same without values if all of them are 1, which need not travel then."""
        return Lookups(self.ids, self.offsets) if self.values is not None and bool((self.values == 1).all()) else self

    def narrowed(self, rows: int) -> Lookups:
        """The same with ids and offsets of the smallest type that holds those of a layer with so many rows: int32 below 2^31."""
        small = rows <= SMALL and self.entries < SMALL
        dtype = torch.int32 if small else torch.int64
        return Lookups(self.ids.to(dtype), self.offsets.to(dtype), self.values)

    def tensors(self) -> tuple[Tensor, ...]:
        """What travels: ids, offsets, and values if there are any."""
        return (self.ids, self.offsets) if self.values is None else (self.ids, self.offsets, self.values)

    @staticmethod
    def of(tensors: Sequence[Tensor]) -> Lookups:
        """What has travelled, not yet checked. ElasticError if there are neither two nor three tensors."""
        if len(tensors) not in (2, 3):
            raise ElasticError(f"look-ups of {len(tensors)} arrays; expected ids, offsets and perhaps values")
        return Lookups(*tensors)


def _told(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {list(tensor.shape)}"


CHUNK_BYTES = 2**22
"""Backward, contributions of entries are made for so many bytes at once: not for all entries, which would take far more memory than the
gradient itself."""


def sums_of_rows(weight: Tensor, lookups: Lookups) -> Tensor:
    """(samples, outputs): by sample, the sum of the rows of ``weight`` that it names, times their values. Look-ups must be checked."""
    if not lookups.entries:
        return weight.new_zeros((lookups.samples, weight.shape[1]))
    values = None if lookups.values is None else lookups.values.to(weight.dtype)
    return F.embedding_bag(lookups.ids, weight.detach(), lookups.offsets, mode="sum", per_sample_weights=values, include_last_offset=True)


def gradient_of_rows(lookups: Lookups, grad_out: Tensor) -> RowGradient:
    """The gradient of the rows that a batch reads, from the gradient of its sums (samples, outputs).

    Entries are added in their order, whatever the number of threads, so that equal input gives equal bits. ElasticError in one line if
    there is not one gradient for each sample.
    """
    if grad_out.dim() != 2 or len(grad_out) != lookups.samples:
        raise ElasticError(f"gradient of shape {list(grad_out.shape)} for {lookups.samples} samples; expected ({lookups.samples}, outputs)")
    rows, places = torch.unique(lookups.ids.long(), return_inverse=True)
    result = grad_out.new_zeros((len(rows), grad_out.shape[1]))
    samples = lookups.owners()
    values = None if lookups.values is None else lookups.values.to(grad_out.dtype)
    chunk = max(1, CHUNK_BYTES // max(1, grad_out.shape[1] * grad_out.element_size()))
    for start in range(0, lookups.entries, chunk):
        part = slice(start, start + chunk)
        given = grad_out.index_select(0, samples[part])
        if values is not None:
            given *= values[part, None]
        result.index_add_(0, places[part], given)
    return RowGradient(rows, result)


def means(sums: Tensor, lookups: Lookups) -> Tensor:
    """Means over each sample's ids, from sums over all cells; zeros for a sample without ids. ``lookups``: of the whole layer."""
    return sums / lookups.counts().clamp(min=1).to(sums.dtype)[:, None]


@dataclass(frozen=True)
class TableCut:
    """A table is cut along ``axis`` (0: rows, 1: columns). ``servers``: by partition, its position in ``ElasticPlan.servers``."""

    axis: int
    servers: tuple[int, ...]


@dataclass(frozen=True)
class ElasticPlan:
    """``workers``, ``servers``: by number, the device that each runs on. A device may be both (the *fully connected* cluster); in a
    *bipartite* one none is. ``dense``: positions in ``servers`` of those who own the dense variables, a piece each. ``batch``: samples of
    a lease; a step of all workers has ``batch * len(workers)``."""

    workers: tuple[int, ...]
    servers: tuple[int, ...]
    tables: Mapping[str, TableCut]
    dense: tuple[int, ...]
    batch: int
    consistency: Consistency


@dataclass(frozen=True)
class Partition:
    """A cell of a parameter: positions ``start`` to ``stop`` (not included) along ``axis``. ``shape``: of the whole parameter."""

    name: str
    parameter: str
    axis: int
    start: int
    stop: int
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if not 0 <= self.axis < max(1, len(self.shape)):
            raise ElasticError(
                f"{self.parameter!r} of shape {list(self.shape)} has no axis {self.axis}; expected 0 to {len(self.shape) - 1}"
            )
        size = self.shape[self.axis] if self.shape else 1
        if not 0 <= self.start <= self.stop <= size:
            raise ElasticError(
                f"partition {self.start}:{self.stop} of {self.parameter!r} lies outside of its {size} along axis {self.axis}"
            )

    @property
    def box(self) -> Box:
        """The cell as a region of the parameter."""
        return tuple((self.start, self.stop) if axis == self.axis else (0, size) for axis, size in enumerate(self.shape))

    @property
    def cell(self) -> tuple[int, ...]:
        """The cell's own shape."""
        return tuple(stop - start for start, stop in self.box)

    def of(self, whole: Tensor) -> Tensor:
        """The cell's part of a whole parameter, a view."""
        return whole.narrow(self.axis, self.start, self.stop - self.start) if self.shape else whole


def cut(parameter: str, shape: Sequence[int], parts: int, axis: int = 0) -> tuple[Partition, ...]:
    """A parameter in so many cells along an axis, the first ones perhaps longer by one. ElasticError for more cells than positions."""
    size = shape[axis] if 0 <= axis < len(shape) else 1
    if not 1 <= parts <= max(1, size):
        raise ElasticError(f"{parts} partitions of {parameter!r}, which has {size} along axis {axis}; expected 1 to {max(1, size)}")
    return cut_at(parameter, shape, [start for start, _ in balanced(size, parts)] + [size], axis)


def cut_at(parameter: str, shape: Sequence[int], bounds: Sequence[int], axis: int = 0) -> tuple[Partition, ...]:
    """A parameter in cells between neighbours of ``bounds``, which lead from 0 to its size; cells may be empty."""
    size = shape[axis] if 0 <= axis < len(shape) else 1
    if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != size or any(a > b for a, b in pairwise(bounds)):
        raise ElasticError(
            f"bounds {list(bounds)} of {parameter!r}; expected numbers that rise from 0 to {size}, its size along axis {axis}"
        )
    cells = list(pairwise(bounds))
    return tuple(Partition(f"{parameter}/{number}", parameter, axis, a, b, tuple(shape)) for number, (a, b) in enumerate(cells))


def route(cells: Sequence[Partition], lookups: Lookups) -> tuple[Lookups, ...]:
    """What each cell of a layer is asked for, all cells in their order. ElasticError in one line for an id that the layer does not have.

    Each part has all samples, in their order, some of them perhaps without ids; ids count from the cell's first row. All cells of axis 1
    get the same. Ids are int32 where the cell has less than 2^31 rows. Values that are all 1 are left out.
    """
    rows = cells[0].shape[0]
    lookups = lookups.checked(rows).without_ones()
    if cells[0].axis == 1:
        return (lookups.narrowed(rows),) * len(cells)
    bounds = torch.tensor([cell.start for cell in cells[1:]], dtype=lookups.ids.dtype)
    cell_of = torch.bucketize(lookups.ids, bounds, right=True)
    order = torch.argsort(cell_of, stable=True)  # entries keep their order inside a cell, and so are sorted by sample
    places = cell_of * lookups.samples + lookups.owners()
    counts = torch.bincount(places, minlength=len(cells) * lookups.samples).view(len(cells), lookups.samples)
    own = torch.split(order, counts.sum(1).tolist())
    return tuple(_part(cell, lookups, own[p], counts[p]) for p, cell in enumerate(cells))


def _part(cell: Partition, lookups: Lookups, chosen: Tensor, counts: Tensor) -> Lookups:
    """The chosen entries, for a cell of axis 0. ``counts``: how many of them each sample has."""
    offsets = torch.zeros(len(counts) + 1, dtype=torch.int64)
    torch.cumsum(counts, 0, out=offsets[1:])
    values = None if lookups.values is None else lookups.values.index_select(0, chosen)
    ids = lookups.ids.index_select(0, chosen).long() - cell.start
    return Lookups(ids, offsets, values).narrowed(cell.stop - cell.start)


def combine(cells: Sequence[Partition], sums: Sequence[Tensor]) -> Tensor:
    """The layer's sums (samples, outputs) from those of its cells, in their order. Bias and activation come behind this, once."""
    if cells[0].axis == 1:
        return torch.cat(list(sums), 1)
    result = sums[0].clone()
    for other in sums[1:]:
        result += other
    return result


def divide(cells: Sequence[Partition], grad_out: Tensor) -> tuple[Tensor, ...]:
    """Which part of the gradient of the sums (samples, outputs) each cell gets: all of it (axis 0), or its own columns (axis 1)."""
    if cells[0].axis == 0:
        return (grad_out,) * len(cells)
    return tuple(grad_out[:, cell.start : cell.stop].contiguous() for cell in cells)


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
