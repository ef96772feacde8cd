"""A language model with a large vocabulary, as anyone would write it in PyTorch, and its export: the model of ``examples.demo``.

    python -m examples.language_model model.pt2

Nearly all parameters are in the embedding and the softmax layer, and a step sees few words: data parallelism, which sums the gradients of
all parameters over all devices, is then slow. Nothing in the model speaks of that; a better strategy is found from the exported file alone.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import soap

VOCABULARY, WIDTH = 24_000, 512
BATCH, LENGTH = 16, 8
"""Sequences per training step, and words per sequence."""
FREQUENT_WORDS = 2000
"""The example's text uses no others."""


class LanguageModel(nn.Module):
    """Two LSTM layers between an embedding and a softmax over the vocabulary."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.softmax = nn.Linear(width, vocabulary)

    def forward(self, words: Tensor, next_words: Tensor) -> Tensor:
        """Mean cross-entropy of all predictions. Both inputs are word numbers of shape (batch, length)."""
        hidden, _ = self.lstm(self.embedding(words))
        return F.cross_entropy(self.softmax(hidden).flatten(0, 1), next_words.flatten())


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    """Endless text for ``soap-run --data``; as in any language the word of rank n occurs in proportion to 1/n. Equal on all ranks."""
    generator = torch.Generator().manual_seed(0)
    frequencies = 1 / torch.arange(1, FREQUENT_WORDS + 1)
    while True:
        drawn = torch.multinomial(frequencies, BATCH * (LENGTH + 1), replacement=True, generator=generator)
        text = drawn.view(BATCH, LENGTH + 1)
        yield text[:, :-1].contiguous(), text[:, 1:].contiguous()


def main() -> None:
    """Write the model, called with an example batch, as a file that ``soap-search`` and ``soap-run`` read."""
    parser = argparse.ArgumentParser(description="Export a language model for soap-search.")
    parser.add_argument("path", help="where the model goes (.pt2)")
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY, help=f"words, at least {FREQUENT_WORDS} (default %(default)s)")
    parser.add_argument("--width", type=int, default=WIDTH, help="of all layers (default %(default)s)")
    args = parser.parse_args()
    if args.vocabulary < FREQUENT_WORDS or args.width < 1:
        parser.error(f"--vocabulary {args.vocabulary} --width {args.width}: expected at least {FREQUENT_WORDS} words and a width of 1")
    torch.manual_seed(0)
    model = LanguageModel(args.vocabulary, args.width)
    soap.export(model, next(batches()), path=args.path)
    count = sum(parameter.numel() for parameter in model.parameters())
    print(f"wrote {args.path}: {count / 1e6:.1f} million parameters, {BATCH} sequences of {LENGTH} words per training step")


if __name__ == "__main__":
    main()
