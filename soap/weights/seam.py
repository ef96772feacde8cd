"""What gives weights: the contract, and what is known of a tensor before it is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import torch


class Kind(NamedTuple):
    """A tensor's shape and type."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Weights(Protocol):
    """Values of a model's parameters and buffers. ``said``: what commands call it. ``kinds``: by name. ``is_mapped``: tensors are parts of
    files, which are read where they are; else each is made when it is asked for.

    ModelError in one line, when it is opened, for what cannot be read."""

    said: str
    kinds: Mapping[str, Kind]
    is_mapped: bool

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor that must not be changed: it may be a file's memory."""
