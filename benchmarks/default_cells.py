"""What ``benchmarks.default_command`` keeps of each cell: one model on one cluster in one mode of the command. All cells are in one JSON
file, which is written again, as a whole or not at all, behind each; so a run that was interrupted goes on with what is missing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import inf
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from benchmarks import kept
from soap.errors import SoapError
from soap.measure.paired import gain

USUAL, FOUND, PEER = "data_parallel", "found", "DistributedDataParallel"
MODES: Mapping[str, Sequence[str]] = {
    "default": (),
    "unprofiled": ("--profile", "0"),
    "blind": ("--costs", "estimate", "--verify", "0", "--confidence", "0"),
}
"""Name -> options of the command."""
VERSION = 1

_TIMES = {"type": "object", "additionalProperties": {"type": "array", "items": {"type": "integer", "minimum": 1}, "minItems": 1}}
_SECONDS = {"type": ["number", "null"], "minimum": 0}
_CELL = {
    "type": "object",
    "properties": {
        **{key: {"type": "string"} for key in ("model", "cluster", "kept", "note", "machine")},
        "mode": {"enum": list(MODES)},
        "differs": {"type": "boolean"},
        **{key: _SECONDS for key in ("verifying_s", "others")},
        "seconds": {"type": "number", "minimum": 0},
        "times_ns": {**_TIMES, "required": [USUAL]},
        "draws_ns": {**_TIMES, "required": [USUAL]},
        "profiled": {"type": ["object", "null"], "properties": {"seconds": _SECONDS}},
        "sources": {"type": "object", "additionalProperties": {"type": "number"}},
    },
    "required": ["model", "cluster", "mode", "kept", "differs", "seconds", "times_ns", "draws_ns"],
    "additionalProperties": False,
}

Key = tuple[str, str, str]
"""Model, cluster, mode."""


class Ratio(NamedTuple):
    """How many times as fast one is as the other: the median of the rounds' ratios, and an interval around it by the sign test. Each bound
    holds with ``soap.measure.paired.CONFIDENCE``; 0 and infinity if there were too few rounds to tell."""

    median: float
    low: float
    high: float


SAME = Ratio(1.0, 1.0, 1.0)


def ratio_of(usual_ns: Sequence[int], other_ns: Sequence[int]) -> Ratio:
    """How many times as fast the other one is, from times of the same rounds."""
    forth, back = gain(usual_ns, other_ns), gain(other_ns, usual_ns)
    return Ratio(forth.ratio, forth.at_least, 1 / back.at_least if back.at_least else inf)


@dataclass(frozen=True)
class Foreseen:
    """What was measured (median of the rounds) of a plan, beside what each of the draws says by which it is decided: nanoseconds of a step,
    or the factor by which it is faster than data parallelism."""

    plan: str
    measured: float
    draws: tuple[float, ...]

    def between(self, share: float) -> tuple[float, float]:
        """The interval in the middle of the draws that has this share of them."""
        low, high = np.quantile(self.draws, ((1 - share) / 2, (1 + share) / 2))
        return float(low), float(high)

    def inside(self, share: float) -> bool:
        """Whether what was measured lies there."""
        low, high = self.between(share)
        return low <= self.measured <= high


@dataclass(frozen=True)
class Cell:
    """One model on one cluster in one mode.

    ``kept``: what the command took. ``differs``: whether that is another plan than data parallelism. ``seconds``: of the command, of which
    ``verifying_s`` for running plans. ``profiled``: what it says of measuring. None where it did neither. ``times_ns``: of each contender,
    round by round; ``FOUND`` only if it differs, ``PEER`` only if it could be run. ``draws_ns``: of our plans, times under the draws, by
    the costs that are known after the command. ``sources``: of these costs, shares of the compute time. ``note``: what is to be said of
    how ``DistributedDataParallel`` ran, or why not. ``others``: share of the cores that other programs used while plans were timed.
    """

    model: str
    cluster: str
    mode: str
    kept: str
    differs: bool
    seconds: float
    times_ns: Mapping[str, tuple[int, ...]]
    draws_ns: Mapping[str, tuple[int, ...]]
    profiled: Mapping[str, Any] | None = None
    verifying_s: float | None = None
    sources: Mapping[str, float] = field(default_factory=dict)
    note: str = ""
    machine: str = ""
    others: float | None = None

    @property
    def key(self) -> Key:
        """What it is of."""
        return self.model, self.cluster, self.mode

    @property
    def measuring_s(self) -> float | None:
        """Seconds that the command took for measuring; None if it did not."""
        return None if self.profiled is None else self.profiled.get("seconds")

    @property
    def taken(self) -> str:
        """Which of the contenders is the plan that the command took."""
        return FOUND if self.differs else USUAL

    @property
    def over_ours(self) -> Ratio:
        """The plan over our data parallelism; 1 if it is that."""
        return ratio_of(self.times_ns[USUAL], self.times_ns[FOUND]) if self.differs else SAME

    @property
    def over_peer(self) -> Ratio | None:
        """The plan over ``DistributedDataParallel``; None where that could not be run."""
        return ratio_of(self.times_ns[PEER], self.times_ns[self.taken]) if PEER in self.times_ns else None

    @property
    def times(self) -> list[Foreseen]:
        """Steps of our plans."""
        return [Foreseen(name, median(self.times_ns[name]), draws) for name, draws in self.draws_ns.items()]

    @property
    def gain(self) -> Foreseen | None:
        """How many times as fast as data parallelism the plan is; None if it is that."""
        if not self.differs:
            return None
        gains = [usual / own for usual, own in zip(self.draws_ns[USUAL], self.draws_ns[FOUND], strict=True)]
        return Foreseen(FOUND, self.over_ours.median, tuple(gains))

    @staticmethod
    def of(document: Mapping[str, Any]) -> Cell:
        """Of what stands in a file, checked before."""
        lists = {name: {own: tuple(times) for own, times in document[name].items()} for name in ("times_ns", "draws_ns")}
        return Cell(**{**document, **lists})

    def problem(self) -> str:
        """What does not fit together, in one line; empty if all does."""
        ours = {USUAL, FOUND} if self.differs else {USUAL}
        for name, times in (("times_ns", set(self.times_ns) - {PEER}), ("draws_ns", set(self.draws_ns))):
            if times != ours:
                return f"{name} of {', '.join(sorted(times))}; expected {', '.join(sorted(ours))}"
        for name, lists in (("times_ns", self.times_ns), ("draws_ns", self.draws_ns)):
            if len({len(own) for own in lists.values()}) > 1:
                return f"{name} of different lengths; expected as many of each contender"
        return ""


def read(path: Path) -> list[Cell]:
    """The cells of a file; none if there is no file. SoapError in one line if it is no such file."""
    cells = [Cell.of(own) for own in kept.read(path, _CELL, VERSION, "benchmarks.default_command")]
    for cell in cells:
        if problem := cell.problem():
            raise SoapError(f"results {str(path)!r}: {' '.join(cell.key)}: {problem}")
    return cells


def write(path: Path, cells: Iterable[Cell]) -> None:
    """Write them, a line for each cell; as a whole or not at all."""
    kept.write(path, map(asdict, cells), VERSION)
