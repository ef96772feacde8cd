"""The clock of a slower device, against a made-up processor's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from soap.emulation import placement
from soap.runtime.system import clock

STATISTICS = Path("/proc/thread-self/schedstat")


class Machine:
    """Wall and processor time in ns, which pass when the test says so, and by sleeping."""

    def __init__(self) -> None:
        self.wall = self.used = self.queued = 0
        self.slept: list[int] = []

    def compute(self, ns: int, beside: int = 0) -> None:
        """``beside``: another process has the core for so long."""
        self.wall += ns + beside
        self.used += ns

    def sleep(self, seconds: float) -> None:
        self.slept.append(round(seconds * 1e9))
        self.wall += self.slept[-1]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    made = Machine()
    monkeypatch.setattr(placement.time, "perf_counter_ns", lambda: made.wall)
    monkeypatch.setattr(placement.time, "thread_time_ns", lambda: made.used)
    monkeypatch.setattr(placement.time, "sleep", made.sleep)
    monkeypatch.setattr(placement.VirtualClock, "_queued", lambda _: made.queued)
    placement.set_share(0.25)
    yield made
    placement.set_share(None)


def test_computing_takes_as_long_as_on_a_part_of_a_core(machine: Machine) -> None:
    machine.compute(1_000_000)
    clock.catch_up()
    assert machine.wall == 4_000_000
    machine.compute(2_000_000, beside=3_000_000)
    clock.catch_up()
    assert machine.wall == 12_000_000
    assert clock.busy_ns() == 12_000_000


def test_what_is_done_while_it_is_paused_is_not_the_devices_work(machine: Machine) -> None:
    machine.compute(1_000_000)
    with clock.paused():
        assert machine.wall == 4_000_000  # what had been begun was done
        machine.compute(5_000_000)
        clock.catch_up()
        assert clock.busy_ns() is None
    machine.compute(1_000_000)
    clock.catch_up()
    assert machine.wall == 4_000_000 + 5_000_000 + 4_000_000
    assert clock.busy_ns() == 8_000_000


def test_waiting_saves_nothing_up(machine: Machine) -> None:
    clock.catch_up()
    machine.wall += 50_000_000  # for a message
    clock.resume()
    machine.compute(1_000_000)
    clock.catch_up()
    assert machine.wall == 54_000_000


def test_what_has_come_counts_from_then_though_others_have_the_core(machine: Machine) -> None:
    clock.catch_up()
    machine.wall += 8_000_000  # 5 until the message has come, 3 until the thread runs
    machine.queued += 3_000_000
    clock.resume()
    machine.compute(1_000_000)
    clock.catch_up()
    assert machine.wall == 9_000_000


def test_being_queued_before_a_wait_is_no_part_of_it(machine: Machine) -> None:
    machine.compute(1_000_000, beside=2_000_000)
    machine.queued += 2_000_000
    clock.catch_up()
    machine.wall += 5_000_000
    clock.resume()
    machine.compute(1_000_000)
    clock.catch_up()
    assert machine.wall == 13_000_000


@pytest.mark.skipif(not STATISTICS.exists(), reason="this kernel does not tell for how long threads were queued")
def test_the_kernel_says_how_long_this_thread_was_queued() -> None:
    before = int(STATISTICS.read_text().split()[1])
    queued = placement.VirtualClock(0.5)._queued()
    assert before <= queued <= int(STATISTICS.read_text().split()[1])


def test_being_late_is_made_up_for(machine: Machine) -> None:
    machine.compute(1_000_000, beside=9_000_000)  # 6 ms later than it should be
    clock.catch_up()
    machine.compute(2_000_000)
    clock.catch_up()
    assert machine.wall == 12_000_000 and machine.slept == []


def test_the_devices_time_is_read_without_sleeping(machine: Machine) -> None:
    machine.compute(1_000_000)
    assert clock.now_ns() == 4_000_000
    machine.compute(1_000_000, beside=500_000)
    assert clock.now_ns() == 8_000_000 and machine.wall == 2_500_000 and machine.slept == []
    clock.catch_up()
    assert machine.wall == 8_000_000 and clock.busy_ns() == 8_000_000
    machine.wall += 5_000_000  # for a message
    clock.resume()
    assert clock.now_ns() == 13_000_000


def test_short_sleeps_are_joined(machine: Machine) -> None:
    for _ in range(4):
        machine.compute(10_000)
        clock.catch_up()
    assert machine.slept == [60_000, 60_000]


def test_without_a_share_nothing_happens(machine: Machine) -> None:
    placement.set_share(None)
    machine.compute(1_000_000)
    clock.catch_up()
    clock.resume()
    assert machine.slept == [] and clock.busy_ns() is None and clock.now_ns() == machine.wall
