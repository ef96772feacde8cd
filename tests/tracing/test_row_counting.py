"""Rows counted from batches, against counting by hand: part by part, as data parallelism cuts the batch."""

from __future__ import annotations

from math import ceil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import soap
from soap.errors import ModelError
from soap.model.sparse_access import uniform
from soap.tracing.execute import TracedModel
from soap.tracing.importer import import_program
from soap.tracing.row_counting import measure_rows
from tests.extent import FEW
from tests.tracing.programs import Lambda, export, imported

ROWS = 40


def model_of(use: Any, *inputs: Tensor) -> TracedModel:
    tables = {"w": nn.Parameter(torch.randn(ROWS, 4)), "b": nn.Parameter(torch.randn(ROWS, 4))}
    return imported(Lambda(lambda self, *args: use(self, *args).square().mean(), **tables), *inputs)


def by_hand(parts_of: Any, batches: list[Tensor], halvings: int) -> list[int]:
    """Different ids in each of 1, 2, 4, … parts, on average, rounded up."""
    found = []
    for k in range(halvings):
        counts = [len(set(part.flatten().tolist())) for batch in batches for part in parts_of(batch, 2**k)]
        found.append(ceil(sum(counts) / len(counts)))
    return found


TOKENS = model_of(lambda self, ids: F.embedding(ids, self.w), torch.zeros(8, 3, dtype=torch.int64))


@FEW
@given(seed=st.integers(0, 999), batches=st.integers(1, 3), popular=st.integers(1, ROWS))
def test_parts_are_those_of_data_parallelism(seed: int, batches: int, popular: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    data = [torch.randint(popular, (8, 3), generator=generator) for _ in range(batches)]
    found = measure_rows(TOKENS, [[batch] for batch in data])["w"]
    assert list(found.touched[:4]) == by_hand(lambda batch, parts: batch.chunk(parts), data, 4)
    assert (found.rows, found.measured, found.source, len(found.touched)) == (ROWS, True, "measured", 5)


def test_batch_in_another_dimension_and_views_before_the_look_up() -> None:
    ids = torch.arange(48).reshape(2, 3, 8) % ROWS  # (kind, step, sample)

    class Columns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(ROWS, 4)

        def forward(self, ids: Tensor, target: Tensor) -> Tensor:
            return (self.table(ids[1]).sum((0, 2)) - target).square().mean()

    model = import_program(export(Columns(), ids, torch.rand(8)), name="model", batch_dims={"ids": 2})
    data = [torch.randint(ROWS, (2, 3, 8)) for _ in range(2)]
    found = measure_rows(model, [[batch, torch.rand(8)] for batch in data])["table.weight"]
    assert list(found.touched[:4]) == by_hand(lambda batch, parts: batch[1].chunk(parts, dim=1), data, 4)


def test_several_look_ups_of_a_table_are_counted_together() -> None:
    model = model_of(
        lambda self, ids, drawn: F.embedding(ids, self.w).sum(1) + F.embedding(drawn, self.w).sum(0),
        torch.zeros(8, 2, dtype=torch.int64),
        torch.zeros(16, dtype=torch.int64),
    )
    ids, drawn = torch.randint(ROWS, (8, 2)), torch.randperm(ROWS)[:16]

    def parts_of(_: Tensor, parts: int) -> list[Tensor]:
        return [torch.cat([a.flatten(), b]) for a, b in zip(ids.chunk(parts), drawn.chunk(parts), strict=True)]

    found = measure_rows(model, [[ids, drawn]])["w"]
    assert found.indices == 32
    assert list(found.touched[:4]) == by_hand(parts_of, [ids], 4)


def test_look_ups_of_one_table_count_by_the_different_rows_that_they_touch() -> None:
    """Sixteen candidates, all different, beside sixteen targets that are four rows: the latter count 16, the former four times as much."""
    model = model_of(
        lambda self, ids, drawn: F.embedding(ids, self.w).sum(1) + F.embedding(drawn, self.w).sum(0),
        torch.zeros(8, 2, dtype=torch.int64),
        torch.zeros(16, dtype=torch.int64),
    )
    found = measure_rows(model, [[torch.arange(16).view(8, 2) % 4, torch.arange(4, 20)]])["w"]
    assert [(own.indices, own.weighed) for own in found.lookups] == [(16, 16), (16, 64)]
    assert (found.weighed, found.touched[0], found.touched_by(80)) == (80, 20, 20)
    assert found.touched_by(64 + 16 // 4) > found.touched_by(16) + 10  # candidates and a quarter of the targets, beside the targets alone


def test_bags_and_negative_indices() -> None:
    model = model_of(lambda self, ids: F.embedding_bag(ids, self.w) + self.b[ids[:, 0] - ROWS], torch.zeros(4, 3, dtype=torch.int64))
    ids = torch.tensor([[0, 1, 2], [2, 3, 4], [0, 0, 0], [7, 7, 8]])
    found = measure_rows(model, [[ids]])
    assert found["w"].touched[:3] == (7, 4, 3)  # halves: 5 and 3; quarters: 3, 3, 1, 2
    assert found["b"].touched == (3, 2, 1)  # 0 and 2, 0 and 7


def test_batches_of_other_sizes_are_passed_over() -> None:
    whole, last = torch.arange(24).reshape(8, 3), torch.zeros(5, 3, dtype=torch.int64)
    assert measure_rows(TOKENS, [[last], [whole], [last]])["w"].touched[0] == 24
    with pytest.raises(ModelError, match=r"^no batch has the shapes \[\[8, 3\]\] of the inputs args_0; the last one has \[\[5, 3\]\]$"):
        measure_rows(TOKENS, [[last]])


@pytest.mark.parametrize("row", [-1, ROWS])
def test_rows_that_are_not_there(row: int) -> None:
    with pytest.raises(ModelError, match=rf"^a batch looks up row {row} of 'w'; expected 0 to 39$"):
        measure_rows(TOKENS, [[torch.full((8, 3), row)]])


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, 4)

    def forward(self, ids: Tensor) -> Tensor:
        rows: Tensor = self.table(ids)
        return rows.square().mean()


def test_example_inputs_are_counted_unless_they_are_placeholders(tmp_path: Path) -> None:
    paths = {name: tmp_path / f"{name}.pt2" for name in ("real", "zeros", "wrong")}
    soap.export(Table(), (torch.arange(24).reshape(8, 3) % 10,), path=paths["real"])
    soap.export(Table(), (torch.zeros(8, 3, dtype=torch.int64),), path=paths["zeros"])
    soap.export(Table(), (torch.arange(24).reshape(8, 3) + ROWS,), path=paths["wrong"], verify=False)
    graphs = {name: soap.load(path, plan_only=True).graph for name, path in paths.items()}
    assert graphs["real"].sparse["table.weight"].touched == (10, 10, 6, 3, 2)
    assert graphs["zeros"].sparse["table.weight"] == uniform(ROWS, graphs["zeros"].sparse["table.weight"].lookups)
    assert graphs["wrong"].sparse == graphs["zeros"].sparse
    assert graphs["real"].hash == graphs["zeros"].hash


@pytest.mark.slow
def test_models_of_the_zoo_are_counted_without_being_allocated() -> None:
    planned, loaded = soap.load("zoo:dlrm:tiny", plan_only=True), soap.load("zoo:dlrm:tiny")
    assert {tensor.device.type for tensor in planned.parameters.values()} == {"meta"}
    assert all(access.measured for access in planned.graph.sparse.values())
    assert planned.graph.sparse == loaded.graph.sparse
