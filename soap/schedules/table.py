"""A schedule as a table: for each stage, in order, what it computes of which chunk for which micro-batch.

A *stage* is a group of devices, a *chunk* the operators between two cuts of the model, of which a stage may have several; a *micro-batch*
is a part of the step's samples. ``2F0`` is the forward pass of chunk 2 for micro-batch 0. torch.distributed.pipelining writes the same;
there a chunk is called stage, and a stage rank.

A table may be wrong: ``checking`` says whether it can be executed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, Self

from soap.errors import ScheduleError

WEIGHTS = ("weights",)
SHARES = ("forward", "inputs", *WEIGHTS)
"""What there is to do of a chunk for a micro-batch: a forward pass, gradients of the inputs, which stages before wait for, and of the
weights (of which operators: ``strategy.division``)."""


class Work(NamedTuple):
    """What an action of a kind does. ``shares``: of ``SHARES``. ``behind``: the action of the same chunk and micro-batch that it waits for.
    """

    shares: tuple[str, ...]
    behind: Kind | None = None

    @property
    def gives_weights(self) -> float:
        """How much it does of all gradients of weights."""
        return len({*self.shares} & {*WEIGHTS}) / len(WEIGHTS)


Kind = Literal["F", "B", "I", "W"]
WORK: Mapping[Kind, Work] = {
    "F": Work(("forward",)),
    "B": Work(("inputs", *WEIGHTS), "F"),
    "I": Work(("inputs",), "F"),
    "W": Work(WEIGHTS, "I"),
}
"""All that is known of actions: whatever plays, keeps or runs them reads it here. A chunk has each share once."""
KINDS: tuple[Kind, ...] = tuple(WORK)
_LETTERS = "".join(KINDS)

MOST_STAGES, MOST_CHUNKS, MOST_MICROBATCHES = 4096, 2**16, 2**16
MOST_ACTIONS = 2**20
"""Of all stages together: above any real schedule, and few enough for memory."""

IDLE = "."
ACTION = rf"\d{{1,6}}[{_LETTERS}]\d{{1,6}}"
_ACTION = re.compile(rf"(\d{{1,6}})([{_LETTERS}])(\d{{1,6}})", re.ASCII)
_LONGEST_SHOWN = 40


class Action(NamedTuple):
    """What a stage computes at once: ``kind`` of a chunk for a micro-batch, both counted from 0. Prints as ``2F0``."""

    kind: Kind
    chunk: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.chunk}{self.kind}{self.microbatch}"


def lacking(done: Iterable[str]) -> Iterator[Kind]:
    """The kinds that do what is not among these shares, the fewest ones first."""
    missing = {*SHARES} - {*done}
    for kind, work in sorted(WORK.items(), key=lambda own: -len(own[1].shares)):
        if missing.issuperset(work.shares):
            yield kind
            missing -= {*work.shares}


def parse_action(text: str) -> Action:
    """The action that prints as ``text``. ScheduleError in one line if there is none."""
    match = _ACTION.fullmatch(text)
    if match is None:
        raise ScheduleError(f"{shown(text)} is no action; expected chunk, one of {', '.join(KINDS)}, and micro-batch, such as 2F0")
    kind = next(kind for kind in KINDS if kind == match[2])
    return Action(kind, int(match[1]), int(match[3]))


def shown(text: str) -> str:
    """Text of others in messages: quoted, and cut where it is long."""
    return repr(text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}…")


@dataclass(frozen=True)
class Table:
    """For each stage its actions in order. Prints as a grid, a row for each stage.

    ScheduleError if there is no stage, if a stage has no action, or if a number is out of range.
    """

    stages: tuple[tuple[Action, ...], ...]

    def __post_init__(self) -> None:
        if not 1 <= len(self.stages) <= MOST_STAGES:
            raise ScheduleError(f"a table with {len(self.stages)} stages; expected 1 to {MOST_STAGES}")
        if (total := sum(map(len, self.stages))) > MOST_ACTIONS:
            raise ScheduleError(f"a table with {total} actions; expected at most {MOST_ACTIONS}: use fewer micro-batches")
        for stage, actions in enumerate(self.stages):
            if not actions:
                raise ScheduleError(f"stage {stage} has no action; expected a chunk for each stage: leave the stage out")
            for action in actions:
                _require_in_range(stage, action)

    @classmethod
    def of(cls, stages: Iterable[Iterable[Action]]) -> Self:
        """A table of any nested sequences."""
        return cls(tuple(tuple(actions) for actions in stages))

    @cached_property
    def chunk_count(self) -> int:
        """How many chunks there are if none is left out."""
        return 1 + max(action.chunk for actions in self.stages for action in actions)

    @cached_property
    def microbatch_count(self) -> int:
        """How many micro-batches there are if none is left out."""
        return 1 + max(action.microbatch for actions in self.stages for action in actions)

    @cached_property
    def placement(self) -> tuple[int, ...]:
        """The stage of each chunk; -1 for a chunk that is on none."""
        found = [-1] * self.chunk_count
        for stage, actions in enumerate(self.stages):
            for action in actions:
                found[action.chunk] = stage
        return tuple(found)

    def __str__(self) -> str:
        return grid([[str(action) for action in actions] for actions in self.stages])


def _require_in_range(stage: int, action: Action) -> None:
    kind, chunk, microbatch = action
    if kind not in KINDS:
        raise ScheduleError(f"stage {stage} has an action of kind {kind!r}; expected one of {', '.join(KINDS)}")
    if not (0 <= chunk < MOST_CHUNKS and 0 <= microbatch < MOST_MICROBATCHES):
        limits = f"chunks from 0 to {MOST_CHUNKS - 1} and micro-batches from 0 to {MOST_MICROBATCHES - 1}"
        raise ScheduleError(f"stage {stage} has the action {action}; expected {limits}")


def grid(rows: Sequence[Sequence[str]], *, first: int = 0) -> str:
    """Cells in columns of equal width, behind the stage of each row. ``first``: the stage of the first row."""
    cell_width = max((len(cell) for row in rows for cell in row), default=1)
    name_width = len(f"stage {first + len(rows) - 1}")
    lines = []
    for stage, row in enumerate(rows, first):
        lines.append(" ".join([f"stage {stage}".ljust(name_width), *(cell.ljust(cell_width) for cell in row)]).rstrip())
    return "\n".join(lines)


ROWS_AROUND, CELLS_AROUND = 4, 6
"""How much of a large table a message shows around a cell, in each direction."""


def marked(table: Table, stage: int, position: int) -> str:
    """The grid around a cell, which stands between ``>`` and ``<``; all of it if it is small."""
    rows = range(max(0, stage - ROWS_AROUND), min(len(table.stages), stage + ROWS_AROUND + 1))
    start, end = max(0, position - CELLS_AROUND), position + CELLS_AROUND + 1
    cells = []
    for row in rows:
        actions = table.stages[row]
        texts = [f">{action}<" if (row, i) == (stage, position) else f" {action} " for i, action in enumerate(actions)]
        before = ["…"] if start else []
        behind = ["…"] if len(texts) > end else []
        cells.append([*before, *texts[start:end], *behind])
    return grid(cells, first=rows.start)
