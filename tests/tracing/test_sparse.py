"""Which parameters are found to be sparse, from how they are used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from soap.model.graph import OperatorGraph
from tests.tracing.programs import Lambda, imported

ROWS, WIDTH = 50, 4
IDS = torch.arange(18).reshape(6, 3)
Use = Callable[..., Any]


def graph_of(use: Use, *inputs: Tensor, **members: Any) -> OperatorGraph:
    """The graph of a model with a table ``w`` of 50 rows and a bias ``b`` of 50 numbers, which ``use`` turns into a tensor."""
    members = {"w": nn.Parameter(torch.randn(ROWS, WIDTH)), "b": nn.Parameter(torch.randn(ROWS)), **members}
    return imported(Lambda(lambda self, *args: use(self, *args).square().mean(), **members), *(inputs or (IDS,))).graph


def found(graph: OperatorGraph) -> dict[str, int]:
    """Sparse parameters, and how many rows a batch looks up in each."""
    return {name: access.indices for name, access in graph.sparse.items()}


LOOKS_UP: dict[str, tuple[Use, dict[str, int]]] = {
    "embedding": (lambda self, ids: F.embedding(ids, self.w), {"w": 18}),
    "embedding with padding": (lambda self, ids: F.embedding(ids, self.w, padding_idx=0), {"w": 18}),
    "bags of equal size": (lambda self, ids: F.embedding_bag(ids, self.w), {"w": 18}),
    "bags with offsets": (lambda self, ids: F.embedding_bag(ids.flatten(), self.w, torch.tensor([0, 2, 9]), mode="max"), {"w": 18}),
    "index of rows": (lambda self, ids: self.w[ids], {"w": 18}),
    "index of numbers": (lambda self, ids: self.b[ids], {"b": 18}),
    "index_select": (lambda self, ids: torch.index_select(self.w, 0, ids[:, 1]), {"w": 6}),
    "gather on rows": (lambda self, ids: torch.gather(self.w, 0, ids), {"w": 18}),
    "by sums with constants": (lambda self, ids: F.embedding(ids + torch.arange(3) * 10, self.w), {"w": 18}),
    "two tables": (lambda self, ids: F.embedding(ids, self.w) + self.b[ids].unsqueeze(-1), {"w": 18, "b": 18}),
    "used twice": (lambda self, ids: F.embedding(ids, self.w).sum(1) + F.embedding(ids[:, 0], self.w), {"w": 18 + 6}),
    "by hashes of inputs": (lambda self, ids: F.embedding((ids * 7 + 3) % ROWS, self.w), {"w": 18}),
    "behind views of the indices": (lambda self, ids: F.embedding(ids.t().reshape(-1)[:9], self.w), {"w": 9}),
}


@pytest.mark.parametrize("name", LOOKS_UP)
def test_look_ups_are_sparse(name: str) -> None:
    use, expected = LOOKS_UP[name]
    assert found(graph_of(use)) == expected


DENSE: dict[str, Use] = {
    "rows that never change": lambda self, ids: F.embedding(torch.arange(3), self.w) * ids.unsqueeze(-1),
    "plainly": lambda self, ids: self.w * ids.sum(),
    "tied softmax": lambda self, ids: F.embedding(ids, self.w) @ self.w.t(),
    "frozen": lambda self, ids: F.embedding(ids, self.w.detach()) * self.b.sum(),
    "of columns": lambda self, ids: torch.index_select(self.w, 1, ids[0].clamp(max=WIDTH - 1)),
    "gather on columns": lambda self, ids: torch.gather(self.w[:6], 1, ids.clamp(max=WIDTH - 1)),
    "of a transposed table": lambda self, ids: self.w.t()[ids[0].clamp(max=WIDTH - 1)],
    "of a computed table": lambda self, ids: F.embedding(ids, self.w.sin()),
    "of rows and columns": lambda self, ids: self.w[ids, ids.clamp(max=WIDTH - 1)],
    "by indices that are computed": lambda self, ids: F.embedding(torch.argmax(ids @ torch.ones(3, 5, dtype=ids.dtype), 1), self.w),
    "also decayed in the loss": lambda self, ids: F.embedding(ids, self.w).sum() + self.w.square().sum(),
}


@pytest.mark.parametrize("name", DENSE)
def test_all_else_is_dense(name: str) -> None:
    graph = graph_of(DENSE[name])
    assert found(graph) == {}


def test_frozen_tables_are_dense() -> None:
    frozen = nn.Parameter(torch.randn(ROWS, WIDTH), requires_grad=False)
    graph = graph_of(lambda self, ids: F.embedding(ids, self.w) * self.b.sum(), w=frozen)
    assert "w" in {tensor.name for tensor in graph.parameters}
    assert found(graph) == {}


def test_a_table_of_two_names_is_one() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Embedding(ROWS, WIDTH), nn.Embedding(ROWS, WIDTH)
            self.b.weight = self.a.weight

        def forward(self, ids: Tensor) -> Tensor:
            rows: Tensor = self.a(ids) - self.b(ids)[:, :1]
            return rows.square().mean()

    graph = imported(Tied(), IDS).graph
    assert dict(graph.aliases) == {"b.weight": "a.weight"}
    assert found(graph) == {"a.weight": 18 + 18}


def test_where_the_indices_come_from() -> None:
    """The operator's inputs behind the indices; weights of samples are none of them."""
    graph = graph_of(lambda self, ids, weights: F.embedding_bag(ids, self.w, per_sample_weights=weights, mode="sum"), IDS, torch.rand(6, 3))
    (lookup,) = graph.sparse["w"].lookups
    op = graph.operators[lookup.operator]
    assert op.parameters[lookup.parameter].tensor == "w"
    inputs = {op.inputs[place].tensor for place in lookup.inputs}
    assert inputs == {name for name in graph.tensors if graph.tensors[name].kind == "input" and graph.tensors[name].dtype == "int64"}


def test_what_is_sparse_is_no_part_of_the_identity() -> None:
    graph = graph_of(LOOKS_UP["embedding"][0])
    assert graph.sparse
    assert replace(graph, sparse={}).hash == graph.hash


@pytest.mark.parametrize(
    ("use", "kind"),
    [
        (lambda self, ids: F.embedding_bag(ids, self.w, mode="sum"), "equal_bags"),
        (lambda self, ids: F.embedding_bag(ids.flatten(), self.w, torch.arange(0, 18, 3), mode="sum"), "equal_bags"),
        (lambda self, ids: F.embedding_bag(ids.flatten(), self.w, torch.arange(0, 18, 6), mode="sum"), "embedding_bag"),
        (lambda self, ids: F.embedding_bag(ids[0], self.w, torch.arange(0, 3, 1), mode="sum"), "embedding_bag"),
    ],
)
def test_bags_of_equally_many_rows_may_be_split_by_samples(use: Use, kind: str) -> None:
    (op,) = [op for op in graph_of(use).operators if "bag" in op.kind]
    assert op.kind == kind
    assert ("sample" in {factor.kind for factor in op.factors}) == (kind == "equal_bags")
