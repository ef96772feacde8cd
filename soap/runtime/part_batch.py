"""A rank's part of a batch: the samples that its tiles read, and nothing of the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from soap.plan.samples import Samples


@dataclass(frozen=True)
class PartBatch:
    """What a rank is given of a batch of ``size`` samples, in place of the whole batch: for each of the model's inputs, in their order, the
    samples that ``Trainer.samples`` names, ascending along the dimension of samples; inputs without samples in full.
    """

    tensors: Sequence[torch.Tensor]
    size: int

    @classmethod
    def cut(cls, inputs: Sequence[torch.Tensor], samples: Mapping[str, Samples]) -> PartBatch:
        """The part of a whole batch that is at hand. ``samples``: what ``Trainer.samples`` gives for its size. Copies, so that the whole
        batch can go."""
        own = tuple(taken(tensor, read) for tensor, read in zip(inputs, samples.values(), strict=True))
        return cls(own, next((read.size for read in samples.values() if read.dim is not None), 0))

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> PartBatch:
        """The same part with each tensor changed: moved, or converted."""
        return replace(self, tensors=tuple(change(tensor) for tensor in self.tensors))


Given = torch.Tensor | PartBatch
"""What a step is given: the tensors of whole batches, or a part of each batch."""


def mapped(items: Sequence[Given], change: Callable[[torch.Tensor], torch.Tensor]) -> list[Given]:
    """What a step is given, with each tensor changed."""
    return [own.map(change) if isinstance(own, PartBatch) else change(own) for own in items]


def taken(tensor: torch.Tensor, read: Samples) -> torch.Tensor:
    """The samples of an input that a rank reads, as a copy; an input without samples in full."""
    if read.dim is None:
        return tensor
    if not read.intervals:
        return tensor.narrow(read.dim, 0, 0).clone()
    return torch.cat([tensor.narrow(read.dim, start, stop - start) for start, stop in read.intervals], read.dim)
