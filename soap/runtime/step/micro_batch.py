"""The place of a micro-batch in its step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Micro-batch ``number``, from 0 on, of the ``count`` in a step.

    Gradients are added up over a step's micro-batches and synchronized with the last one: they belong to the mean of the losses, times
    ``scale``.
    """

    number: int = 0
    count: int = 1
    scale: float = 1.0

    @property
    def share(self) -> float:
        """The gradient of its loss."""
        return self.scale / self.count

    @property
    def first(self) -> bool:
        """Whether it is the step's first: gradients start from nothing."""
        return self.number == 0

    @property
    def last(self) -> bool:
        """Whether it is the step's last: gradients are complete after it."""
        return self.number == self.count - 1


WHOLE_STEP = MicroBatch()
