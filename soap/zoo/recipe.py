"""What a model family offers to ``soap.zoo.build``: how to make one size of one model and an example batch for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Recipe:
    """One size of one model. ``module`` makes it, ``inputs`` makes the arguments for a batch size, ``batch`` is the usual global batch.
    ``with_tables``: the same with tables of so many rows, where data decide them.

    Both draw from torch's global generator on the current default device, which the caller sets.
    """

    module: Callable[[], nn.Module]
    inputs: Callable[[int], tuple[Tensor, ...]]
    batch: int
    with_tables: Callable[[tuple[int, ...]], Recipe] | None = None


def labelled_images(batch: int, size: int, classes: int) -> tuple[Tensor, Tensor]:
    """Square colour images and their class numbers."""
    return torch.randn(batch, 3, size, size), torch.randint(classes, (batch,))


def tokens(batch: int, steps: int, vocabulary: int) -> Tensor:
    """Sequences of token numbers."""
    return torch.randint(vocabulary, (batch, steps))
