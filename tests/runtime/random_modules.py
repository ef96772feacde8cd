"""Random small training models: what people write, in small, with odd sizes."""

from __future__ import annotations

import random

import torch
import torch.nn.functional as F
from torch import nn


class Residual(nn.Module):
    """Normalisation, two linear layers with a nonlinearity, and a shortcut."""

    def __init__(self, width: int, rng: random.Random) -> None:
        super().__init__()
        inner = rng.choice([5, 8, 12])
        self.norm = nn.LayerNorm(width) if rng.random() < 0.7 else nn.Identity()
        self.up, self.down = nn.Linear(width, inner, bias=rng.random() < 0.5), nn.Linear(inner, width)
        self.act = rng.choice([nn.GELU(), nn.ReLU(), nn.Tanh(), nn.SiLU()])
        self.dropout = nn.Dropout(rng.choice([0.0, 0.0, 0.2]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(self.act(self.up(self.norm(x)))))


class Attention(nn.Module):
    """Causal or full attention with separate or joint projections."""

    def __init__(self, width: int, heads: int, rng: random.Random) -> None:
        super().__init__()
        self.heads, self.joint, self.causal = heads, rng.random() < 0.5, rng.random() < 0.5
        self.qkv = nn.Linear(width, 3 * width) if self.joint else nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(x).chunk(3, -1) if self.joint else [layer(x) for layer in self.qkv]
        q, k, v = (t.view(*t.shape[:2], self.heads, -1).transpose(1, 2) for t in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return x + self.out(y.transpose(1, 2).flatten(2))


class Language(nn.Module):
    """Tokens to tokens: attention, feed-forward and recurrent layers in random order; sometimes tied embeddings."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        width, vocabulary = rng.choice([8, 12]), rng.choice([11, 16])
        self.embedding = nn.Embedding(vocabulary, width, padding_idx=rng.choice([None, 0]))
        kinds = [rng.choice(["attention", "residual", "residual", "lstm", "shared"]) for _ in range(rng.randint(1, 3))]
        shared = Residual(width, rng)
        layers: list[nn.Module] = []
        for kind in kinds:
            if kind == "attention":
                layers.append(Attention(width, rng.choice([2, 4]), rng))
            elif kind == "lstm":
                layers.append(nn.LSTM(width, width, batch_first=True))
            else:
                layers.append(shared if kind == "shared" else Residual(width, rng))
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if rng.random() < 0.4:
            self.head.weight = self.embedding.weight
        self.ignore = rng.random() < 0.5

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)[0] if isinstance(layer, nn.LSTM) else layer(x)
        logits = self.head(x)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=2 if self.ignore else -100)


class Vision(nn.Module):
    """Convolutions with batch norm, branches that are concatenated or added, pooling, and a classifier."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        channels = rng.choice([4, 6])
        groups = rng.choice([1, 1, 2])
        self.stem = nn.Conv2d(3, channels, rng.choice([3, 5]), stride=rng.choice([1, 2]), padding=rng.choice([1, 2]))
        self.norm = nn.BatchNorm2d(channels) if rng.random() < 0.7 else nn.Identity()
        self.left = nn.Conv2d(channels, channels, 3, padding=1, groups=groups, bias=rng.random() < 0.5)
        self.right = nn.Conv2d(channels, channels, 1)
        self.second = nn.BatchNorm2d(channels)
        self.cat = rng.random() < 0.5
        self.pool = rng.choice([nn.MaxPool2d(2), nn.MaxPool2d(3, 2, 1), nn.AvgPool2d(2), nn.AvgPool2d(3, 2, 1, count_include_pad=False)])
        self.flat = rng.random() < 0.5
        width = channels * (2 if self.cat else 1)
        with torch.no_grad():
            side = self.pool(torch.zeros(1, 1, *self.stem(torch.zeros(1, 3, 9, 9)).shape[2:])).shape[-1]
        self.head = nn.Linear(width * side * side if self.flat else width, 7)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm(self.stem(images)))
        left, right = F.relu(self.second(self.left(x))), self.right(x)
        x = torch.cat([left, right], 1) if self.cat else left + right
        x = self.pool(x)
        x = x.flatten(1) if self.flat else x.mean((2, 3))
        return F.cross_entropy(self.head(x), labels)


class Towers(nn.Module):
    """A recommender in small: tables and dense features, their products, and a logistic loss."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        width = rng.choice([4, 6])
        self.tables = nn.ModuleList(nn.Embedding(size, width) for size in (5, 9, 4)[: rng.randint(2, 3)])
        self.bottom = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, width))
        count = len(self.tables) + 1
        self.top = nn.Sequential(nn.Linear(width + count * count, 6), nn.Sigmoid(), nn.Linear(6, 1))
        self.squared = rng.random() < 0.3

    def forward(self, dense: torch.Tensor, ids: torch.Tensor, clicked: torch.Tensor) -> torch.Tensor:
        x = self.bottom(dense)
        rows = torch.stack([x, *(table(ids[:, i]) for i, table in enumerate(self.tables))], 1)
        products = rows @ rows.transpose(1, 2)
        y = self.top(torch.cat([x, products.flatten(1)], 1)).squeeze(1)
        return F.mse_loss(torch.sigmoid(y), clicked) if self.squared else F.binary_cross_entropy_with_logits(y, clicked)


def random_model(seed: int) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """A model in float32 and its example inputs."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    batch = rng.choice([4, 5, 6])
    family = rng.choice([Language, Vision, Towers])
    module = family(rng)
    if family is Language:
        args: tuple[torch.Tensor, ...] = tuple(torch.randint(0, 11, (batch, 5)) for _ in range(2))
    elif family is Vision:
        args = (torch.randn(batch, 3, 9, 9), torch.randint(0, 7, (batch,)))
    else:
        args = (torch.randn(batch, 5), torch.randint(0, 4, (batch, 3)), torch.randint(0, 2, (batch,)).float())
    return module.train(), args
