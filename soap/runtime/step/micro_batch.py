"""Which part of a training step a batch is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Which part of a step a batch is: of all ``count`` micro-batches, the one with this number.

    Gradients are added up over them, synchronized with the last, and are those of the mean of their losses.
    """

    number: int = 0
    count: int = 1

    @property
    def first(self) -> bool:
        """Whether gradients begin with it."""
        return self.number == 0

    @property
    def last(self) -> bool:
        """Whether gradients are complete behind it."""
        return self.number == self.count - 1


WHOLE_STEP = MicroBatch()
