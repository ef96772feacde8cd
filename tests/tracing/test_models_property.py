"""Random small models under random degrees: loss and gradients by tiles are the whole program's."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.extent import FEW
from tests.tracing.emulation import compare, draw_configs
from tests.tracing.programs import imported

Layer = Callable[[Tensor], Tensor]
BATCH, STEPS, WIDTH = 6, 4, 8


class Attention(nn.Module):
    def __init__(self, heads: int, causal: bool, dropout: float) -> None:
        super().__init__()
        self.heads, self.causal, self.dropout = heads, causal, dropout
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, dropout_p=self.dropout)
        return self.out(y.transpose(1, 2).flatten(2))


class Channels(nn.Module):
    """A layer over (batch, width, steps)."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.transpose(1, 2)).transpose(1, 2)


class View(nn.Module):
    """Moves of elements that give the shape back."""

    def __init__(self, kind: int) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        match self.kind:
            case 0:
                return x.reshape(BATCH * STEPS, WIDTH).relu().view(BATCH, STEPS, WIDTH)
            case 1:
                return torch.cat([x[..., 3:], x[..., :3].tanh()], -1)
            case 2:
                return F.pad(x[:, 1:], (0, 0, 0, 1)) * 2
            case 3:
                return torch.stack(x.unbind(1)[::-1], 1)
            case 4:
                return x.unflatten(-1, (2, -1)).permute(0, 1, 3, 2).flatten(2)
            case _:
                return torch.where(x > 0, x, x.mean((1, 2), keepdim=True)).tril()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)[0]


class Net(nn.Module):
    """Layers, each of which reads an earlier value, sometimes adds another, and may be an earlier layer again."""

    def __init__(self, moves: list[tuple[int, int, int]], ids: bool, loss: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.moves, self.loss = moves, loss
        self.table = nn.Embedding(11, WIDTH, padding_idx=0) if ids else None
        self.layers = nn.ModuleList()
        self.plan: list[tuple[int, int, int]] = []
        for kind, source, extra in moves:
            if kind == 0 and len(self.layers):
                number = extra % len(self.layers)  # shared parameters
            else:
                number = len(self.layers)
                self.layers.append(_layer(kind, extra))
            self.plan.append((number, source, extra))
        self.head = nn.Linear(WIDTH, 11, bias=False)
        if self.table is not None:
            self.head.weight = self.table.weight

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        values = [x if self.table is None else x + self.table(labels)]
        for number, source, extra in self.plan:
            value = self.layers[number](values[source % len(values)])
            values.append(value + values[extra % len(values)] if extra % 3 == 0 else value)
        y = values[-1] + values[len(values) // 2]
        if self.loss == 0:
            return F.cross_entropy(self.head(y).flatten(0, 1), labels.flatten(), ignore_index=3)
        if self.loss == 1:
            return F.mse_loss(y, x) + self.head(y).mean()
        return F.cross_entropy(self.head(y.mean(1)), labels[:, 0], label_smoothing=0.1)


def _layer(kind: int, extra: int) -> nn.Module:
    makers: list[Callable[[], nn.Module]] = [
        lambda: nn.Linear(WIDTH, WIDTH),
        lambda: nn.Sequential(nn.Linear(WIDTH, 3 * WIDTH), nn.GELU(), nn.Linear(3 * WIDTH, WIDTH)),
        lambda: Channels(nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=1 + extra % 2)),
        lambda: Channels(nn.Sequential(nn.Conv1d(WIDTH, WIDTH, 1), nn.BatchNorm1d(WIDTH), nn.ReLU(inplace=True))),
        lambda: Channels(nn.MaxPool1d(3, 1, 1) if extra % 2 else nn.AvgPool1d(3, 1, 1)),
        lambda: Channels(nn.GroupNorm(2, WIDTH)),
        lambda: nn.LayerNorm(WIDTH),
        lambda: nn.RMSNorm(WIDTH),
        lambda: Attention(1 + extra % 2, extra % 3 == 0, 0.3 if extra % 5 == 0 else 0.0),
        lambda: View(extra % 6),
        Recurrent,
        lambda: nn.Sequential(nn.Dropout(0.3), nn.Softmax(-1)),
    ]
    return makers[kind % len(makers)]()


NETS = st.builds(
    Net,
    st.lists(st.tuples(st.integers(0, 11), st.integers(0, 7), st.integers(0, 29)), min_size=1, max_size=7),
    st.booleans(),
    st.integers(0, 2),
)


def _check(net: Net, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(BATCH, STEPS, WIDTH, generator=generator, dtype=torch.float64)
    labels = torch.randint(11, (BATCH, STEPS), generator=generator)
    labels[0, 0], labels[1, 0] = 1, 2  # some are counted
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = imported(net.double(), x, labels)
    assert all(op.partitionable for op in model.graph.operators)
    for number in range(3):
        compare(model, draw_configs(model.graph, random.Random(3 * seed + number)), tolerance=1e-8, floor=1e-4)


OPTIONS = {
    "suppress_health_check": list(HealthCheck),
    "derandomize": True,
    "database": None,
    "phases": [Phase.explicit, Phase.generate],
}


@settings(FEW, **OPTIONS)
@given(NETS, st.integers(0, 1000))
def test_random_models_by_tiles(net: Net, seed: int) -> None:
    _check(net, seed)


@pytest.mark.long
@pytest.mark.timeout(1200)
@settings(**OPTIONS)
@given(NETS, st.integers(1001, 100_000))
def test_many_random_models_by_tiles(net: Net, seed: int) -> None:
    _check(net, seed)
