"""Which gradients autograd takes as they are, and which results lie row by row: found without values, true with values."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import product

import pytest
import torch
from torch import Tensor, nn

from soap.model.graph import Operator, OperatorGraph
from soap.model.regions import relative, volume, whole
from soap.plan.tiling import Tile, tiles_of
from soap.simulator.memory.footprint import shares_of
from soap.strategy.config import OpConfig
from soap.tracing.calls import TileContext
from soap.tracing.execute import TracedModel, given
from soap.tracing.importer import import_program
from soap.tracing.load import load_model
from tests.extent import often, so_many
from tests.processor import needs_lstm_under_autocast
from tests.tracing.emulation import random_degrees


def taken(leaf: Tensor, seen: dict[int, int], place: int) -> None:
    """Note where the gradient lies that autograd brings to a leaf. No reference to it stays."""
    leaf.register_hook(lambda gradient: seen.update({place: gradient.data_ptr()}))  # type: ignore[no-untyped-call]


def really_in_rows(model: TracedModel, op: Operator, tile: Tile, regions: list[Tensor], context: TileContext) -> dict[int, bool]:
    """Of each output, by its place, whether it lies row by row; of each parameter, and each input that lies row by row, that gets a
    gradient from a tile, whether the leaf has that gradient itself, in memory of its own."""
    first, seen = len(op.inputs), dict[int, int]()
    for place in range(len(regions)):
        if regions[place].requires_grad and (place >= first or regions[place].is_contiguous()):
            taken(regions[place], seen, place)
    made = model.run_tile(tile, regions[:first], regions[first:], context)
    found = {place: own.is_contiguous() for place, own in enumerate(made, len(regions))}
    results = [own for own in made if own.requires_grad]
    del made
    if not results:
        return found
    gradients = [torch.ones_like(own, requires_grad=False) for own in results]
    root = given(gradients, results)
    results.clear()
    torch.autograd.backward(root)
    for place, before in seen.items():
        gradient = regions[place].grad
        assert gradient is not None
        found[place] = gradient.data_ptr() == before and gradient.untyped_storage().nbytes() == gradient.nbytes
    return found


def compared(model: TracedModel, seed: int) -> Iterator[tuple[Operator, Tile, dict[int, bool], frozenset[int]]]:
    """(operator, tile, what really lies row by row, what is predicted to) of each tile of the whole operators, and of random cuts of them;
    on inputs as others have made them, and on copies, as those that come from other devices are."""
    graph, draw = model.graph, random.Random(seed)
    tensors = {**dict(zip(model.input_names, model.example_inputs, strict=True)), **model.constants, **model.parameters}
    context = TileContext(0, 0, {n: b.clone() for n, b in model.buffers.items()}, update_buffers=False)
    for position, op in enumerate(graph.operators):
        uncut = OpConfig((1,) * len(op.factors), (0,))
        for config in (uncut, random_degrees(op, draw)):
            for tile, copied in product(tiles_of(graph, position, config), (False, True)):
                if all(volume(box) for box in (*tile.inputs, *tile.parameters, *tile.outputs)):
                    really = really_in_rows(model, op, tile, _regions(graph, op, tile, tensors, copied), context)
                    yield op, tile, really, shares_of(graph, op, tile.intervals).in_rows
        (tile,) = tiles_of(graph, position, uncut)
        with torch.no_grad():
            regions = _regions(graph, op, tile, tensors, False)
            results = model.run_tile(tile, regions[: len(op.inputs)], regions[len(op.inputs) :], context)
        tensors.update(zip((o.tensor for o in op.outputs), results, strict=True))


def _regions(graph: OperatorGraph, op: Operator, tile: Tile, tensors: dict[str, Tensor], copied: bool) -> list[Tensor]:
    """What a tile reads, as leaves. Those of parameters lie row by row; inputs do if they are ``copied``."""
    found = []
    for place, (o, box) in enumerate(zip((*op.inputs, *op.parameters), (*tile.inputs, *tile.parameters), strict=True)):
        region = tensors[o.tensor].detach()[relative(box, whole(graph.tensors[o.tensor].shape))]
        region = region.clone(memory_format=torch.contiguous_format) if copied or place >= len(op.inputs) else region
        found.append(region.requires_grad_(graph.tensors[o.tensor].requires_grad))
    return found


ZOO = ["alexnet", "gpt", "resnet50", "dlrm", "inception_v3", "rnnlm", "nmt"]
WITH_LSTM = ("rnnlm", "nmt")


@pytest.mark.parametrize("autocast", [None, "bfloat16"])
@pytest.mark.parametrize("name", often(ZOO, ["gpt", "rnnlm", "alexnet"], pytest.mark.slow))
def test_what_is_predicted_to_lie_in_rows_does(name: str, autocast: str | None) -> None:
    if autocast and name in WITH_LSTM:
        needs_lstm_under_autocast(torch.bfloat16)
    model = load_model(f"zoo:{name}:tiny", autocast=autocast)
    for seed in range(so_many(1, 8)):
        for op, tile, really, predicted in compared(model, seed):
            assert predicted.isdisjoint(place for place, own in really.items() if not own), (seed, op.name, tile.intervals)


class Mixed(nn.Module):
    """Weights whose gradients autograd makes in different ways."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Linear(8, 6)
        self.as_read = nn.Parameter(torch.randn(6, 4))
        self.heads = nn.Parameter(torch.randn(4, 2, 3))
        self.offset = nn.Parameter(torch.randn(5, 2, 3))
        self.doubled = nn.Parameter(torch.randn(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.plain(x) @ self.as_read
        x = torch.einsum("sd,dhe->she", x, self.heads) + self.offset
        return (x @ (self.doubled + self.doubled.t())).square().sum()


def test_by_hand() -> None:
    """(taken with values, predicted). A sum with its own transpose gives two gradients. That of offsets is the gradient of what they are
    added to as well: autograd takes it if it comes to the other one first, which is not relied on."""
    model = import_program(torch.export.export(Mixed(), (torch.randn(5, 8),)), name="mixed")
    found = {}
    for op, tile, really, predicted in compared(model, 0):
        if all(span == (0, factor.size) for span, factor in zip(tile.intervals, op.factors, strict=True)):
            names = {place: o.tensor for place, o in enumerate((*op.inputs, *op.parameters)) if place in really and o in op.parameters}
            found.update({name: (really[place], place in predicted) for place, name in names.items()})
    stolen = dict.fromkeys(("plain.weight", "plain.bias", "as_read", "heads"), (True, True))
    assert found == {**stolen, "doubled": (False, False), "offset": (True, False)}
