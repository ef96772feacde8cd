"""How many random numbers a tile draws is what its operator says, from which its cost follows."""

from __future__ import annotations

from math import prod
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from soap.api import export
from soap.measure.tile_timing import TileOperands
from soap.plan.tiling import tiles_of
from soap.strategy.config import OpConfig
from soap.tracing.execute import TracedModel
from soap.tracing.load import load_model


class Dropping(nn.Module):
    """Masks before and behind a product, of channels, of attention's weights, and numbers that are drawn for a whole tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 6), nn.Linear(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.down(F.dropout(self.up(F.dropout(x, 0.5)), 0.5))
        x = F.dropout1d(x, 0.5) + torch.rand_like(x)
        heads = x.unflatten(2, (2, 4)).transpose(1, 2)
        attended = F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.5)
        return F.rrelu(attended, training=True).sum()


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 6, num_layers=3, dropout=0.5)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.lstm(x)[0]
        return found.square().mean()


def loaded(net: nn.Module, shape: tuple[int, ...], folder: Path) -> TracedModel:
    export(net, (torch.randn(shape),), path=folder / "m.pt2", verify=False)
    return load_model(str(folder / "m.pt2"))


@pytest.fixture
def numbers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many are drawn, call by call."""
    found: list[int] = []
    mask, uniform = Tensor.bernoulli_, torch.rand

    def counted(*args: object, **options: object) -> Tensor:
        drawn: Tensor = mask(*args, **options)  # type: ignore[arg-type]
        found.append(drawn.numel())
        return drawn

    def counted_uniform(*args: object, **options: object) -> Tensor:
        drawn: Tensor = uniform(*args, **options)  # type: ignore[call-overload]
        found.append(drawn.numel())
        return drawn

    monkeypatch.setattr(Tensor, "bernoulli_", counted)
    monkeypatch.setattr(torch, "rand", counted_uniform)
    return found


@pytest.mark.parametrize(("net", "shape"), [(Dropping(), (11, 3, 8)), (Layers(), (5, 4, 4))], ids=["masks", "layers"])
def test_tiles_draw_what_their_operators_say(net: nn.Module, shape: tuple[int, ...], tmp_path: Path, numbers: list[int]) -> None:
    model = loaded(net, shape, tmp_path)
    operands = TileOperands(model, torch.device("cpu"))
    drawing = [position for position, op in enumerate(model.graph.operators) if op.drawn]
    assert drawing and sum(len(model.graph.operators[position].drawn) for position in drawing) >= (5 if shape[0] == 11 else 1)
    for position in drawing:
        op = model.graph.operators[position]
        for cut in range(-1, len(op.factors)):
            degrees = tuple(min(2, factor.size) if number == cut else 1 for number, factor in enumerate(op.factors))
            for tile in tiles_of(model.graph, position, OpConfig(degrees, tuple(range(prod(degrees))))):
                numbers.clear()
                model.run_tile(tile, *operands.copy(tile, operands.sparse_tables(tile)), operands.context(tile))
                at_once = sum(own.count for own, call in zip(op.drawn, drawn_calls(op.calls), strict=True) if call.startswith("rand"))
                assert sum(numbers) + at_once == sum(own.by(tile.intervals) for own in op.drawn), (op.name, degrees)


def drawn_calls(calls: tuple[str, ...]) -> list[str]:
    """Names of those that draw."""
    return [call for call in calls if call.startswith(("dropout", "feature_dropout", "scaled_dot", "rand", "rrelu", "lstm"))]


def test_outside_of_training_nothing_is_drawn(tmp_path: Path) -> None:
    class Kept(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(F.dropout(self.first(x), 0.5, training=False), 0.0).sum()

    graph = loaded(Kept(), (8, 4), tmp_path).graph
    assert [op.drawn for op in graph.operators if op.drawn] == []
