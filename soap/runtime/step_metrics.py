"""What a training step shows, for whoever logs it: ``TrainingOptions.on_step``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """One step of training, as rank 0 saw it.

    ``step``: its number, from 1; a training that goes on from a checkpoint counts on. ``loss``: of the whole batch. ``seconds``: from the
    step's beginning to its end on this rank; a GPU may still be at work then. ``learning_rates``: of the optimizer's parameter groups in
    this step; empty if rank 0 updates no parameter. ``gradient_norm``: before clipping; None without clipping.
    """

    step: int
    loss: float
    seconds: float
    learning_rates: tuple[float, ...] = ()
    gradient_norm: float | None = None

    def scalars(self) -> dict[str, float]:
        """Name -> number, as loggers take them: ``train/loss``, ``train/seconds``, ``train/learning_rate`` (with further groups
        ``train/learning_rate_1`` and so on), ``train/gradient_norm``."""
        found = {"train/loss": self.loss, "train/seconds": self.seconds}
        for number, rate in enumerate(self.learning_rates):
            found["train/learning_rate" + (f"_{number}" if number else "")] = rate
        return found if self.gradient_norm is None else {**found, "train/gradient_norm": self.gradient_norm}


OnStep: TypeAlias = Callable[[StepMetrics], None]
"""Called on rank 0 behind each step."""
