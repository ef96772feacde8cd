"""The seam behind which schedules are: a shape, a contract, and the function that lists what stages do.

Each schedule is a file of its own with a ``SCHEDULE``; ``named`` lists them. All other code asks for the contract's properties, never for
the name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

from soap.errors import ScheduleError
from soap.schedules.table import MOST_ACTIONS, MOST_CHUNKS, MOST_MICROBATCHES, MOST_STAGES, Action, Table

Placement = Literal["loop", "v"]
"""How chunks lie on S stages. ``loop``: chunk c on stage c % S, so that each round begins at stage 0. ``v``: every other round goes back,
so that the last stage of a round has the first chunk of the next."""
PLACEMENTS: tuple[Placement, ...] = get_args(Placement)


@dataclass(frozen=True, slots=True)
class Shape:
    """What a schedule is made for. ScheduleError if a number is out of range.

    ``chunks``: of each stage.
    """

    stages: int
    microbatches: int
    chunks: int = 1
    placement: Placement = "loop"

    def __post_init__(self) -> None:
        most = (("stages", MOST_STAGES), ("microbatches", MOST_MICROBATCHES), ("chunks", MOST_CHUNKS // max(1, self.stages)))
        for name, limit in most:
            if not 1 <= getattr(self, name) <= limit:
                raise ScheduleError(f"{getattr(self, name)} {_WORDS[name]}; expected 1 to {limit}")
        if self.placement not in PLACEMENTS:
            raise ScheduleError(f"placement {self.placement!r}; expected one of {', '.join(PLACEMENTS)}")
        if 3 * self.chunk_count * self.microbatches > MOST_ACTIONS:
            product = f"{self.chunk_count} chunks x {self.microbatches} micro-batches"
            raise ScheduleError(f"{product} are too many; expected a product of at most {MOST_ACTIONS // 3}: use fewer micro-batches")

    @property
    def chunk_count(self) -> int:
        """Of all stages."""
        return self.stages * self.chunks

    def chunk(self, stage: int, local: int) -> int:
        """The chunk that a stage has in a round, from 0."""
        back = self.placement == "v" and local % 2
        return local * self.stages + (self.stages - 1 - stage if back else stage)

    def chunks_of(self, stage: int) -> list[int]:
        """A stage's chunks in the order of the forward pass."""
        return [self.chunk(stage, local) for local in range(self.chunks)]


def stage_by_stage(own: Callable[[Shape, int], Iterator[Action]]) -> Callable[[Shape], Iterable[Iterable[Action]]]:
    """The actions of all stages, from a function that lists those of one."""
    return partial(_stage_by_stage, own)


def _stage_by_stage(own: Callable[[Shape, int], Iterator[Action]], shape: Shape) -> Iterable[Iterable[Action]]:
    return (own(shape, stage) for stage in range(shape.stages))


_WORDS = {"stages": "stages", "microbatches": "micro-batches", "chunks": "chunks on each stage"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """What a schedule promises, and what it needs.

    ``name``: in commands and files. ``summary``: one line for people. ``actions``: of each stage, in order. ``fewest_chunks``,
    ``most_chunks``: on each stage. ``placements``: that it is made for. ``meets_barriers``: whether all micro-batches reach an operator
    before one goes on, whatever chunk it is in.
    """

    name: str
    summary: str
    actions: Callable[[Shape], Iterable[Iterable[Action]]]
    fewest_chunks: int = 1
    most_chunks: int = 1
    placements: tuple[Placement, ...] = ("loop",)
    meets_barriers: bool = False

    @property
    def usual_chunks(self) -> int:
        """Chunks on each stage where only its name is given."""
        return self.fewest_chunks if self.fewest_chunks == self.most_chunks else 1

    def table(self, shape: Shape) -> Table:
        """The table of a shape. ScheduleError in one line if this schedule does not serve it."""
        if not self.fewest_chunks <= shape.chunks <= self.most_chunks:
            expected = f"{self.fewest_chunks}" if self.most_chunks == self.fewest_chunks else f"{self.fewest_chunks} to {self.most_chunks}"
            raise ScheduleError(f"schedule {self.name!r} with {shape.chunks} chunks on each stage; expected {expected}")
        if shape.placement not in self.placements:
            raise ScheduleError(f"schedule {self.name!r} with placement {shape.placement!r}; expected {' or '.join(self.placements)}")
        return Table.of(self.actions(shape))
