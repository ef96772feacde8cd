"""Preprocessing in the test's own process: random degrees of parallelism, nodes, orders of completion, and runs that are cut short."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from soap.preprocessing.engine import Options, Summary, run
from soap.preprocessing.manager import Limits, Machine, Manager, Sample, State
from soap.preprocessing.node import InProcess, Node, NodesTogether
from soap.preprocessing.spec import Spec
from soap.preprocessing.work import Done, Task, Work


class Cut(Exception):
    """The run ended here."""


@dataclass
class Drawn(Manager):
    """Limits drawn anew each time."""

    draw: random.Random = field(default_factory=lambda: random.Random(0))

    def __post_init__(self) -> None:
        Manager.__init__(self)

    def limits(self, step: str, state: State, sample: Sample) -> Limits:
        units, chunks = self.draw.randint(1, 4), self.draw.randint(1, 4)
        return Limits(units, chunks, units * chunks, "drawn", pressed=state.running > 1 and self.draw.random() < 0.1)


class Fixed(Machine):
    """Asks nobody."""

    def sample(self, own: object) -> Sample:
        return Sample(2, 0, 2**33, 2**34, 2**40)


class Ending(InProcess):
    """Does tasks in an order that is drawn, and is cut short after so many."""

    def __init__(self, work: Work, order: random.Random, left: list[int]) -> None:
        super().__init__(work)
        self._order, self._left = order, left

    def wait(self, limit_s: float) -> Sequence[Any]:
        if self._left[0] == 0:
            raise Cut
        self._left[0] -= 1
        if self._begun:
            self._begun.insert(0, self._begun.pop(self._order.randrange(len(self._begun))))
        return super().wait(limit_s)


def preprocess(
    spec: Spec, inputs: Sequence[Path], out: Path, options: Options, *, seed: int = 0, nodes: int = 1, tasks: int = -1
) -> Summary:
    """``tasks``: after so many the run is cut short."""
    draw, left = random.Random(seed), [tasks]

    def make(work: Work) -> NodesTogether:
        work_nodes = [Node(Ending(work, draw, left), Drawn(draw=draw), Fixed(work.path)) for _ in range(nodes)]
        return OneByOne(work_nodes)

    return run(spec, inputs, out, options, make)


class OneByOne(NodesTogether):
    """Nodes one after the other, so that one random order decides everything."""

    def run(self, tasks: Sequence[Sequence[Task]]) -> list[Done]:
        parts = [node.run(own) for node, own in reversed(list(zip(self._nodes, tasks, strict=True)))]
        return [done for part in parts for done in part]


def result(out: Path, spec: Spec) -> dict[str, Any]:
    """As ``reference`` gives it."""
    found: dict[str, Any] = {name: np.load(out / f"{name}.npy") for name in ("labels", "numbers", "categories")}
    found["values"], found["counts"] = {}, {}
    for name, columns in spec.dictionaries.items():
        values = np.load(out / "dictionaries" / f"{name}.values.npy")
        if columns[0].kind == "string":
            bounds = np.load(out / "dictionaries" / f"{name}.bounds.npy")
            found["values"][name] = [values[a:b].tobytes() for a, b in itertools.pairwise(bounds)]
        else:
            found["values"][name] = values.tolist()
        found["counts"][name] = np.load(out / "dictionaries" / f"{name}.counts.npy").tolist()
    return found


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name in ("labels", "numbers", "categories"):
        assert found[name].dtype == expected[name].dtype
        assert found[name].tobytes() == expected[name].tobytes()
        assert found[name].shape == expected[name].shape
    assert found["values"] == expected["values"]
    assert found["counts"] == expected["counts"]


def files_of(out: Path) -> dict[str, bytes]:
    """Every file of a result by name."""
    return {str(path.relative_to(out)): path.read_bytes() for path in sorted(out.rglob("*")) if path.is_file() and path.suffix != ".jsonl"}
