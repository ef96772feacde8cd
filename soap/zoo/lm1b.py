"""Language model of the One Billion Word benchmark (Jozefowicz 2016), as Parallax trains it: the vocabulary's two tables hold 99% of it.

A step does not compute all scores: besides its label each token is compared with candidates that the whole batch shares. The labels and
the candidates come with the batch, so that the softmax layer's rows are looked up like those of the embedding.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from soap.zoo.recipe import Recipe
from soap.zoo.zipf import Zipf, zipf


@dataclass(frozen=True)
class SampledConfig:
    """Sizes; the defaults are those of the publication. ``alpha``: share of the vocabulary that the tokens of a batch have.

    Torch's LSTM has two biases where the publication has one: 9.454 million dense parameters instead of 9.445.
    """

    vocabulary: int = 793_470
    width: int = 512
    cell: int = 2048
    steps: int = 20
    candidates: int = 8192
    dropout: float = 0.1
    alpha: float = 0.0025
    batch: int = 128

    @property
    def words(self) -> Zipf:
        """How often words occur."""
        return zipf(self.vocabulary, self.batch * self.steps, self.alpha)

    @property
    def sampler(self) -> Zipf:
        """What candidates are drawn from: the log-uniform distribution."""
        return Zipf(self.vocabulary, 1.0)


class SampledLanguageModel(nn.Module):
    """Embedding, LSTM with projection, sampled softmax."""

    def __init__(self, config: SampledConfig) -> None:
        super().__init__()
        self.sampler, self.dropout = config.sampler, config.dropout
        self.tries = config.sampler.draws_for(config.candidates)
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.lstm = nn.LSTM(config.width, config.cell, proj_size=config.width, batch_first=True)
        self.softmax = nn.Embedding(config.vocabulary, config.width)
        self.bias = nn.Embedding(config.vocabulary, 1)
        for table in (self.embedding, self.softmax):
            nn.init.uniform_(table.weight, -(config.width**-0.5), config.width**-0.5)
        nn.init.zeros_(self.bias.weight)

    def forward(self, sequences: Tensor, labels: Tensor, candidates: Tensor) -> Tensor:
        """Mean loss of the next tokens. ``sequences``, ``labels``: (batch, steps); ``candidates``: different ids, shared by all tokens."""
        inputs = F.dropout(self.embedding(sequences), self.dropout, self.training)
        outputs = F.dropout(self.lstm(inputs)[0], self.dropout, self.training)
        true = (outputs * self.softmax(labels)).sum(-1) + self.bias(labels).squeeze(-1) - self._log_expected(labels)
        scores = outputs @ self.softmax(candidates).t() + self.bias(candidates).squeeze(-1) - self._log_expected(candidates)
        # A candidate that is the label by accident would be pushed down and up at once.
        scores = scores.masked_fill(labels.unsqueeze(-1) == candidates, torch.finfo(scores.dtype).min)
        return F.softplus(torch.logsumexp(scores, -1) - true).mean()

    def _log_expected(self, ids: Tensor) -> Tensor:
        """Logarithm of how often an id is expected among a batch's candidates, which makes up for the choice of candidates."""
        probability = self.sampler.probability(self.sampler.ranks(ids).to(self.softmax.weight.dtype))
        return torch.log(-torch.expm1(self.tries * torch.log1p(-probability)))


def _inputs(batch: int, config: SampledConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Sequences, the same sequences one step later, and candidates."""
    text = config.words.draw(batch, config.steps + 1)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous(), config.sampler.draw_different(config.candidates)


def _recipe(config: SampledConfig) -> Recipe:
    return Recipe(partial(SampledLanguageModel, config), partial(_inputs, config=config), config.batch)


_EMULATION = SampledConfig(vocabulary=30_000, width=128, cell=256, candidates=768, dropout=0.0, alpha=0.03)
_TINY = SampledConfig(vocabulary=90, width=8, cell=12, steps=4, candidates=10, dropout=0.0, alpha=0.2, batch=8)

RECIPES = {"lm1b": _recipe(SampledConfig()), "lm1b:emulation": _recipe(_EMULATION), "lm1b:tiny": _recipe(_TINY)}
