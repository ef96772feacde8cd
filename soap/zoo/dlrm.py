"""DLRM (Naumov 2019), a recommendation model: embeddings of categories, a perceptron for numbers, dot products of all pairs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from soap.zoo.recipe import Recipe
from soap.zoo.zipf import repeating

CRITEO_KAGGLE_ROWS = (
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27, 14992, 5461306, 10, 5652, 2173, 4,
    7046547, 18, 15, 286181, 105, 142572,
)  # fmt: skip
"""Distinct values of the 26 categorical features of the Criteo display advertising data (Kaggle 2014)."""

CRITEO_TERABYTE_ROWS = (
    9980333, 36084, 17217, 7378, 20134, 3, 7112, 1442, 61, 9758201, 1333352, 313829, 10, 2208, 11156, 122, 4, 970, 14, 9994222,
    7267859, 9946608, 415421, 12420, 101, 36,
)  # fmt: skip
"""The same for the Criteo click logs of 24 days ("Terabyte"), ids modulo ten million."""

ROW_LIMIT = 1_000_000
"""Rows kept of a table, as if larger ids were hashed: 357 MB of tables in float32 instead of 2.16 GB."""


@dataclass(frozen=True)
class DLRMConfig:
    """Sizes; the perceptrons' first entry is their input, and ``top`` lists only what follows the interactions.

    ``different``: the share of ids that are different in a column of a batch, where a table has enough rows.
    """

    rows: tuple[int, ...] = tuple(min(rows, ROW_LIMIT) for rows in CRITEO_KAGGLE_ROWS)
    bottom: tuple[int, ...] = (13, 512, 256, 64, 16)
    top: tuple[int, ...] = (512, 256, 1)
    different: float = 0.6
    batch: int = 128


def perceptron(sizes: tuple[int, ...], *, last_activation: bool) -> nn.Sequential:
    """Dense layers with ReLU between them, and after the last one if asked for."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*(layers if last_activation else layers[:-1]))


class DLRM(nn.Module):
    """Predicts clicks; the embeddings are as wide as the bottom perceptron's output."""

    def __init__(self, config: DLRMConfig) -> None:
        super().__init__()
        width, vectors = config.bottom[-1], len(config.rows) + 1
        self.embeddings = nn.ModuleList(nn.Embedding(rows, width) for rows in config.rows)
        self.bottom = perceptron(config.bottom, last_activation=True)
        self.top = perceptron((width + vectors * (vectors - 1) // 2, *config.top), last_activation=False)
        for table in self.embeddings.children():
            assert isinstance(table, nn.Embedding)
            # The publication's initial values; a standard normal would make the dot products dwarf the dense features.
            nn.init.uniform_(table.weight, -(table.num_embeddings**-0.5), table.num_embeddings**-0.5)

    def forward(self, numbers: Tensor, categories: Tensor, clicks: Tensor) -> Tensor:
        """Mean binary cross-entropy. ``numbers``: (batch, dense features); ``categories``: (batch, tables); ``clicks``: (batch,)."""
        dense = self.bottom(numbers)
        vectors = [dense, *(table(categories[:, i]) for i, table in enumerate(self.embeddings))]
        logits = self.top(torch.cat([dense, _interactions(vectors)], dim=1))
        return F.binary_cross_entropy_with_logits(logits.squeeze(1), clicks)


def _interactions(vectors: list[Tensor]) -> Tensor:
    """Dot products of all pairs of different vectors, each pair once: (batch, pairs)."""
    stacked = torch.cat([vector.unsqueeze(1) for vector in vectors], dim=1)
    products = torch.bmm(stacked, stacked.transpose(1, 2))
    return torch.cat([products[:, i, :i] for i in range(1, len(vectors))], dim=1)


def _inputs(batch: int, config: DLRMConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Dense features, one id per table, and clicks."""
    categories = torch.stack([repeating(rows, config.batch, config.different).draw(batch) for rows in config.rows], dim=1)
    return torch.rand(batch, config.bottom[0]), categories, torch.randint(2, (batch,)).float()


def _recipe(config: DLRMConfig) -> Recipe:
    return Recipe(partial(DLRM, config), partial(_inputs, config=config), config.batch, partial(_with_tables, config))


def _with_tables(config: DLRMConfig, rows: tuple[int, ...]) -> Recipe:
    return _recipe(replace(config, rows=rows))


_TERABYTE = DLRMConfig(CRITEO_TERABYTE_ROWS, bottom=(13, 512, 256, 64), top=(512, 512, 256, 1), batch=2048)
_EMULATION = DLRMConfig(tuple(-(-rows // 200) for rows in CRITEO_KAGGLE_ROWS), different=0.4, batch=2048)
_TINY = DLRMConfig(rows=(40, 7, 33, 4, 12), bottom=(13, 16, 8, 4), top=(16, 8, 1), batch=8)

RECIPES = {
    "dlrm": _recipe(DLRMConfig()),
    "dlrm:kaggle": _recipe(DLRMConfig(CRITEO_KAGGLE_ROWS)),
    "dlrm:terabyte": _recipe(_TERABYTE),
    "dlrm:emulation": _recipe(_EMULATION),
    "dlrm:tiny": _recipe(_TINY),
}
