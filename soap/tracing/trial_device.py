"""Whether a tensor is on a GPU, or stands for one that is: trials run without values, on any machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

_as_on_gpus: ContextVar[bool] = ContextVar("as_on_gpus", default=False)


@contextmanager
def as_on_gpus() -> Iterator[None]:
    """What is run here, on tensors without values, takes the memory that it would take on a GPU."""
    token = _as_on_gpus.set(True)
    try:
        yield
    finally:
        _as_on_gpus.reset(token)


def stands_for_gpu() -> bool:
    """Whether what runs here is tried ``as_on_gpus``."""
    return _as_on_gpus.get()


def is_on_gpu(tensor: torch.Tensor) -> bool:
    """Whether a tensor is on a GPU, or tried as if it were."""
    return tensor.is_cuda or stands_for_gpu()
