"""Corrections by ``soap-compare --calibrate``: how much longer tasks of one kind take than predicted, in one environment.

A correction belongs to the measurements that were there when it was made. It multiplies whole answers, including what the runtime adds,
because a measured task is timed with that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from soap.model.json_text import Schema
from soap.profiles.entries import Count, Moment, Positive

CORRECTED = "corrected by soap-compare --calibrate"
"""Words that reports add to the source of costs."""


@dataclass(frozen=True, slots=True)
class Correction:
    """A factor for answers of ``kind`` (an operator's, or ``entries.update_family``) in one direction. ``tasks``: number of measured
    tasks that it rests on. ``model``, ``strategy_hash``: the run that they were part of. ``calibrated_at``: ISO 8601, UTC."""

    kind: Annotated[str, Schema(minLength=1, maxLength=1000)]
    backward: bool
    factor: Positive
    tasks: Count
    model: Annotated[str, Schema(maxLength=1000)]
    strategy_hash: Annotated[str, Schema(maxLength=1000)]
    calibrated_at: Moment

    @property
    def of(self) -> tuple[str, bool]:
        """Kind and direction: an environment has one correction of each."""
        return self.kind, self.backward

    @property
    def name(self) -> str:
        """Kind and direction in words, such as ``linear backward``, ``update of optimizers with 2 states``."""
        return named(self.kind, self.backward)


def named(kind: str, backward: bool) -> str:
    """Kind and direction in words."""
    if kind.startswith("<"):
        return f"update of optimizers with {kind.strip('<>').rpartition('-')[2]} states"
    return f"{kind} {'backward' if backward else 'forward'}"
