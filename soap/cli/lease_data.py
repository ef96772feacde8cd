"""Training data of workers without state: the batches that the ranks of an exact run get, in their order, each worker its part."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from soap import api
from soap.cli.batches import Batches, ConvertedBatches, DrawnBatches, batch_size, user_batches
from soap.cli.command import UsageError
from soap.cli.inputs import folder_of
from soap.data import Preprocessed
from soap.elastic.worker import OfDataset
from soap.model.batch import sample_dims
from soap.tracing.execute import TracedModel

ENDLESS = 2**40
"""Steps of data that never end."""


@dataclass
class PartsOfSteps:
    """Batches of whole steps, each cut into equal parts, one a worker; as samples for a dealer they count by parts. ``make``: makes the
    batches, once in each process. ``dims``: by input, the dimension of its samples; None: all have it whole."""

    make: Callable[[], Batches]
    workers: int
    dims: tuple[int | None, ...]
    _made: list[Batches] = field(default_factory=list, repr=False)

    def __len__(self) -> int:
        return ENDLESS * self.workers

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_made": []}

    def batch(self, indices: Sequence[int]) -> Sequence[torch.Tensor]:
        """See ``soap.elastic.worker.Batches``; one part is asked for."""
        (number,) = (int(index) for index in indices)
        if not self._made:
            self._made.append(self.make())
        step, part = divmod(number, self.workers)
        whole = self._made[0](step)
        if len(whole) != len(self.dims):
            raise UsageError(f"--data: a batch has {len(whole)} tensors; expected {len(self.dims)}, the model's inputs in their order")
        return [self._part(tensor, dim, part) for tensor, dim in zip(whole, self.dims, strict=True)]

    def _part(self, tensor: torch.Tensor, dim: int | None, part: int) -> torch.Tensor:
        if dim is None:
            return tensor
        if tensor.dim() <= dim or tensor.shape[dim] % self.workers:
            raise UsageError(
                f"--data: a batch of shape {[*tensor.shape]} for {self.workers} workers; expected samples in dimension {dim} to divide"
            )
        return tensor.chunk(self.workers, dim)[part].contiguous()


@dataclass
class Chronological:
    """The first ``samples`` of what ``soap-preprocess`` wrote, opened in each process. ``dtype``: replaces the numbers' own."""

    folder: str
    samples: int
    dtype: torch.dtype | None
    _opened: list[OfDataset] = field(default_factory=list, repr=False)

    def __len__(self) -> int:
        return self.samples

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": []}

    def batch(self, indices: Sequence[int]) -> Sequence[torch.Tensor]:
        """See ``soap.elastic.worker.Batches``."""
        if not self._opened:
            self._opened.append(OfDataset(Preprocessed(self.folder)))
        found = self._opened[0].batch(indices)
        return [own.to(self.dtype) if self.dtype is not None and own.is_floating_point() else own for own in found]


def lease_data(
    model: str,
    reading: Mapping[str, Any],
    planned: TracedModel,
    data: str | None,
    *,
    workers: int,
    batch: int,
    seed: int,
    dtype: str | None,
    dims: Mapping[str, int] | None = None,
) -> tuple[PartsOfSteps | Chronological, int]:
    """The data of ``--data``, and how many of its samples, as it counts them, a lease has. ``planned``: the model without values.
    ``dims``: by input, the dimension that is divided among workers, if not those that exact plans divide."""
    kept = None if dtype is None else getattr(torch, dtype)
    folder = folder_of(data)
    if folder is not None:
        rows, step = Preprocessed(folder).rows, workers * batch
        if rows < step:
            raise UsageError(f"--data {data}: {rows} samples; expected at least {step}, a step of {workers} workers with {batch} each")
        return Chronological(folder, rows - rows % step, kept), batch
    dims = sample_dims(planned.graph) if dims is None else dims
    cut = tuple(dims.get(name) for name in planned.input_names)
    make: Callable[[], Batches]
    if data is None:
        drawn = DrawnBatches(api.load(model, **reading), seed)
        make = partial(_same, drawn)
    else:
        make = partial(user_batches, data, batch_size(planned))
    return PartsOfSteps(make if kept is None else partial(_converted, make, kept), workers, cut), 1


def _same(batches: Batches) -> Batches:
    return batches


def _converted(make: Callable[[], Batches], dtype: torch.dtype) -> Batches:
    return ConvertedBatches(make(), dtype)
