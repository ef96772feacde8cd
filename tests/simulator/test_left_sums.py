"""Sums that a device takes part in but does not read, and sums that are scattered: by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from soap.plan.memory_kinds import MemoryKind
from soap.simulator.memory.left_sums import left_until
from soap.simulator.memory.plan_arrays import MESSAGE
from soap.simulator.memory.played import NONE
from soap.simulator.memory.spans import NEVER
from tests.simulator.reference_memory.ledger import Ledger

PARTS, CELL = 10, 3


@pytest.mark.parametrize("received", [2, 12])
def test_a_scattered_sum_is_packed_when_its_parts_have_gone(received: int) -> None:
    """Either the parts and their sum are the most, or the sum, what is sent and received of it, and the own cell."""
    plan: Any = SimpleNamespace(device_count=1, accelerators=frozenset())
    ledger = Ledger(plan, 100)
    ledger.hold(0, 0, 50, PARTS, MemoryKind.KEPT, late=True)
    ledger.hold(0, 50, 50, PARTS, MemoryKind.BUFFERS, early=True, over=True)
    ledger.hold(0, 50, 90, CELL, MemoryKind.KEPT, made=True)
    ledger.hold(0, 50, 60, received, MemoryKind.BUFFERS, made=True)
    ledger.send(0, 50, 100, PARTS - CELL, made=True)
    ledger.hold(0, 50, 70, PARTS, MemoryKind.KEPT)  # the next pass begins when the sum has been cut
    (curve,) = ledger.curves()
    assert curve.peak_bytes == max(2 * PARTS, PARTS + CELL + received + PARTS - CELL)
    assert curve.bytes_held[-1] == 0


def left(looks: tuple[int, ...], *, reads: bool = True, waits: bool = True) -> int:
    """Until when device 0 keeps a sum that devices 0 and 1 make until 20, and that 1 reads. Then 1 sends something to 0, of what it has
    read or of something else; the pass of 0 that reads it begins at 30. ``waits``: whether ranks wait for what 1 reads. ``looks``: when
    device 0 sends something. All is over at 100."""
    tables: Any = SimpleNamespace(
        sum_devices=SimpleNamespace(sum=longs(0, 0), device=longs(0, 1)),
        tiles=SimpleNamespace(device=longs(0, 1, 1, 0)),
        holdings=SimpleNamespace(device=longs(*(0 for _ in looks))),
        fetches=SimpleNamespace(device=longs(*(1 for _ in looks))),
        pieces=SimpleNamespace(holding=np.arange(len(looks)), fetch=np.arange(len(looks)), carrier=np.arange(len(looks))),
        carriers=SimpleNamespace(pattern=longs(*(MESSAGE for _ in looks))),
    )
    spans: Any = SimpleNamespace(end=100, brought_start=longs(*looks), returned_start=longs(*(NEVER for _ in looks)), summed_end=longs(20))
    pairs = longs(2, 2, *((3,) if reads else ()), 4), longs(0, 1, *((2,) if reads else ()), 3)
    start = longs(0, 0, 10, 20 if waits else 15, 30)
    played: Any = SimpleNamespace(
        tile=longs(0, 1, NONE, 2, 3), start=start, end=start + 10, summed=longs(2),
        waits_of=lambda _: pairs,
    )  # fmt: skip
    (found,) = left_until(tables, spans, played, longs(0), longs(100))
    return int(found)


def longs(*numbers: int) -> Any:
    return np.array(numbers, np.int64)


@pytest.mark.parametrize(("looks", "over"), [((5, 33, 70), 33), ((5, 30), 30), ((5, 25), 100), ((), 100)])
def test_a_sum_is_kept_until_its_device_looks_after_something_has_followed_from_it(looks: tuple[int, ...], over: int) -> None:
    assert left(looks) == over


def test_a_sum_from_which_nothing_follows_for_certain_is_kept_to_the_last() -> None:
    assert left((5, 33, 70), reads=False) == 100
    assert left((5, 33, 70), waits=False) == 100
