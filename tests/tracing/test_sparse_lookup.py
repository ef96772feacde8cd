"""Tiles that look rows up compute the same from these rows alone as from their whole part of the table."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path

import pytest
import torch

from soap.errors import ModelError
from soap.model.graph import Operator, OperatorGraph
from soap.model.regions import relative, whole
from soap.plan.tiling import Tile, tiles_of
from soap.strategy.classical import random_config
from soap.strategy.config import OpConfig
from soap.tracing.calls import TileContext
from soap.tracing.execute import TracedModel
from soap.tracing.export import export_model
from soap.tracing.load import load_model
from tests.runtime.sparse_modules import ROWS, batch_of, module_of


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TracedModel:
    path = tmp_path_factory.mktemp("models") / "tables.pt2"
    export_model(module_of("tables"), batch_of(6), path=path)
    return loaded(path)


def loaded(path: Path) -> TracedModel:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return load_model(path, dtype="float64")


def look_ups(graph: OperatorGraph) -> list[tuple[int, int]]:
    return sorted({(use.operator, use.parameter) for access in graph.sparse.values() for use in access.lookups})


def inputs_of(model: TracedModel, tile: Tile) -> list[torch.Tensor]:
    known = {**model.constants, **dict(zip(model.input_names, model.example_inputs, strict=True))}
    operands = model.graph.operators[tile.operator].inputs
    return [known[o.tensor][relative(box, whole(known[o.tensor].shape))] for o, box in zip(operands, tile.inputs, strict=True)]


def both_ways(
    model: TracedModel, tile: Tile, place: int, extra: Callable[[int], bool]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Outputs and gradients of the table, from all rows and from those asked for and some others."""
    name = model.graph.operators[tile.operator].parameters[place].tensor
    (start, stop), *columns = tile.parameters[place]
    table = model.parameters[name].detach()[relative(((start, stop), *columns), whole(model.parameters[name].shape))]
    inputs = inputs_of(model, tile)
    asked = model.rows_asked_for(tile, place, inputs, TileContext())
    assert asked.tolist() == sorted(set(asked.tolist()))
    assert all(start <= row < stop for row in asked.tolist())
    rows = torch.tensor([row for row in range(start, stop) if row in set(asked.tolist()) or extra(row)], dtype=torch.int64)
    entire, compact = table.clone().requires_grad_(), table[rows - start].clone().requires_grad_()
    found = model.run_sparse_lookup(tile, inputs, [compact], {place: rows}, TileContext())[0]
    expected = model.run_tile(tile, inputs, [entire], TileContext())[0]
    weights = torch.linspace(-1, 1, expected.numel(), dtype=torch.float64).reshape(expected.shape)
    gradients = [torch.zeros_like(table), torch.zeros_like(table)]
    if expected.numel() and expected.requires_grad:
        gradients[0] = torch.autograd.grad((expected * weights).sum(), entire)[0]
    if found.numel() and found.requires_grad:
        gradients[1][rows - start] = torch.autograd.grad((found * weights).sum(), compact, allow_unused=True, materialize_grads=True)[0]
    return [expected, gradients[0]], [found, gradients[1]]


def test_any_tile_of_any_look_up(model: TracedModel) -> None:
    rng = random.Random(7)
    assert len(look_ups(model.graph)) == 8
    for position, place in look_ups(model.graph):
        for _ in range(12):
            config = random_config(model.graph.operators[position], 4, rng)
            for tile in tiles_of(model.graph, position, config):
                expected, found = both_ways(model, tile, place, lambda row: rng.random() < 0.3)
                for a, b in zip(expected, found, strict=True):
                    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_a_tile_asks_only_for_rows_that_it_looks_up(model: TracedModel) -> None:
    """Bags of the first half of the samples, and of these what lies in one half of the rows."""
    tokens = model.example_inputs[0]
    position = next(p for p, op in enumerate(model.graph.operators) if op.name == "weighted")
    op = model.graph.operators[position]
    intervals = {"b": (0, 3), "v": (0, 12)}
    tile = next(
        tile
        for tile in tiles_of(model.graph, position, config_of(op, {"b": 2, "v": 2}))
        if all(tile.intervals[k] == intervals.get(f.name, (0, f.size)) for k, f in enumerate(op.factors))
    )
    asked = model.rows_asked_for(tile, 0, inputs_of(model, tile), TileContext())
    assert asked.tolist() == sorted({t for t in tokens[:3].flatten().tolist() if t < 12})
    assert len(asked) < len(tokens.unique())


def config_of(op: Operator, degrees: Mapping[str, int]) -> OpConfig:
    parts = tuple(degrees.get(f.name, 1) for f in op.factors)
    return OpConfig(parts, tuple(range(prod(parts))))


def test_one_line_for_a_row_that_is_not_there(tmp_path: Path) -> None:
    export_model(module_of("words"), batch_of(6), path=tmp_path / "words.pt2")
    model = loaded(tmp_path / "words.pt2")
    tokens = model.example_inputs[0].clone()
    tokens[1, 1] = ROWS
    tile = tiles_of(model.graph, 0, config_of(model.graph.operators[0], {}))[0]
    with pytest.raises(ModelError, match=r"looks up row 23 of a table of 23 rows; expected 0 to 22$"):
        model.rows_asked_for(tile, 0, [tokens[:, :3]], TileContext())


def test_what_reads_a_tensor_otherwise_looks_nothing_up(model: TracedModel) -> None:
    position = next(p for p, op in enumerate(model.graph.operators) if op.name == "head")
    tile = tiles_of(model.graph, position, config_of(model.graph.operators[position], {}))[0]
    with pytest.raises(ModelError, match="is not looked up"):
        model.rows_asked_for(tile, 0, [None] * len(tile.inputs), TileContext())

