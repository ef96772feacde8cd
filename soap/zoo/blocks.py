"""Building blocks that several model families share."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn

LstmState = tuple[Tensor, Tensor]
"""Hidden and cell state of one LSTM layer, each of shape (1, batch, width)."""


class Classifier(nn.Module):
    """Base of the models that put one label on each sample: a subclass gives ``logits``."""

    def logits(self, inputs: Tensor) -> Tensor:
        """Class scores of shape (batch, classes)."""
        raise NotImplementedError

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Mean cross-entropy of the batch."""
        return F.cross_entropy(self.logits(inputs), labels)


class ConvNorm(nn.Sequential):
    """Convolution without bias, batch norm, and ReLU unless ``activation`` is False."""

    def __init__(
        self,
        channels: int,
        out: int,
        kernel: int | tuple[int, int],
        *,
        stride: int = 1,
        padding: int | tuple[int, int] = 0,
        eps: float = 1e-5,
        activation: bool = True,
    ) -> None:
        layers: dict[str, nn.Module] = {
            "conv": nn.Conv2d(channels, out, kernel, stride=stride, padding=padding, bias=False),
            "norm": nn.BatchNorm2d(out, eps=eps),
        }
        super().__init__(OrderedDict(layers | ({"activation": nn.ReLU()} if activation else {})))


class ChunkedLSTM(nn.Module):
    """LSTM layers that walk through a sequence chunk by chunk, one call per layer and chunk.

    A chunk of a layer needs only the chunk below it and the one before it, so that different devices can work on different chunks at
    the same time; all chunks of a layer share its weights. ``dropout``: of what each layer reads, and of the outputs (Zaremba 2014).
    """

    def __init__(self, inputs: int, width: int, layers: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = dropout
        self.layers = nn.ModuleList(nn.LSTM(inputs if i == 0 else width, width, batch_first=True) for i in range(layers))

    def forward(self, chunks: Sequence[Tensor], states: Sequence[LstmState] | None = None) -> tuple[list[Tensor], list[LstmState]]:
        """Outputs of the last layer, one per chunk, and the final state of every layer. Without ``states`` all start at zero."""
        outputs, final = list(chunks), []
        for depth, layer in enumerate(self.layers):
            state = None if states is None else states[depth]
            for i, chunk in enumerate(outputs):
                outputs[i], state = layer(self._dropped(chunk), state)
            assert state is not None  # there is at least one chunk
            final.append(state)
        return [self._dropped(chunk) for chunk in outputs], final

    def _dropped(self, inputs: Tensor) -> Tensor:
        return F.dropout(inputs, self.dropout, self.training) if self.dropout else inputs


def chunks_of(sequences: Tensor, chunk: int) -> list[Tensor]:
    """Slices of ``chunk`` steps along dimension 1; the last one may be shorter. A short sequence stays as it is."""
    steps = sequences.shape[1]
    if steps <= chunk:
        return [sequences]
    edges = [*range(0, steps, chunk), steps]
    return [sequences[:, start:stop] for start, stop in pairwise(edges)]


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy over all tokens of logits of shape (batch, steps, vocabulary)."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def mean_token_loss(logits: Sequence[Tensor], labels: Sequence[Tensor]) -> Tensor:
    """Mean cross-entropy over all tokens of a sequence that is cut into chunks, computed chunk by chunk."""
    steps = sum(chunk.shape[1] for chunk in labels)
    total: Tensor | None = None
    for scores, targets in zip(logits, labels, strict=True):
        loss = token_loss(scores, targets)
        share = loss if targets.shape[1] == steps else loss * (targets.shape[1] / steps)
        total = share if total is None else total + share
    assert total is not None  # there is at least one chunk
    return total
