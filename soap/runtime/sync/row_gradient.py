"""Gradients of some rows of a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch


class RowGradient(NamedTuple):
    """The gradient of some rows. ``rows``: distinct row numbers, ascending, int64. ``values``: their gradients, shape (rows, ...)."""

    rows: torch.Tensor
    values: torch.Tensor

    def dense(self, first: int, count: int) -> torch.Tensor:
        """The gradient of the rows ``first`` to ``first + count``, with zeros for rows that are missing here."""
        whole = self.values.new_zeros((count, *self.values.shape[1:]))
        whole[self.rows - first] = self.values
        return whole

    @staticmethod
    def of(gradient: torch.Tensor, rows: torch.Tensor, first: int) -> RowGradient:
        """The gradients of ascending ``rows``, taken from a dense gradient whose first row has number ``first``; others are left out."""
        there = rows[(rows >= first) & (rows < first + len(gradient))]
        return RowGradient(there, gradient.index_select(0, there - first))


def add_up(parts: Sequence[RowGradient]) -> RowGradient:
    """The sum of one or more row gradients, added in the given order: equal parts give equal bits."""
    if len(parts) == 1:
        return parts[0]
    rows: torch.Tensor = torch.unique(torch.cat([part.rows for part in parts]))
    values = parts[0].values.new_zeros((len(rows), *parts[0].values.shape[1:]))
    for part in parts:
        values.index_add_(0, torch.searchsorted(rows, part.rows), part.values)
    return RowGradient(rows, values)


def common_rows(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """The union of one or more lists of rows, ascending."""
    if len(rows) == 1:
        return rows[0]
    found: torch.Tensor = torch.unique(torch.cat(list(rows)))
    return found
