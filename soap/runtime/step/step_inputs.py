"""What the tiles of a step read that is there before it begins: inputs, constants and what buffers hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from soap.model.regions import Box
from soap.plan.samples import Samples
from soap.runtime.program.prepared import Part, Source


@dataclass(frozen=True)
class OwnSamples:
    """Where a rank's tiles find their regions if the rank is given only the samples that it reads. ``samples``: by input."""

    samples: Mapping[str, Samples]
    _parts: dict[tuple[str, Box], Part] = field(default_factory=dict, repr=False)

    def part(self, source: Source) -> Part:
        """What to cut from the tensor that the rank was given."""
        read = self.samples.get(source.tensor)
        if read is None or read.dim is None:
            return source.part
        key = source.tensor, source.box
        if key not in self._parts:
            here = [*source.box]
            here[read.dim] = read.place(source.box[read.dim])
            self._parts[key] = tuple(slice(start, stop) for start, stop in here)
        return self._parts[key]


@dataclass(frozen=True)
class StepInputs:
    """Inputs, constants and state by name, on this rank's device. ``own``: inputs have only the samples that the rank reads; None: all."""

    named: Mapping[str, torch.Tensor]
    own: OwnSamples | None = None

    def read(self, source: Source) -> torch.Tensor:
        """The region that a tile reads; not of an activation."""
        part = source.part if self.own is None else self.own.part(source)
        tensor = self.named[source.tensor]
        return tensor if part is None else tensor[part]
