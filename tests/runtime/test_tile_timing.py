"""Tiles are timed as they are trained: with the gradients that a step wants, on operands that the model makes, in memory of their own, and
on a CPU one after the other as in a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import pytest
import torch

from soap.measure import tile_timing
from soap.measure.tile_timing import TOGETHER, TileTimer, TileTimes
from soap.model.graph import TensorKind
from soap.plan.tiling import Tile, tiles_of, whole_tile
from soap.strategy.config import OpConfig
from soap.tracing.calls import TileContext
from soap.tracing.execute import TracedModel
from tests.extent import often
from tests.runtime.traced import traced

CPU = torch.device("cpu")


def parts(model: TracedModel, name: str, **degrees: int) -> list[Tile]:
    position = model.graph.index[name]
    own = tuple(degrees.get(factor.name, 1) for factor in model.graph.operators[position].factors)
    return tiles_of(model.graph, position, OpConfig(own, (0,) * prod(own)))


def timed(timer: TileTimer, tile: Tile, most_seconds: float = 0.0) -> TileTimes:
    (times,) = timer.time_in_turns([tile], most_seconds)
    return times


class Watched:
    """A model that notes what its tiles are given."""

    def __init__(self, model: TracedModel) -> None:
        self._model = model
        self.seen: list[tuple[Tile, list[torch.Tensor], list[torch.Tensor], tuple[torch.Tensor, ...], TileContext]] = []
        self.sparse_lookup: list[tuple[list[torch.Tensor], list[torch.Tensor], dict[int, torch.Tensor], tuple[torch.Tensor, ...]]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def run_tile(
        self, tile: Tile, inputs: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor], context: TileContext
    ) -> tuple[torch.Tensor, ...]:
        outputs = self._model.run_tile(tile, inputs, parameters, context)
        self.seen.append((tile, list(inputs), list(parameters), outputs, context))
        return outputs


    def run_sparse_lookup(
        self,
        tile: Tile,
        inputs: Sequence[torch.Tensor],
        parameters: Sequence[torch.Tensor],
        rows: Mapping[int, torch.Tensor],
        context: TileContext,
    ) -> tuple[torch.Tensor, ...]:
        outputs = self._model.run_sparse_lookup(tile, inputs, parameters, rows, context)
        self.sparse_lookup.append((list(inputs), list(parameters), dict(rows), outputs))
        return outputs


SPECS = ["zoo:gpt:tiny", "zoo:dlrm:tiny", "zoo:rnnlm:tiny", "zoo:resnet50:tiny"]


@pytest.mark.parametrize("spec", often(SPECS, SPECS[:2], pytest.mark.slow))
def test_every_operator_of_a_model_can_be_timed(spec: str) -> None:
    model = traced(spec, "float32")
    timer = TileTimer(model, CPU)
    positions = range(len(model.graph.operators))
    groups = timer.groups([whole_tile(model.graph, position) for position in positions])
    found = [times for group in groups for times in timer.time_in_turns(group, 0.0)]
    for position, op, times in zip(positions, model.graph.operators, found, strict=True):
        assert timer.time_copies(whole_tile(model.graph, position), 0.0).backward is None or times.backward is not None
        assert times.forward.ns > 0 and times.forward.repetitions >= 2
        nothing = op.kind == "batch_norm_statistics"  # nobody reads those of a batch in one piece
        assert (times.backward is not None) == (position in model.graph.backward_operators and not nothing), op.name
        assert times.backward is None or times.backward.ns > 0


def test_operands_are_those_of_training() -> None:
    watched = Watched(traced("zoo:gpt:tiny", "float32"))
    graph = watched.graph
    timer = TileTimer(watched, CPU)  # type: ignore[arg-type]
    values = {operand.tensor: made for tile, _, _, outputs, _ in watched.seen for operand, made in zip(
        graph.operators[tile.operator].outputs, outputs, strict=True)}  # fmt: skip
    watched.seen.clear()
    tile = parts(watched._model, "blocks.0.up", b=2, n=2)[3]
    timed(timer, tile)
    op = graph.operators[tile.operator]
    for ran, inputs, parameters, outputs, _ in watched.seen:
        assert ran == tile
        (rows, times, inner), given = tile.inputs[0], inputs[0]
        assert torch.equal(given.detach(), values[op.inputs[0].tensor][slice(*rows), slice(*times), slice(*inner)])
        assert given.requires_grad and given.is_leaf and all(p.requires_grad and p.is_leaf for p in parameters)
        assert [tuple(p.shape) for p in parameters] == [tuple(b - a for a, b in box) for box in tile.parameters]
        assert outputs[0].requires_grad


def test_copies_have_memory_of_their_own_as_much_as_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tile_timing, "RUN_SECONDS", 1000.0)
    monkeypatch.setattr(tile_timing, "MOST_COPIES", 30)
    watched = Watched(traced("zoo:gpt:tiny", "float32"))
    timer = TileTimer(watched, CPU)  # type: ignore[arg-type]
    held = sum(tensor.numel() * tensor.element_size() for tensor in timer.operands._values.values())
    assert held == timer.operands.bytes
    counts = []
    for name in ("blocks.0.add", "head"):
        (tile,) = parts(watched._model, name)
        op = watched.graph.operators[tile.operator]
        own = sum(watched.graph.tensors[operand.tensor].bytes for operand in (*op.inputs, *op.parameters, *op.outputs))
        watched.seen.clear()
        timer.time_copies(tile, 0.05)
        places = {inputs[0].data_ptr() for _, inputs, _, _, _ in watched.seen}
        counts.append(len(places))
        assert len(places) == min(30, held // own)
    assert counts[0] > counts[1] > 1


def test_tiles_take_turns_forward_and_then_backward_from_the_last() -> None:
    watched = Watched(traced("zoo:gpt:tiny", "float32"))
    timer = TileTimer(watched, CPU)  # type: ignore[arg-type]
    tiles = [parts(watched._model, name)[0] for name in ("blocks.0.up", "blocks.0.add", "head")]
    watched.seen.clear()
    turns, order = [timer._prepare(tile) for tile in tiles], []
    for number, turn in enumerate(turns):
        leaf = next(tensor for tensor in turn.inputs if tensor.requires_grad)
        leaf.register_post_accumulate_grad_hook(lambda _, number=number: order.append(number))  # type: ignore[misc]
    for _ in range(2):
        times = timer._round(turns)
        assert len(times) == 6 and all(ns > 0 for ns in times)
    assert [tile for tile, *_ in watched.seen] == tiles * 2 and order == [2, 1, 0] * 2
    for turn in turns:
        for tensor in (*turn.inputs, *turn.parameters):
            assert not tensor.requires_grad or tensor.grad is not None
    first = turns[0].inputs[0].detach().clone()
    timer._round(turns)
    assert torch.equal(first, turns[0].inputs[0].detach())


def test_groups_have_no_more_tiles_than_take_turns_and_no_more_bytes_than_the_model() -> None:
    model = traced("zoo:gpt:tiny", "float32")
    timer = TileTimer(model, CPU)
    tiles = [whole_tile(model.graph, position) for position in range(len(model.graph.operators))] * 2
    groups = timer.groups(tiles)
    assert [tile for group in groups for tile in group] == tiles
    sizes = [sum(timer.operands.bytes_of(tile) for tile in group) for group in groups]
    assert all(1 <= len(group) <= TOGETHER for group in groups) and max(map(len, groups)) == TOGETHER
    assert all(size <= timer.operands.bytes or len(group) == 1 for size, group in zip(sizes, groups, strict=True))
    for size, group, after in zip(sizes, groups, groups[1:], strict=False):
        assert len(group) == TOGETHER or size + timer.operands.bytes_of(after[0]) > timer.operands.bytes
    assert timer.groups([]) == []


def test_an_input_of_the_model_gets_no_gradient_and_indices_are_in_range() -> None:
    watched = Watched(traced("zoo:dlrm:tiny", "float32"))
    timer = TileTimer(watched, CPU)  # type: ignore[arg-type]
    watched.seen.clear()
    for position, op in enumerate(watched.graph.operators):
        timed(timer, whole_tile(watched.graph, position))
        for _, inputs, _, _, _ in watched.seen:
            for operand, tensor in zip(op.inputs, inputs, strict=True):
                kind = watched.graph.tensors[operand.tensor].kind
                assert not tensor.requires_grad or kind is TensorKind.ACTIVATION
        watched.seen.clear()


@pytest.mark.parametrize("spec", ["zoo:rnnlm:tiny", "zoo:dlrm:tiny"])
@pytest.mark.parametrize("degrees", [{}, {"v": 2, "d": 2}])
def test_a_tile_on_rows_runs_on_what_it_takes_out_of_the_table(spec: str, degrees: dict[str, int]) -> None:
    watched = Watched(traced(spec, "float32"))
    timer = TileTimer(watched, CPU)  # type: ignore[arg-type]
    name, access = next(iter(watched.graph.sparse.items()))
    position, place = access.lookups[0].operator, access.lookups[0].parameter
    op = watched.graph.operators[position]
    assert {"v", "d"} <= {factor.name for factor in op.factors}
    *_, tile = parts(watched._model, op.name, **degrees)
    (usual,) = watched._model.run_tile(tile, *timer.operands.copy(tile, {}), TileContext())
    watched.seen.clear()
    times = timed(timer, replace(tile, sparse_lookup=True))
    assert times.forward.ns > 0 and times.backward is not None and times.backward.ns > 0
    assert watched.seen == [] and len(watched.sparse_lookup) > 1
    region = watched.parameters[name][tuple(slice(*interval) for interval in tile.parameters[place])]
    for _, parameters, rows, (output,) in watched.sparse_lookup:
        assert torch.equal(parameters[place].detach(), region[rows[place] - tile.parameters[place][0][0]])
        assert parameters[place].is_leaf and parameters[place].grad is not None
        assert parameters[place].grad.shape == parameters[place].shape and len(rows[place]) < len(watched.parameters[name])
        assert torch.equal(output.detach(), usual.detach())
    places = {parameters[place].data_ptr() for _, parameters, _, _ in watched.sparse_lookup}
    assert len(places) > 1


def test_copies_on_rows_share_the_table() -> None:
    model = traced("zoo:rnnlm:tiny", "float32")
    timer = TileTimer(model, CPU)
    name, access = next(iter(model.graph.sparse.items()))
    tile = replace(whole_tile(model.graph, access.lookups[0].operator), sparse_lookup=True)
    tables = timer.operands.sparse_tables(tile)
    copies = [timer.operands.copy(tile, tables)[1][access.lookups[0].parameter] for _ in range(2)]
    assert {copy.data_ptr() for copy in copies} == {timer.operands._values[name].data_ptr()}
    assert timer.operands.sparse_tables(replace(tile, sparse_lookup=False)) == {}


@pytest.mark.slow
def test_statistics_that_nobody_reads_are_not_made() -> None:
    watched = Watched(traced("zoo:resnet50:tiny", "float32"))
    timer = TileTimer(watched, CPU)  # type: ignore[arg-type]
    name = "stem.norm.batch_norm_statistics"
    for degrees, unread in (({}, True), ({"b": 2}, False)):
        watched.seen.clear()
        timed(timer, parts(watched._model, name, **degrees)[0])
        assert {bool(context.unread) for *_, context in watched.seen} == {unread}


def test_a_region_keeps_the_order_of_its_dimensions_in_memory() -> None:
    whole = torch.arange(2 * 3 * 4).reshape(2, 3, 4).permute(1, 2, 0)
    copy = tile_timing._dense(whole[1:3, :2], whole)
    assert torch.equal(copy, whole[1:3, :2])
    assert copy.stride() == (2, 1, 4) and copy.data_ptr() != whole.data_ptr()


@pytest.mark.slow
def test_timing_changes_nothing_of_the_model() -> None:
    model = traced("zoo:resnet50:tiny", "float32")
    before = {name: tensor.clone() for name, tensor in {**model.parameters, **model.buffers}.items()}
    timer = TileTimer(model, CPU)
    for position in range(6):
        timed(timer, whole_tile(model.graph, position))
    after = {**model.parameters, **model.buffers}
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(tensor.grad is None for tensor in model.parameters.values())
