"""Decoder-only transformer of the shape of GPT-2 small (Radford 2019).

It differs from the publication where that helps planning: query, key and value are separate projections, the output layer has weights of
its own, and attention weights are not dropped out.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from soap.zoo.blocks import token_loss
from soap.zoo.recipe import Recipe, tokens


@dataclass(frozen=True)
class GPTConfig:
    """Sizes; the defaults are those of GPT-2 small."""

    vocabulary: int = 50_257
    context: int = 1024
    width: int = 768
    heads: int = 12
    layers: int = 12
    dropout: float = 0.1


class CausalAttention(nn.Module):
    """Multi-head attention of each position to itself and those before it."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.query = nn.Linear(config.width, config.width)
        self.key = nn.Linear(config.width, config.width)
        self.value = nn.Linear(config.width, config.width)
        self.output = nn.Linear(config.width, config.width)

    def forward(self, inputs: Tensor) -> Tensor:
        """Attended values, projected, of the shape of ``inputs``."""
        query, key, value = (self._split(layer(inputs)) for layer in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        result: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return result

    def _split(self, projected: Tensor) -> Tensor:
        """(batch, steps, width) -> (batch, heads, steps, width per head)."""
        batch, steps, width = projected.shape
        return projected.view(batch, steps, self.heads, width // self.heads).transpose(1, 2)


class Block(nn.Module):
    """Attention and a two-layer perceptron, each normalized before and added to its input."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = CausalAttention(config)
        self.perceptron_norm = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, inputs: Tensor) -> Tensor:
        """Activations of the shape of ``inputs``."""
        attended: Tensor = inputs + self.dropout(self.attention(self.attention_norm(inputs)))
        hidden = F.gelu(self.up(self.perceptron_norm(attended)), approximate="tanh")
        result: Tensor = attended + self.dropout(self.down(hidden))
        return result


class GPT(nn.Module):
    """Language model with learned positions."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(config.vocabulary, config.width)
        self.position_embedding = nn.Embedding(config.context, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.apply(_initialize)

    def forward(self, sequences: Tensor, labels: Tensor) -> Tensor:
        """Mean cross-entropy of the next tokens."""
        positions = torch.arange(sequences.shape[1], device=sequences.device)
        hidden = self.dropout(self.token_embedding(sequences) + self.position_embedding(positions))
        for block in self.blocks:
            hidden = block(hidden)
        return token_loss(self.head(self.norm(hidden)), labels)


def _initialize(module: nn.Module) -> None:
    """GPT-2's initial weights: normal with standard deviation 0.02, biases zero."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def _inputs(batch: int, config: GPTConfig) -> tuple[Tensor, Tensor]:
    """Sequences and the same sequences one step later."""
    text = tokens(batch, config.context + 1, config.vocabulary)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def _recipe(config: GPTConfig, batch: int) -> Recipe:
    return Recipe(partial(GPT, config), partial(_inputs, config=config), batch)


_TINY = GPTConfig(vocabulary=101, context=12, width=32, heads=4, layers=2, dropout=0.0)

RECIPES = {"gpt": _recipe(GPTConfig(), 8), "gpt:tiny": _recipe(_TINY, 8)}
