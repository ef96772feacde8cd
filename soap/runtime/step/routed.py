"""Regions of tensors of a step. Those of routed rows (``tracing.routing``) have as many rows as experts were chosen for, in one dimension:
where they lie in a region follows from the experts' numbers, which all who make or read such a region have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, cast

import torch

from soap.model.regions import Box, lengths
from soap.plan.delivery import reduced_tensor
from soap.plan.plan import Plan
from soap.runtime.comm.packing import assemble, cut
from soap.tracing.rules.experts import routed_order

RegionKey = tuple[Literal["holding", "fetch", "sum"], int]
"""A region as a whole: of a holding, a fetch or a reduction of the plan."""


class Ids(NamedTuple):
    """Experts' numbers of rows, and the first row's place among all."""

    numbers: torch.Tensor
    first: int


class RoutedRows:
    """The rows of a region of ``experts`` experts (of all of them) that rows may be for: one expert after another, in their order."""

    def __init__(self, ids: Ids, box: Box, experts: int) -> None:
        (first, last), (start, stop), *_ = box
        begin = start * experts - ids.first
        own = ids.numbers[begin : begin + (stop - start) * experts]
        self._experts, self._box = experts, box
        self._places = routed_order(own, first, last)
        self._numbers = own[self._places]
        self.count = len(self._places)

    def within(self, box: Box) -> torch.Tensor | None:
        """Which of the rows are in a part of the region, ascending; None for all of them."""
        (first, last), (start, stop), *_ = box
        if box[:2] == self._box[:2]:
            return None
        begin, end = ((place - self._box[1][0]) * self._experts for place in (start, stop))
        known = (self._numbers >= first) & (self._numbers < last) & (self._places >= begin) & (self._places < end)
        return torch.nonzero(known).flatten()


class _AssembleRows(torch.autograd.Function):
    """``packing.assemble`` of routed rows. ``places``: of each piece, its rows and its other dimensions."""

    @staticmethod
    def forward(ctx: Any, shape: Sequence[int], places: Sequence[Any], *pieces: torch.Tensor) -> torch.Tensor:
        ctx.places = places
        whole = pieces[0].new_empty(shape)
        for place, piece in zip(places, pieces, strict=True):
            whole[place] = piece
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        needed = ctx.needs_input_grad[2:]
        return (None, None, *(gradients[0][place] if need else None for place, need in zip(ctx.places, needed, strict=True)))


class Regions:
    """What of regions is where, for one rank and one step. ``ids_of``: finds the experts' numbers for a region of routed rows."""

    def __init__(self, plan: Plan, dtype_of: Callable[[str], torch.dtype], device: torch.device) -> None:
        self._plan, self._dtype_of, self._device = plan, dtype_of, device
        self._rows: dict[RegionKey, RoutedRows] = {}
        self.ids_of: Callable[[RegionKey], Ids] | None = None

    def _whole(self, key: RegionKey) -> tuple[str, Box]:
        kind, number = key
        if kind == "sum":
            reduction = self._plan.reductions[number]
            return reduced_tensor(self._plan, reduction), reduction.box
        own = self._plan.holdings[number] if kind == "holding" else self._plan.fetches[number]
        return own.tensor, own.box

    def is_routed(self, key: RegionKey) -> bool:
        """Whether it has routed rows."""
        return self._whole(key)[0] in self._plan.graph.routed

    def note(self, key: RegionKey, ids: Ids) -> None:
        """Work out where rows are, by these numbers."""
        tensor, box = self._whole(key)
        if key not in self._rows:
            self._rows[key] = RoutedRows(ids, box, self._plan.graph.tensors[tensor].shape[0])

    def _rows_of(self, key: RegionKey) -> RoutedRows:
        if key not in self._rows:
            assert self.ids_of is not None
            self.note(key, self.ids_of(key))
        return self._rows[key]

    def _place(self, key: RegionKey, box: Box) -> Any:
        """An index of a part of a region of routed rows."""
        found, (_, whole) = self._rows_of(key).within(box), self._whole(key)
        rest = tuple([slice(a - start, b - start) for (a, b), (start, _) in zip(box[2:], whole[2:], strict=True)])
        return (slice(None) if found is None else found, *rest)

    def shape(self, key: RegionKey, box: Box) -> tuple[int, ...]:
        """The shape of a part of a region."""
        if not self.is_routed(key):
            return lengths(box)
        rows = self._rows_of(key)
        found = rows.within(box)
        return (rows.count if found is None else len(found), *lengths(box)[2:])

    def empty(self, key: RegionKey, box: Box | None = None) -> torch.Tensor:
        """Uninitialized room for a part of a region, or for all of it."""
        tensor, whole = self._whole(key)
        return torch.empty(self.shape(key, whole if box is None else box), dtype=self._dtype_of(tensor), device=self._device)

    def zeros(self, key: RegionKey, box: Box | None = None) -> torch.Tensor:
        """The same of zeros."""
        return self.empty(key, box).zero_()

    def cut(self, key: RegionKey, tensor: torch.Tensor, box: Box) -> torch.Tensor:
        """A part of a region: a view, or of routed rows perhaps a copy."""
        _, whole = self._whole(key)
        if box == whole or not self.is_routed(key):
            return cut(tensor, whole, box)
        return tensor[self._place(key, box)]

    def put(self, key: RegionKey, tensor: torch.Tensor, box: Box, part: torch.Tensor) -> None:
        """Write a part of a region."""
        if self.is_routed(key):
            tensor[self._place(key, box)] = part
        else:
            cut(tensor, self._whole(key)[1], box).copy_(part)

    def add(self, key: RegionKey, tensor: torch.Tensor, box: Box, part: torch.Tensor) -> None:
        """Add to a part of a region."""
        if self.is_routed(key):
            tensor[self._place(key, box)] += part
        else:
            cut(tensor, self._whole(key)[1], box).add_(part)

    def assemble(self, key: RegionKey, boxes: Sequence[Box], pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        """A region from the parts that it consists of; differentiable."""
        _, whole = self._whole(key)
        if not self.is_routed(key) or (len(boxes) == 1 and boxes[0] == whole):
            return assemble(whole, boxes, pieces)
        places = [self._place(key, box) for box in boxes]
        made = _AssembleRows.apply(self.shape(key, whole), places, *pieces)  # type: ignore[no-untyped-call]
        return cast(torch.Tensor, made)
