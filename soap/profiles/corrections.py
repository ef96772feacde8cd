"""Corrections by ``soap-compare --calibrate``: how much longer tasks of one kind take than predicted, in one environment.

A correction belongs to the measurements that were there when it was made. It multiplies whole answers, including what the runtime adds,
because a measured task is timed with that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from soap.profiles.entries import LARGEST

CORRECTED = "corrected by soap-compare --calibrate"
"""Words that reports add to the source of costs."""


@dataclass(frozen=True, slots=True)
class Correction:
    """A factor for answers of ``kind`` (an operator's, or ``entries.update_family``) in one direction. ``tasks``: number of measured
    tasks that it rests on. ``model``, ``strategy_hash``: the run that they were part of. ``calibrated_at``: ISO 8601, UTC."""

    kind: str
    backward: bool
    factor: float
    tasks: int
    model: str
    strategy_hash: str
    calibrated_at: str

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


def encode_correction(correction: Correction) -> dict[str, Any]:
    """The correction as plain JSON values, as CORRECTION_SCHEMA describes them; ``decode_correction`` reads them."""
    return asdict(correction)


def decode_correction(record: Mapping[str, Any]) -> Correction:
    """Read a correction from values that CORRECTION_SCHEMA allows."""
    return Correction(**record)


_WORD: dict[str, Any] = {"type": "string", "maxLength": 1000}
_PROPERTIES: dict[str, Any] = {
    "kind": {**_WORD, "minLength": 1},
    "backward": {"type": "boolean"},
    "factor": {"type": "number", "exclusiveMinimum": 0, "maximum": LARGEST},
    "tasks": {"type": "integer", "minimum": 1, "maximum": LARGEST},
    "model": _WORD,
    "strategy_hash": _WORD,
    "calibrated_at": {"type": "string", "maxLength": 40},
}
CORRECTION_SCHEMA: dict[str, Any] = {
    "type": "object", "properties": _PROPERTIES, "required": list(_PROPERTIES), "additionalProperties": False,
}  # fmt: skip
"""JSON schema of an encoded correction."""
