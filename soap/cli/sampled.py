"""Training data whose samples can be asked for by number, so that each rank reads only its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset

from soap.errors import SoapError
from soap.plan.samples import Samples, joined
from soap.runtime.inputs import Given, PartBatch, taken

if TYPE_CHECKING:
    from soap.data import Preprocessed
    from soap.runtime.trainer import Evaluation, Trainer

Batches = Callable[[int], Sequence[torch.Tensor]]
Parts = Callable[[int, Mapping[str, Samples]], list[PartBatch]]
"""(step, what the rank reads of each input) -> its part of each of the step's batches."""


def by_rank(batches: Batches, trainer: Trainer | Evaluation) -> Callable[[int], Sequence[Given]]:
    """The batches as a trainer is given them: only what its rank reads, if single samples can be asked for (``parts``); else in full."""
    parts = parts_of(batches)
    return batches if parts is None else _Parts(parts, trainer.samples())


class _Parts:
    def __init__(self, parts: Parts, samples: Mapping[str, Samples]) -> None:
        self._parts, self._samples = parts, samples

    def __call__(self, step: int) -> list[PartBatch]:
        return self._parts(step, self._samples)


def parts_of(batches: Batches) -> Parts | None:
    """How parts of these batches are read; None if only whole batches can be."""
    found: Parts | None = getattr(batches, "parts", None)
    return found


class NumberedBatches:
    """Batches of ``size`` samples each, in their order, of a source of ``count`` samples; a smaller last one is left out, then it begins
    again. ``read``: the tensors of some samples by number, ascending, in the order of the model's inputs, samples in dimension 0."""

    def __init__(self, spec: str, read: Callable[[Sequence[int]], Any], count: int, size: int) -> None:
        if count < size:
            raise SoapError(f"--data {spec}: {count} samples; expected at least {size}, a batch")
        self._spec, self._read, self._size = spec, read, size
        self._batches = count // size

    def __call__(self, step: int) -> Sequence[torch.Tensor]:
        """The batch of a step."""
        return self._at(step, ((0, self._size),))

    def parts(self, step: int, samples: Mapping[str, Samples]) -> list[PartBatch]:
        """What a rank reads of the batch of a step. Each sample is asked for once, whichever inputs the rank reads of it."""
        whole = Samples(0, self._size, ((0, self._size),))
        wanted = [whole if read.dim is None else read for read in samples.values()]
        together = joined(interval for read in wanted for interval in read.intervals) or ((0, 1),)  # which tells the shapes
        found = self._at(step, together)
        if len(found) != len(wanted):
            raise SoapError(f"--data {self._spec}: a batch of {len(found)} tensors; expected {len(wanted)}: {', '.join(samples)}")
        there = Samples(0, self._size, together)
        here = [Samples(0, there.count, tuple(map(there.place, read.intervals))) for read in wanted]
        return [PartBatch([taken(tensor, read) for tensor, read in zip(found, here, strict=True)], self._size)]

    def _at(self, step: int, intervals: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
        first = step % self._batches * self._size
        return tensors_of(self._spec, self._read([first + i for start, stop in intervals for i in range(start, stop)]))


def numbered(spec: str, made: Any, size: int) -> NumberedBatches | None:
    """The batches of a torch dataset whose samples have numbers; None if it is none, or can only be read from its beginning."""
    if not isinstance(made, Dataset) or isinstance(made, IterableDataset):
        return None
    from soap.elastic.worker import OfDataset

    return NumberedBatches(spec, OfDataset(made).batch, len(made), size)  # type: ignore[arg-type]


def chronological(spec: str, data: Preprocessed, size: int) -> NumberedBatches:
    """The batches of what ``soap-preprocess`` wrote."""
    return NumberedBatches(spec, lambda numbers: data.at(np.asarray(numbers, np.int64)), data.rows, size)


def tensors_of(spec: str, batch: Any) -> list[torch.Tensor]:
    """The tensors of a batch of a user's. SoapError if there is something else."""
    items = batch if isinstance(batch, Iterable) and not isinstance(batch, torch.Tensor) else [batch]
    tensors: list[torch.Tensor] = []
    for item in items:
        if not isinstance(item, torch.Tensor):
            raise SoapError(f"--data {spec}: a batch holds {type(item).__name__}; expected a sequence of tensors per step")
        tensors.append(item)
    return tensors
