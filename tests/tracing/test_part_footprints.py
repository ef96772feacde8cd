"""What tiles of convolutions take, however they are cut, is never more than what is predicted: drawn tiles, run without values."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import prod
from statistics import median

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from soap.model.graph import Footprint, Operator, OperatorGraph
from soap.plan.tiling import Tile, tiles_of, windows
from soap.simulator.memory.footprint import kept_share, shares_of
from soap.simulator.memory.sizes import padded_bytes
from soap.strategy.config import OpConfig
from soap.tracing.calls import TileContext
from soap.tracing.execute import TracedModel
from soap.tracing.footprints import LITTLE, _Trials
from soap.tracing.importer import import_program
from tests.extent import rows_often, so_many

WAYS = ("float32", "bfloat16", "autocast")
TILES = so_many(4, 12)
MOST_OVER = 1.2


class Convolved(torch.nn.Module):
    """A convolution of what another one has made."""

    def __init__(self, first: torch.nn.Module, second: torch.nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)).float().square().sum()


@dataclass(frozen=True)
class Taken:
    """Bytes that a tile holds: between its passes, and during each of them."""

    kept: int
    forward: int
    backward: int


def drawn(seed: int, way: str, *, transposed: bool) -> TracedModel:
    """A convolution of one, two or three dimensions."""
    draw = random.Random(f"{seed} {transposed}")
    rank, groups, kernel = draw.choice((1, 2, 2, 2, 3)), draw.choice((1, 1, 1, 2)), draw.choice((1, 3, 3, 5))
    inside, outside, stride = groups * draw.choice((2, 4, 16)), groups * draw.choice((2, 8)), draw.choice((1, 2, 3))
    padding, size = draw.randint(0, kernel // 2), draw.choice((6, 9, 16) if rank < 3 else (5, 8))
    plain = (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)[rank - 1]
    spread = (torch.nn.ConvTranspose1d, torch.nn.ConvTranspose2d, torch.nn.ConvTranspose3d)[rank - 1]
    kind = spread if transposed else plain
    second = kind(inside, outside, kernel, stride=stride, padding=padding, groups=groups, bias=draw.random() < 0.5)
    module = Convolved(plain(3, inside, 1), second)
    with torch.device("meta"):
        images = torch.empty(draw.choice((2, 8)), 3, *[size] * rank)
    exported = torch.export.export(module, (torch.zeros(images.shape),))
    types = {"bfloat16": {"dtype": torch.bfloat16}, "autocast": {"autocast": torch.bfloat16}}.get(way, {})
    return import_program(exported, name="convolved", **types)  # type: ignore[arg-type]


def tiles(graph: OperatorGraph, position: int, seed: int) -> Iterator[Tile]:
    """Some tile of each of several cuts."""
    draw = random.Random(seed)
    for _ in range(TILES):
        degrees = tuple(min(f.size, draw.choice((1, 1, 2, 3, 4))) for f in graph.operators[position].factors)
        yield draw.choice(tiles_of(graph, position, OpConfig(degrees, (0,) * prod(degrees))))


def operand_bytes(graph: OperatorGraph, op: Operator, tile: Tile, places: frozenset[int]) -> int:
    """Of the operands that a tile keeps."""
    operands = [*zip((*op.inputs, *op.parameters, *op.outputs), (*tile.inputs, *tile.parameters, *tile.outputs), strict=True)]
    sizes = [prod(stop - start for start, stop in box) * graph.tensors[operand.tensor].itemsize for operand, box in operands]
    return sum(size for place, size in enumerate(sizes) if place in places)


def predicted(graph: OperatorGraph, op: Operator, tile: Tile) -> Taken:
    padded = sum(padded_bytes(graph, op, k, tile.inputs[k], tile.intervals) for k in windows(op))
    own = shares_of(graph, op, tile.intervals)
    kept = own.kept + padded
    assert own.keeps is not None
    return Taken(kept + operand_bytes(graph, op, tile, own.keeps), kept + own.forward, kept + own.backward + padded)


def found(graph: OperatorGraph, op: Operator, tile: Tile, own: Footprint) -> Taken:
    kept = own.kept_bytes
    return Taken(kept + operand_bytes(graph, op, tile, own.keeps), kept + own.forward_bytes, kept + own.backward_bytes)


@pytest.mark.slow
@pytest.mark.parametrize(("way", "transposed"), rows_often([*product(WAYS, (False, True))], [("float32", False), ("bfloat16", True)]))
def test_no_tile_takes_more_than_is_predicted(way: str, transposed: bool) -> None:
    """But for what is too little to be looked into."""
    ratios: dict[bool, list[float]] = {False: [], True: []}
    for seed in range(so_many(2, 24)):
        model = drawn(seed, way, transposed=transposed)
        graph = model.graph
        position = graph.index["second"]
        op = graph.operators[position]
        little = sum(graph.tensors[o.tensor].bytes for o in (*op.inputs, *op.parameters, *op.outputs)) // LITTLE
        with FakeTensorMode(allow_non_fake_inputs=True):
            tensors = {name: torch.empty(t.shape, dtype=getattr(torch, t.dtype)) for name, t in graph.tensors.items()}
            trials = _Trials(model, position, tensors, TileContext(0, 0, {}, update_buffers=False))
            for tile in tiles(graph, position, seed):
                own, expected = found(graph, op, tile, trials._footprint(tile, cut=True)), predicted(graph, op, tile)
                case = seed, op.factors, tile.intervals, own, expected
                assert own.kept <= expected.kept + little, case
                assert own.forward <= expected.forward + little and own.backward <= expected.backward + little, case
                summed = any(f.summed and span != (0, f.size) for f, span in zip(op.factors, tile.intervals, strict=True))
                ratios[summed].append(expected.kept / max(1, own.kept))
    assert median(ratios[False]) <= MOST_OVER, ratios


@pytest.mark.slow
def test_strided_tiles_keep_wide_copies_of_image_and_weight() -> None:
    """By hand: 4 bytes for each element of what a tile reads, padding included, and of the weight; not of a tile with all of both. Between
    the lengths that were tried some more: a side that is nearly whole counts as whole where the other one is small."""
    module = Convolved(torch.nn.Conv2d(3, 8, 1), torch.nn.Conv2d(8, 6, 3, stride=2, padding=1, bias=False))
    graph = import_program(torch.export.export(module, (torch.zeros(4, 3, 16, 16),)), name="strided", dtype=torch.bfloat16).graph
    op = graph.operators[graph.index["second"]]
    names = [factor.name for factor in op.factors]

    def kept(**cut: int) -> int:
        return kept_share(graph, op, [(0, f.size // cut.get(name, 1)) for name, f in zip(names, op.factors, strict=True)])

    weight = 6 * 8 * 9
    assert kept() == kept(b=2) == 0
    for samples, rows, columns, outputs in product((1, 2, 4), (2, 4), (1, 2, 4), (1, 2)):
        image = 4 // samples * 8 * (2 * 8 // rows + 1) * (2 * 8 // columns + 1)
        assert 0 <= kept(b=samples, h=rows, w=columns, o=outputs) - 4 * (image + weight // outputs) <= 0.25 * 4 * image
    assert kept(o=2) == 4 * (4 * 8 * 16 * 16 + weight // 2)
