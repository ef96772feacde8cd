"""Training data for ``soap-run``: batches drawn like the model's example inputs, or the user's own."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module
from typing import Any

import torch

from soap.errors import SoapError
from soap.tracing.model import TracedModel

Batch = Sequence[torch.Tensor]
SEED_STRIDE = 1_000_003
"""Keeps the batches of neighbouring seeds apart."""


def drawn_batches(model: TracedModel, seed: int) -> Iterator[Batch]:
    """Endless batches whose elements are drawn from those of the example inputs: in range for labels, indices and probabilities alike.

    Every rank draws the same ones.
    """
    step = 0
    while True:
        generator = torch.Generator().manual_seed(seed * SEED_STRIDE + step)
        yield [_drawn(example, generator) for example in model.example_inputs]
        step += 1


def user_batches(spec: str) -> Iterator[Batch]:
    """What the callable ``pkg.mod:name`` yields: one sequence of tensors per step, in the order of the model's inputs, over and over.

    Every rank calls it, and must get the same batches: seed whatever is random.
    """
    make = _callable(spec)
    while True:
        count = 0
        for batch in _iterable(make(), spec):
            tensors = [batch] if isinstance(batch, torch.Tensor) else list(batch)
            if not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
                raise SoapError(f"--data {spec}: batch {count} holds {type(tensors[0]).__name__}; expected a sequence of tensors per step")
            yield tensors
            count += 1
        if not count:
            raise SoapError(f"--data {spec}: no batches; expected at least one")


def _drawn(example: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    values = example.detach().cpu().reshape(-1)
    if values.numel() == 0:
        return example.detach().cpu()
    return values[torch.randint(values.numel(), (values.numel(),), generator=generator)].reshape(example.shape)


def _callable(spec: str) -> Any:
    module, colon, name = spec.partition(":")
    if not colon or not module or not name:
        raise SoapError(f"--data {spec}: expected package.module:callable, which yields one sequence of tensors per step")
    if os.getcwd() not in sys.path:  # an installed command, unlike ``python``, does not look beside itself
        sys.path.insert(0, os.getcwd())
    try:
        found = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as cause:
        raise SoapError(f"--data {spec}: {cause}; expected package.module:callable that can be imported from here") from None
    if not callable(found):
        raise SoapError(f"--data {spec}: {type(found).__name__} cannot be called; expected a callable that yields batches")
    return found


def _iterable(value: Any, spec: str) -> Iterable[Any]:
    if not isinstance(value, Iterable):
        raise SoapError(f"--data {spec}: the callable returned {type(value).__name__}; expected an iterable of batches")
    return value
