"""Communications that start while a segment's backward pass goes on: in order, each when its gradient is complete."""

from __future__ import annotations

import gc
import weakref

from soap.runtime.program.actions import WHOLE_STEP, ActionKind, MicroBatch
from soap.runtime.step.early_start import EarlyStart, Key, SyncSchedule

SUM, FIRST, SECOND = (ActionKind.SYNC, 0), (ActionKind.COLLECT, 1), (ActionKind.SYNC, 2)


class _Starter:
    def __init__(self) -> None:
        self.started: list[Key] = []
        self.early = EarlyStart(self.start)

    def start(self, kind: ActionKind, subject: int) -> None:
        self.started.append((kind, subject))


def _schedule(*always: Key) -> SyncSchedule:
    """Segment 0 is followed by what is collected within hosts, a sum and a push; the first of them waits for two contributions. ``always``:
    those that also start before the last micro-batch."""
    return SyncSchedule({FIRST[1]: 2, SUM[1]: 1, SECOND[1]: 0}, {0: (FIRST, SUM, SECOND)}, {0: always})


def test_communications_start_in_the_order_of_the_program() -> None:
    starter = _Starter()
    early = starter.early
    with early.step(_schedule(), WHOLE_STEP):
        with early.segment(1):
            early.arrived(FIRST[1])
        assert starter.started == []
        with early.segment(0):
            early.arrived(SUM[1])
            assert starter.started == []  # complete, and not the first
            early.arrived(FIRST[1])
            assert starter.started == [FIRST, SUM, SECOND]  # nothing of this rank's own is in the last one


def test_nothing_starts_before_the_last_micro_batch_or_outside_of_steps() -> None:
    starter = _Starter()
    early = starter.early
    with early.step(_schedule(), MicroBatch(0, 2)), early.segment(0):
        for key in (FIRST, FIRST, SUM):
            early.arrived(key[1])
    early.arrived(FIRST[1])
    with early.step(_schedule(), MicroBatch(1, 2)):
        with early.segment(0):
            early.arrived(SUM[1])
        early.arrived(FIRST[1])
        early.arrived(FIRST[1])  # the segment is over: its own actions start what is left
    assert starter.started == []


def test_what_leaves_with_every_micro_batch_starts_in_each() -> None:
    starter = _Starter()
    with starter.early.step(_schedule(FIRST), MicroBatch(0, 2)), starter.early.segment(0):
        for key in (FIRST, FIRST, SUM):
            starter.early.arrived(key[1])
    assert starter.started == [FIRST]


def test_who_starts_them_is_not_kept_alive() -> None:
    starter = _Starter()
    early = starter.early
    reference = weakref.ref(starter)
    gc.disable()
    try:
        del starter
        assert reference() is None and not early.is_open
    finally:
        gc.enable()
