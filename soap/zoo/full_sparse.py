"""Click prediction from sparse features, as Twitter's FullSparse layers compute it: each layer is a dense layer of a sparse input.

A sample's features are ids (bins of discretized values, or hashes) with values; a layer adds up the rows of its weights that they name,
each times its value, as a bag of an embedding. The weights may be split by rows or by columns, and are computed with where they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from soap.zoo.dlrm import perceptron
from soap.zoo.recipe import Recipe
from soap.zoo.zipf import zipf


@dataclass(frozen=True)
class FullSparseConfig:
    """Sizes: ``layers`` sparse layers side by side, each of ``rows`` features with ``width`` outputs, of which a sample has ``features``.

    The defaults give 23 million weights, about 1,000 features per sample and a batch of 512, as published; the widths were not published.
    ``alpha``: share of a layer's rows that a batch touches.
    """

    layers: int = 3
    rows: int = 120_000
    width: int = 64
    features: int = 336
    hidden: int = 128
    alpha: float = 0.3
    batch: int = 512


class SparseLinear(nn.Module):
    """A dense layer of a sparse input, with ReLU."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(rows, width))  # as published: fine below all other layers, since 1/width is added
        self.bias = nn.Parameter(torch.full((width,), 1 / width))

    def forward(self, ids: Tensor, values: Tensor) -> Tensor:
        """``ids``, ``values``: (batch, features)."""
        return F.relu(F.embedding_bag(ids, self.weight, mode="sum", per_sample_weights=values) + self.bias)


class FullSparse(nn.Module):
    """Sparse layers, and a perceptron over all their outputs."""

    def __init__(self, config: FullSparseConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(SparseLinear(config.rows, config.width) for _ in range(config.layers))
        self.top = perceptron((config.layers * config.width, config.hidden, 1), last_activation=False)

    def forward(self, ids: Tensor, values: Tensor, clicks: Tensor) -> Tensor:
        """Mean binary cross-entropy. ``ids``, ``values``: (batch, layers, features); ``clicks``: (batch,)."""
        outputs = [layer(ids[:, i], values[:, i]) for i, layer in enumerate(self.layers)]
        return F.binary_cross_entropy_with_logits(self.top(torch.cat(outputs, 1)).squeeze(1), clicks)


def _inputs(batch: int, config: FullSparseConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Features, their values, and clicks."""
    law = zipf(config.rows, config.batch * config.features, config.alpha)
    shape = (batch, config.layers, config.features)
    return law.draw(*shape), torch.rand(shape), torch.randint(2, (batch,)).float()


def _recipe(config: FullSparseConfig) -> Recipe:
    return Recipe(partial(FullSparse, config), partial(_inputs, config=config), config.batch)


_EMULATION = FullSparseConfig(rows=40_000, width=32, features=64, hidden=512, alpha=0.05, batch=2048)
_TINY = FullSparseConfig(layers=2, rows=50, width=4, features=3, hidden=6, alpha=0.3, batch=8)

RECIPES = {
    "full_sparse": _recipe(FullSparseConfig()),
    "full_sparse:emulation": _recipe(_EMULATION),
    "full_sparse:tiny": _recipe(_TINY),
}
