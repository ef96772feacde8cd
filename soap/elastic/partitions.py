"""Parameters cut into cells for servers, and the way of a batch through the cells of one sparse layer of shape (rows, outputs). Cut along
axis 0, a cell owns a range of ids, along axis 1 one of outputs (docs/internals/servers.md). Weights stay where they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from soap.elastic.faults import ElasticError
from soap.elastic.lookups import Lookups
from soap.model.regions import Box, balanced


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
