"""Translation with LSTMs and attention in every step (Wu 2016, as "GNMT-v2" of TensorFlow's tutorial), Parallax's second sparse model.

The decoder's first layer reads what the attention found in the step before, and so runs step by step; the layers above it read what it
found in the same step, and run over the whole sequence. The sizes are those that Parallax counts, 94.1 million dense and 74.9 million
sparse parameters: an encoder and a decoder of two layers each, for which its text says eight.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from soap.zoo.blocks import token_loss
from soap.zoo.recipe import Recipe
from soap.zoo.zipf import zipf


@dataclass(frozen=True)
class GNMTConfig:
    """Sizes. ``layers`` counts those of the encoder, the first of which reads both ways, and again those of the decoder.

    ``alpha``: share of a vocabulary that the tokens of a batch have.
    """

    vocabulary: int = 36_572
    width: int = 1024
    layers: int = 2
    source_steps: int = 50
    target_steps: int = 50
    dropout: float = 0.2
    alpha: float = 0.12
    batch: int = 128


class NormedAttention(nn.Module):
    """Additive attention (Bahdanau 2015) whose scoring vector has a learned length."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query = nn.Linear(width, width, bias=False)
        self.memory = nn.Linear(width, width, bias=False)
        self.bias = nn.Parameter(torch.zeros(width))
        self.direction = nn.Parameter(torch.randn(width))
        self.length = nn.Parameter(torch.tensor(width**-0.5))

    def keys(self, memory: Tensor) -> Tensor:
        """What queries are compared with; the same in all steps."""
        keys: Tensor = self.memory(memory) + self.bias
        return keys

    def forward(self, state: Tensor, keys: Tensor, memory: Tensor) -> Tensor:
        """What a state (batch, width) finds in ``memory`` (batch, steps, width)."""
        scoring = self.length * self.direction / self.direction.norm()
        scores = torch.tanh(keys + self.query(state).unsqueeze(1)) @ scoring
        return torch.bmm(torch.softmax(scores, 1).unsqueeze(1), memory).squeeze(1)


class GNMT(nn.Module):
    """Trained with teacher forcing; residual connections from the third layer on, as far as there is one."""

    def __init__(self, config: GNMTConfig) -> None:
        super().__init__()
        width, layers = config.width, config.layers
        self.dropout = config.dropout
        self.source_embedding = nn.Embedding(config.vocabulary, width)
        self.target_embedding = nn.Embedding(config.vocabulary, width)
        self.both_ways = nn.LSTM(width, width, batch_first=True, bidirectional=True)
        self.encoder = nn.ModuleList(nn.LSTM(2 * width if i == 0 else width, width, batch_first=True) for i in range(layers - 1))
        self.attention = NormedAttention(width)
        self.first = nn.LSTMCell(2 * width, width)
        self.decoder = nn.ModuleList(nn.LSTM(2 * width, width, batch_first=True) for _ in range(layers - 1))
        self.head = nn.Linear(width, config.vocabulary, bias=False)

    def forward(self, source: Tensor, target: Tensor, labels: Tensor) -> Tensor:
        """Mean cross-entropy of the target's next tokens."""
        memory = self._encoded(self._dropped(self.source_embedding(source)))
        found, states = self._attended(self._dropped(self.target_embedding(target)), memory)
        for i, layer in enumerate(self.decoder):
            outputs = layer(self._dropped(torch.cat([states, found], 2)))[0]
            states = outputs if i == 0 else outputs + states
        return token_loss(self.head(states), labels)

    def _encoded(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.both_ways(inputs)[0]
        for i, layer in enumerate(self.encoder):
            above = layer(self._dropped(outputs))[0]
            outputs = above if i == 0 else above + outputs
        return outputs

    def _attended(self, inputs: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """What attention finds, and the first layer's states, in all steps: (batch, steps, width) each."""
        keys, nothing = self.attention.keys(memory), torch.zeros_like(memory[:, 0])
        state, cell, found = nothing, nothing, nothing
        states, contexts = [], []
        for step in range(inputs.shape[1]):
            state, cell = self.first(torch.cat([inputs[:, step], found], 1), (state, cell))
            found = self.attention(state, keys, memory)
            states.append(state)
            contexts.append(found)
        return torch.stack(contexts, 1), torch.stack(states, 1)

    def _dropped(self, inputs: Tensor) -> Tensor:
        return F.dropout(inputs, self.dropout, self.training)


def _inputs(batch: int, config: GNMTConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Source sequences, target sequences, and the targets one step later."""
    source = zipf(config.vocabulary, config.batch * config.source_steps, config.alpha)
    target = zipf(config.vocabulary, config.batch * config.target_steps, config.alpha).draw(batch, config.target_steps + 1)
    return source.draw(batch, config.source_steps), target[:, :-1].contiguous(), target[:, 1:].contiguous()


def _recipe(config: GNMTConfig) -> Recipe:
    return Recipe(partial(GNMT, config), partial(_inputs, config=config), config.batch)


_EMULATION = GNMTConfig(vocabulary=8_000, width=128, source_steps=8, target_steps=8, dropout=0.0, alpha=0.05)
_TINY = GNMTConfig(vocabulary=60, width=8, source_steps=4, target_steps=3, dropout=0.0, alpha=0.25, batch=8)

RECIPES = {"nmt_gnmt": _recipe(GNMTConfig()), "nmt_gnmt:emulation": _recipe(_EMULATION), "nmt_gnmt:tiny": _recipe(_TINY)}
