"""Schedules by name: ``1f1b``, ``interleaved:2`` (two chunks on each stage), ``gpipe:2:v`` (and laid out like a V), ``zb-v`` (by itself).

``SCHEDULES`` is the only list of them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from soap.errors import ScheduleError, did_you_mean
from soap.schedules import accumulation, dualpipe_v, gpipe, interleaved, one_f_one_b, v_half, v_min, zb_1p, zb_2p, zb_h1, zb_v
from soap.schedules.contract import PLACEMENTS, Placement, Schedule, Shape
from soap.schedules.table import Table, shown

SCHEDULES: tuple[Schedule, ...] = tuple(
    module.SCHEDULE
    for module in (accumulation, gpipe, one_f_one_b, interleaved, zb_h1, zb_1p, zb_2p, zb_v, v_half, v_min, dualpipe_v)
)

_CHUNKS = re.compile(r"[1-9]\d{0,5}", re.ASCII)


@dataclass(frozen=True, slots=True)
class NamedSchedule:
    """A schedule with what stands behind its name. Prints as ``parse`` reads it."""

    schedule: Schedule
    chunks: int = 1
    placement: Placement = "loop"

    def table(self, stages: int, microbatches: int) -> Table:
        """The table for so many stages and micro-batches. ScheduleError in one line if there is none."""
        return self.schedule.table(Shape(stages, microbatches, self.chunks, self.placement))

    def __str__(self) -> str:
        placement = "" if self.placement == self.schedule.placements[0] else f":{self.placement}"
        return f"{self.schedule.name}{f':{self.chunks}' if self.chunks != self.schedule.usual_chunks or placement else ''}{placement}"


def parse(text: str, known: Sequence[Schedule] = SCHEDULES) -> NamedSchedule:
    """``NAME``, ``NAME:CHUNKS`` or ``NAME:CHUNKS:PLACEMENT``. ScheduleError in one line if there is no such schedule among ``known``."""
    name, *rest = text.split(":")
    schedule = next((schedule for schedule in known if schedule.name == name), None)
    if schedule is None:
        near = did_you_mean(name, [own.name for own in known])
        raise ScheduleError(f"no schedule is named {shown(text)}; expected one of {forms(known)}{near}")
    if len(rest) > 2 or (rest and not _CHUNKS.fullmatch(rest[0])):
        raise ScheduleError(f"schedule {shown(text)}; expected {form(schedule)}")
    placement = next((known for known in PLACEMENTS if known == rest[1]), None) if len(rest) > 1 else schedule.placements[0]
    if placement not in schedule.placements:
        raise ScheduleError(f"schedule {shown(text)}; expected {form(schedule)}")
    chunks = int(rest[0]) if rest else schedule.usual_chunks
    if not schedule.fewest_chunks <= chunks <= schedule.most_chunks:
        raise ScheduleError(f"schedule {shown(text)} has {chunks} chunk{'s' * (chunks > 1)} on each stage; expected {form(schedule)}")
    return NamedSchedule(schedule, chunks, placement)


def form(schedule: Schedule) -> str:
    """How a schedule is written, such as ``interleaved:N``."""
    if schedule.most_chunks == schedule.fewest_chunks:
        return schedule.name
    placements = "".join(f" or {schedule.name}:N:{other}" for other in schedule.placements[1:])
    one = "" if schedule.fewest_chunks > 1 else f"{schedule.name} or "
    return f"{one}{schedule.name}:N{placements} (N chunks on each stage, {schedule.fewest_chunks} or more)"


def forms(known: Sequence[Schedule] = SCHEDULES) -> str:
    """All that ``parse`` accepts, in words."""
    chunks = {True: ":N", False: "[:N]"}
    return ", ".join(s.name + (chunks[s.fewest_chunks > 1] if s.most_chunks > s.fewest_chunks else "") for s in known)
