"""Communications that start while a segment's backward pass goes on: in order, each when its gradient is complete."""

from __future__ import annotations

import gc
import weakref

from soap.runtime.program.actions import ActionKind
from soap.runtime.program.program import compile_program
from soap.runtime.step.early_start import EarlyStart, Key, SyncSchedule
from soap.runtime.step.micro_batch import WHOLE_STEP, MicroBatch
from tests.graph_builder import mlp
from tests.runtime.plans import plan_of, split

SUM, FIRST, SECOND = (ActionKind.SYNC, 0), (ActionKind.PUSH, 0), (ActionKind.PUSH, 1)


class _Starter:
    def __init__(self, early: EarlyStart) -> None:
        self.started: list[Key] = []
        early.by(self.sum, ActionKind.SYNC)
        early.by(self.push, ActionKind.PUSH)

    def sum(self, subject: int) -> None:
        self.started.append((ActionKind.SYNC, subject))

    def push(self, subject: int) -> None:
        self.started.append((ActionKind.PUSH, subject))


def _schedule() -> SyncSchedule:
    """Segment 0 is followed by a push, a sum and another push; the first push waits for two contributions."""
    schedule = SyncSchedule(compile_program(plan_of(mlp(), split((0, 1), b=2))), 0)
    schedule.contributions = {FIRST: 2, SUM: 1, SECOND: 0}
    schedule.follow = {0: (FIRST, SUM, SECOND)}
    return schedule


def test_communications_start_in_the_order_of_the_program() -> None:
    early = EarlyStart()
    starter = _Starter(early)
    with early.step(_schedule(), WHOLE_STEP):
        with early.segment(1):
            early.arrived(FIRST)
        assert starter.started == []
        with early.segment(0):
            early.arrived(SUM)
            assert starter.started == []  # complete, and not the first
            early.arrived(FIRST)
            assert starter.started == [FIRST, SUM, SECOND]  # nothing of this rank's own is in the last one


def test_nothing_starts_before_the_last_micro_batch_or_outside_of_steps() -> None:
    early = EarlyStart()
    starter = _Starter(early)
    with early.step(_schedule(), MicroBatch(0, 2)), early.segment(0):
        for key in (FIRST, FIRST, SUM):
            early.arrived(key)
    early.arrived(FIRST)
    with early.step(_schedule(), MicroBatch(1, 2)):
        with early.segment(0):
            early.arrived(SUM)
        early.arrived(FIRST)
        early.arrived(FIRST)  # the segment is over: its own actions start what is left
    assert starter.started == []


def test_who_starts_them_is_not_kept_alive() -> None:
    early = EarlyStart()
    starter = _Starter(early)
    reference = weakref.ref(starter)
    gc.disable()
    try:
        del starter
        assert reference() is None
    finally:
        gc.enable()
