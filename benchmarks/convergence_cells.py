"""What ``benchmarks.convergence`` keeps of each training, and which trainings there are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import kept
from benchmarks.convergence_tasks import TASKS

METHODS = ("dense", "bf16", "int8", "powersgd", "rgc", "rgc+asq", "chunked", "rgc:0.01", "rgc+asq:0.01")
"""``dense``, or as ``strategy.compression.parse`` takes them."""
PARTS = ("methods", "warm-ups", "batches")
"""Of the page."""
WARMED = ("rgc", "rgc+asq")
WARM_UPS = ("none", "dense", "density")
"""Without one; a tenth of the steps dense; a tenth of the steps at five falling densities."""
LARGER = 16
"""Times the task's batch: how far apart the batches of the paper's Table 2 are."""
IN_BATCHES: Mapping[str, Sequence[str]] = {"digits": ("dense", "rgc", "rgc+asq")}
"""Task -> methods that are trained with both."""
VERSION = 1

_SHARE = {"type": "number", "minimum": 0, "maximum": 1}
_CELL = {
    "type": "object",
    "properties": {
        "task": {"enum": list(TASKS)},
        "method": {"type": "string"},
        "warm_up": {"enum": list(WARM_UPS)},
        **{name: {"type": "integer", "minimum": 1} for name in ("batch", "steps")},
        "seed": {"type": "integer", "minimum": 0},
        "losses": {"type": "array", "items": {"type": "number"}, "minItems": 1},
        **{name: {"type": "number", "minimum": 0} for name in ("loss", "bytes_share", "seconds")},
        "error": _SHARE,
        **{name: {"anyOf": [_SHARE, {"type": "null"}]} for name in ("density", "union")},
    },
    "additionalProperties": False,
}
_CELL["required"] = list(_CELL["properties"])  # type: ignore[call-overload]


class Key(NamedTuple):
    """Which training."""

    task: str
    method: str
    warm_up: str
    batch: int
    steps: int
    seed: int


@dataclass(frozen=True)
class Cell:
    """A training. ``losses``: of each step. ``loss``, ``error``: of held-out data at the end. ``bytes_share``: what a rank sends in a step,
    of what it would send for dense gradients. ``density``: the share of a compressed parameter's elements that a rank has sent, ``union``:
    that all ranks together have, on average over parameters by size and over steps; None where a method sends a bit of each.
    ``seconds``: processor time."""

    task: str
    method: str
    warm_up: str
    batch: int
    steps: int
    seed: int
    losses: tuple[float, ...]
    loss: float
    error: float
    bytes_share: float
    density: float | None
    union: float | None
    seconds: float

    @property
    def name(self) -> str:
        """Of its task, with the number of steps if that is not the task's own."""
        return self.task if self.steps == TASKS[self.task].steps else f"{self.task}, {self.steps} steps"

    @property
    def key(self) -> Key:
        """Which training it is."""
        return Key(self.task, self.method, self.warm_up, self.batch, self.steps, self.seed)


def wanted(
    tasks: Sequence[str], methods: Sequence[str], seeds: int, steps: int | None = None, parts: Sequence[str] = PARTS
) -> Iterator[Key]:
    """All trainings of these parts of the page. ``steps``: instead of the tasks' own."""
    for name in tasks:
        task = TASKS[name]
        by_part = {
            "methods": [(own, "none", task.batch) for own in methods],
            "warm-ups": [(own, warm_up, task.batch) for own in methods if own in WARMED for warm_up in WARM_UPS[1:]],
            "batches": [(own, "none", LARGER * task.batch) for own in methods if own in IN_BATCHES.get(name, ())],
        }
        groups = [group for part, own in by_part.items() if part in parts for group in own]
        yield from (Key(name, *group, steps or task.steps, seed) for group in groups for seed in range(seeds))


def read(path: Path) -> list[Cell]:
    """The cells of a file; none if there is no file. SoapError in one line if it is no such file."""
    return [cell_of(own) for own in kept.read(path, _CELL, VERSION, "benchmarks.convergence")]


def write(path: Path, cells: Iterable[Cell]) -> None:
    """Write them, as a whole or not at all."""
    kept.write(path, map(asdict, cells), VERSION)


def cell_of(document: Mapping[str, Any]) -> Cell:
    """Of what stands in a file, checked before."""
    return Cell(**{**document, "losses": tuple(document["losses"])})
