"""Lookups on a compact table: which rows a tile looks up, and the same lookup on a table of these rows alone, one below the other.

A tile of a sparse parameter need not have its whole part of the table. It is computed in two steps. First its indices, from inputs that
exist when a step begins. Then, when the rows have come, the call itself, with each index replaced by its row's place among them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from soap.errors import ModelError
from soap.tracing.calls import argument, with_argument
from soap.tracing.rules.notation import Local, Tiled


def rows_asked_for(local: Local, rule: Tiled) -> torch.Tensor:
    """The different rows that a tile looks up of its part of the table, ascending; ModelError if the table has no such row.

    The table itself is not needed.
    """
    indices = local.tensors[1] if rule.picks is None else rule.picks(local)
    rows, (start, stop) = local.shapes[0][0], local.boxes[0][0]
    found: torch.Tensor = torch.unique(_from_the_front(local, indices))
    if found.numel() and not 0 <= (worst := _furthest(found)) < rows:
        raise ModelError(f"{local.call.name} looks up row {worst} of a table of {rows} rows; expected 0 to {rows - 1}")
    return found if (start, stop) == (0, rows) else found[(found >= start) & (found < stop)]


def look_up(local: Local, rule: Tiled, rows: torch.Tensor) -> Any:
    """The call's result for a tile whose table has just ``rows`` (ascending, all that it looks up among them)."""
    table, indices, *others = local.tensors
    if not len(rows):  # kernels want at least one row; nothing reads it
        table = table.new_zeros((1, *table.shape[1:]))
    count, entire = len(table), local.boxes[0][0] == (0, local.shapes[0][0])
    indices = _from_the_front(local, indices)
    places = torch.searchsorted(rows, indices.contiguous())
    if len(rows):
        places = torch.where(rows[places.clamp(max=count - 1)] == indices, places, count)
    call = local.call
    padding = argument(call, "padding_idx")
    if padding is not None and padding >= 0:
        place = int(torch.searchsorted(rows, padding))
        if place == len(rows) or rows[place] != padding:
            place = -1 if entire else count + 1
            places = places if entire else torch.where(indices == padding, place, places)
        call = with_argument(call, "padding_idx", place)
    # Places behind the table stand for rows of other tiles; so it is no whole table then.
    length = count if entire else count + 2
    own = replace(
        local,
        call=call,
        tensors=[table, places, *others],
        boxes=[((0, count), *local.boxes[0][1:]), *local.boxes[1:]],
        shapes=[(length, *local.shapes[0][1:]), *local.shapes[1:]],
    )
    return own.plain() if rule.run is None else rule.run(own)


def _from_the_front(local: Local, indices: torch.Tensor) -> torch.Tensor:
    """Subscripts with negative ones counted from the end."""
    if local.call.kind != "index":
        return indices
    return torch.where(indices < 0, indices + local.shapes[0][0], indices)


def _furthest(ascending: torch.Tensor) -> int:
    """An index that is out of range, if there is one."""
    first, last = int(ascending[0]), int(ascending[-1])
    return first if first < 0 else last
