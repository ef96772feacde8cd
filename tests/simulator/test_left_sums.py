"""Sums that a device takes part in but does not read, and sums that are scattered: by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from soap.plan.memory_kinds import MemoryKind
from soap.simulator.tasks import Schedule, TaskKind
from tests.simulator.reference_memory.leaving import LeftSums
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


def graph(reads: bool) -> tuple[Any, Any, Any]:
    """Devices 0 and 1 make a sum that 1 reads. Then 1 sends something to 0, of what it has read or of something else."""
    name = "reduce y[0:4]#0"
    output = SimpleNamespace(tensor="y")
    reduction = SimpleNamespace(operator=0, output=0, replica=0, box=((0, 4),), devices=(0, 1), tiles=(0, 1), cells=())
    tiles = [SimpleNamespace(device=device) for device in (0, 1, 1, 0)]
    model = SimpleNamespace(operators=[SimpleNamespace(outputs=[output])])
    plan = SimpleNamespace(device_count=2, graph=model, reductions=[reduction], tiles=tiles, fetches=[], holdings=[])
    rows = [("a", 0, ()), ("b", 1, ()), (name, None, (0, 1)), ("c", 2, (2,) if reads else ()), ("d", 3, (3,))]
    tasks = [SimpleNamespace(name=one, tile=tile, predecessors=before, kind=TaskKind.FORWARD) for one, tile, before in rows]
    starts = np.array([0, 0, 10, 20, 30])
    return SimpleNamespace(plan=plan, tasks=tasks), Schedule(starts, starts + 10), plan


@pytest.mark.parametrize(("looks", "over"), [((5, 33, 70), 33), ((5, 25), 100), ((), 100)])
def test_a_sum_is_kept_until_its_device_looks_after_something_has_followed_from_it(
    looks: tuple[int, ...], over: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.simulator.reference_memory.leaving._looks", lambda spans: [list(looks), []])
    tasks, schedule, _ = graph(reads=True)
    spans: Any = None
    assert LeftSums(tasks, schedule, spans, [(0, 0)]).over(0, 0, 100) == over
    assert LeftSums(tasks, schedule, spans, []).over(0, 0, 100) == 100


def test_a_sum_from_which_nothing_follows_is_kept_to_the_last() -> None:
    tasks, schedule, _ = graph(reads=False)
    spans: Any = None
    assert LeftSums(tasks, schedule, spans, [(0, 0)]).over(0, 0, 100) == 100
