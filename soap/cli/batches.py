"""Training data for ``soap-run``: batches drawn like the model's example inputs, or the user's own. They depend on the step alone and
are the same on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from soap import zoo
from soap.cli.preprocessed import batches, folder_of
from soap.errors import SoapError
from soap.tracing.imports import from_here
from soap.tracing.model import TracedModel

Batches = Callable[[int], Sequence[torch.Tensor]]
SEED_STRIDE = 1_000_003
"""Keeps the batches of neighbouring seeds apart."""


class DrawnBatches:
    """Batches drawn from the example inputs: each element is one of the values at the same place in any sample. So all values are in
    range: probabilities, and indices into tables of different sizes.

    Whole numbers are drawn only if each stands for itself (``model.element_inputs``: indices of lookups, class labels) and none is
    negative. All others (offsets, lengths, masks) are the examples'. SoapError if the model has no example inputs with values.
    """

    def __init__(self, model: TracedModel, seed: int) -> None:
        examples = list(model.example_inputs)
        if len(examples) < len(model.input_names) or any(tensor.is_meta for tensor in examples):
            raise SoapError(
                "the model has no example inputs to draw batches like: give --data PKG.MOD:CALLABLE, "
                "which yields one sequence of tensors per step"
            )
        self._examples = [example.detach().cpu() for example in examples]
        self._drawn = [
            tensor.is_floating_point() or tensor.is_complex() or (name in model.element_inputs and bool((tensor >= 0).all()))
            for name, tensor in zip(model.input_names, self._examples, strict=True)
        ]
        self._seed = seed

    def __call__(self, step: int) -> Sequence[torch.Tensor]:
        """The batch of a step."""
        generator = torch.Generator().manual_seed(self._seed * SEED_STRIDE + step)
        return [_drawn(example, generator) if drawn else example for example, drawn in zip(self._examples, self._drawn, strict=True)]


class UserBatches:
    """Batches of the callable ``pkg.mod:name``: a sequence of tensors per step, in the order of the model's inputs.
    ``zoo:NAME[:SIZE][@BATCH]`` draws batches as the zoo does for this model. At its end the callable is called again. Every rank calls
    it and must get the same batches, so whatever is random needs a seed. ``preprocessed:OUT`` yields what ``soap-preprocess`` wrote, in
    batches of the size of ``model``'s."""

    def __init__(self, spec: str, model: TracedModel | None = None) -> None:
        self._spec = spec
        folder = folder_of(spec)
        self._make = _callable(spec) if folder is None else batches(folder, _batch_of(model, spec))
        self._step = -1
        self._batch: list[torch.Tensor] = []
        self._source = self._begin()

    def __call__(self, step: int) -> Sequence[torch.Tensor]:
        """The batch of a step. Asking again for the last one is free; going back starts from the beginning."""
        if step < self._step:
            self._step, self._source = -1, self._begin()
        while self._step < step:
            self._batch = self._next()
            self._step += 1
        return self._batch

    def _begin(self) -> Iterator[Any]:
        made = self._make()
        if not isinstance(made, Iterable):
            raise SoapError(f"--data {self._spec}: the callable returned {type(made).__name__}; expected an iterable of batches")
        return iter(made)

    def _next(self) -> list[torch.Tensor]:
        end = object()
        batch = next(self._source, end)
        if batch is end:
            self._source = self._begin()
            batch = next(self._source, end)
        if batch is end:
            raise SoapError(f"--data {self._spec}: no batches; expected at least one")
        items = batch if isinstance(batch, Iterable) and not isinstance(batch, torch.Tensor) else [batch]
        tensors: list[torch.Tensor] = []
        for item in items:
            if not isinstance(item, torch.Tensor):
                raise SoapError(f"--data {self._spec}: a batch holds {type(item).__name__}; expected a sequence of tensors per step")
            tensors.append(item)
        return tensors


class ConvertedBatches:
    """Batches converted to the floating-point type that replaces the model's."""

    def __init__(self, batches: Batches, dtype: torch.dtype) -> None:
        self._batches, self._dtype = batches, dtype

    def __call__(self, step: int) -> Sequence[torch.Tensor]:
        """The batch of a step."""
        return [tensor.to(self._dtype) if tensor.is_floating_point() else tensor for tensor in self._batches(step)]


class JoinedBatches:
    """``count`` batches for each step, one after the other, for a trainer that accumulates gradients."""

    def __init__(self, batches: Batches, count: int) -> None:
        self._batches, self._count = batches, count

    def __call__(self, step: int) -> Sequence[torch.Tensor]:
        """All tensors of a step."""
        return [tensor for i in range(self._count) for tensor in self._batches(step * self._count + i)]


def _drawn(example: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if example.dim() == 0 or example.numel() == 0:
        return example
    return example.gather(0, torch.randint(len(example), example.shape, generator=generator))


def _batch_of(model: TracedModel | None, spec: str) -> int:
    """The size of a model's batch."""
    if model is None:
        raise SoapError(f"--data {spec}: expected a model that says how large a batch is")
    return int(model.graph.tensors[model.input_names[0]].shape[0])


def _callable(spec: str) -> Callable[[], Any]:
    module, _, name = spec.partition(":")
    if module == "zoo" and name:
        return partial(zoo.batches, spec)
    if not module or not name:
        raise SoapError(f"--data {spec}: expected package.module:callable, which yields one sequence of tensors per step")
    try:
        found: Callable[[], Any] = getattr(from_here(module), name)
    except (ImportError, AttributeError) as cause:
        raise SoapError(f"--data {spec}: {cause}; expected package.module:callable that can be imported from here") from None
    if not callable(found):
        raise SoapError(f"--data {spec}: {type(found).__name__} cannot be called; expected a callable that yields batches")
    return found
