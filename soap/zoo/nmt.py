"""Neural machine translation: LSTM encoder and decoder with attention (Luong 2015, "general" scores, no input feeding).

Without input feeding the decoder's chunks depend on each other only through the LSTM state, so attention and softmax of one chunk can
run beside the LSTM of the next.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from soap.zoo.blocks import ChunkedLSTM, chunks_of, mean_token_loss
from soap.zoo.recipe import Recipe, tokens


@dataclass(frozen=True)
class TranslatorConfig:
    """Sizes. ``layers`` counts those of the encoder, and again those of the decoder; ``chunk`` is steps per call of an LSTM layer."""

    vocabulary: int = 32_000
    width: int = 1024
    layers: int = 2
    source_steps: int = 40
    target_steps: int = 40
    chunk: int = 8


class Attention(nn.Module):
    """Mixes each decoder output with the encoder outputs that score highest against it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.score = nn.Linear(width, width, bias=False)
        self.combine = nn.Linear(2 * width, width, bias=False)

    def forward(self, queries: Tensor, memory: Tensor) -> Tensor:
        """Attentional states, of the shape of ``queries`` (batch, steps, width); ``memory`` has the source's steps."""
        scores = torch.bmm(self.score(queries), memory.transpose(1, 2))
        context = torch.bmm(torch.softmax(scores, dim=-1), memory)
        return torch.tanh(self.combine(torch.cat([context, queries], dim=-1)))


class Translator(nn.Module):
    """Sequence-to-sequence model trained with teacher forcing."""

    def __init__(self, config: TranslatorConfig) -> None:
        super().__init__()
        self.chunk = config.chunk
        self.source_embedding = nn.Embedding(config.vocabulary, config.width)
        self.target_embedding = nn.Embedding(config.vocabulary, config.width)
        self.encoder = ChunkedLSTM(config.width, config.width, config.layers)
        self.decoder = ChunkedLSTM(config.width, config.width, config.layers)
        self.attention = Attention(config.width)
        self.head = nn.Linear(config.width, config.vocabulary)

    def forward(self, source: Tensor, target: Tensor, labels: Tensor) -> Tensor:
        """Mean cross-entropy of the target's next tokens."""
        encoded, states = self.encoder([self.source_embedding(chunk) for chunk in chunks_of(source, self.chunk)])
        memory = torch.cat(encoded, dim=1)
        decoded, _ = self.decoder([self.target_embedding(chunk) for chunk in chunks_of(target, self.chunk)], states)
        logits = [self.head(self.attention(chunk, memory)) for chunk in decoded]
        return mean_token_loss(logits, chunks_of(labels, self.chunk))


def _inputs(batch: int, config: TranslatorConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Source sequences, target sequences, and the targets one step later."""
    target = tokens(batch, config.target_steps + 1, config.vocabulary)
    source = tokens(batch, config.source_steps, config.vocabulary)
    return source, target[:, :-1].contiguous(), target[:, 1:].contiguous()


def _recipe(config: TranslatorConfig, batch: int) -> Recipe:
    return Recipe(partial(Translator, config), partial(_inputs, config=config), batch)


_TINY = TranslatorConfig(vocabulary=60, width=16, layers=2, source_steps=7, target_steps=8, chunk=3)

RECIPES = {"nmt": _recipe(TranslatorConfig(), 64), "nmt:tiny": _recipe(_TINY, 8)}
