"""Drawn sparse batches, and cells to route them to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from soap.elastic.layout import Lookups, Partition, cut_at

MOST_PARTS = 8


@st.composite
def batches(draw: st.DrawFn, rows: int) -> Lookups:
    """Some samples without ids, ids that repeat, rows that nobody reads, values or none, values that are all 1."""
    counts = draw(st.lists(st.integers(0, 4), max_size=5))
    entries = sum(counts)
    ids = draw(st.lists(st.integers(0, rows - 1), min_size=entries, max_size=entries))
    numbers = draw(st.sampled_from(["none", "ones", "drawn"]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    values = {"none": None, "ones": torch.ones(entries).double(), "drawn": torch.randn(entries, generator=generator).double()}[numbers]
    dtype = draw(st.sampled_from([torch.int32, torch.int64]))
    offsets = torch.tensor([0, *torch.tensor(counts, dtype=torch.int64).cumsum(0).tolist()], dtype=dtype)
    return Lookups(torch.tensor(ids, dtype=dtype), offsets, values)


@st.composite
def layers(draw: st.DrawFn, most_parts: int = MOST_PARTS) -> tuple[tuple[Partition, ...], Tensor]:
    """Cells of uneven sizes, of which some may be empty, and the whole weight."""
    shape = draw(st.integers(1, 12)), draw(st.integers(1, 6))
    axis, parts = draw(st.integers(0, 1)), draw(st.integers(1, most_parts))
    inner = sorted(draw(st.lists(st.integers(0, shape[axis]), min_size=parts - 1, max_size=parts - 1)))
    weight = torch.randn(*shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 99))), dtype=torch.float64)
    return cut_at("table.weight", shape, [0, *inner, shape[axis]], axis), weight


def matrix(lookups: Lookups, rows: int) -> Tensor:
    """The batch as a dense matrix (samples, rows), float64."""
    dense = torch.zeros(lookups.samples, rows, dtype=torch.float64)
    values = torch.ones(lookups.entries).double() if lookups.values is None else lookups.values.double()
    dense.index_put_((lookups.owners(), lookups.ids.long()), values, accumulate=True)
    return dense


def drawn(shape: Sequence[int], seed: int, **options: Any) -> Tensor:
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed), **{"dtype": torch.float64, **options})


def most_missing(bound: int | None, wave: int = 1) -> int | None:
    """What ``Clocks.missing`` may not exceed: (D + 1) waves, and those in flight; None without a bound."""
    return None if bound is None else (bound + 2) * wave - 2
