"""Even time: processor time by how fast the core is, sampled on the thread itself."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from soap.emulation import reference_work

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux sends signals by a thread's processor time")
REFERENCE_NS = 20_000.0


@pytest.fixture(autouse=True)
def stopped() -> Iterator[None]:
    yield
    reference_work.stop()


def _compute(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        sum(range(1000))


def _mapping_flags(address: int) -> set[str]:
    """What the kernel says of the memory at an address of this process."""
    there = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, rest = line.partition(" ")
        if "-" in first and not first.endswith(":"):
            low, high = (int(end, 16) for end in first.split("-"))
            there = low <= address < high
        elif there and first == "VmFlags:":
            return set(rest.split())
    raise AssertionError(f"{address:x} is not mapped")


def test_time_is_the_processors_unless_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference_work.time, "thread_time_ns", lambda: 123)
    assert reference_work.thread_time_ns() == 123 and reference_work.reference_ns() is None
    reference_work.start(REFERENCE_NS)
    assert reference_work.reference_ns() == REFERENCE_NS
    reference_work.stop()
    reference_work.stop()
    assert reference_work.thread_time_ns() == 123


def test_what_is_computed_while_the_reference_work_takes_twice_as_long_counts_half(monkeypatch: pytest.MonkeyPatch) -> None:
    own = reference_work._ReferenceWork(REFERENCE_NS)
    own.close()
    kernel, state = own._kernel, own.state
    state[[kernel.EVEN_NS, kernel.MARK_NS, kernel.TAKES_NS]] = 1e9, 5e9, 2 * REFERENCE_NS
    monkeypatch.setattr(reference_work.time, "thread_time_ns", lambda: 5_008_000_000)
    assert own.even_ns() == 1_004_000_000
    state[kernel.TAKES_NS] = REFERENCE_NS
    assert own.even_ns() == 1_008_000_000


def test_samples_are_taken_while_a_thread_computes_and_only_then() -> None:
    reference_work.start(REFERENCE_NS)
    own = reference_work._running
    assert own is not None
    kernel, state = own._kernel, own.state
    reference_work.start(REFERENCE_NS)  # for the same thread: nothing new
    assert reference_work._running is own
    while state[kernel.COUNT] < 20:
        _compute(0.01)
    assert 0 < state[kernel.TAKES_NS] < state[kernel.SPENT_NS]
    count = state[kernel.COUNT]
    time.sleep(0.2)
    assert state[kernel.COUNT] <= count + 2


def test_even_time_leaves_samples_out_and_never_goes_back() -> None:
    reference_work.start(REFERENCE_NS)
    own = reference_work._running
    assert own is not None
    kernel, state = own._kernel, own.state
    before = reference_work.thread_time_ns()
    while state[kernel.COUNT] < 30:
        sum(range(100))
        now = reference_work.thread_time_ns()
        assert now >= before
        before = now
    state[kernel.SPENT_NS] = 0
    first_even, first_used = own.state[kernel.EVEN_NS], own.state[kernel.MARK_NS]
    _compute(0.1)
    assert state[kernel.MARK_NS] - first_used > state[kernel.SPENT_NS] > 0
    assert state[kernel.EVEN_NS] > first_even


def test_another_thread_has_its_own_processor_time() -> None:
    reference_work.start(REFERENCE_NS)
    _compute(0.05)
    found: list[int | None] = []
    thread = threading.Thread(target=lambda: found.extend([reference_work.thread_time_ns(), reference_work.reference_ns()]))
    thread.start()
    thread.join()
    time_ns, reference_ns = found
    assert time_ns is not None and time_ns < 50_000_000 and reference_ns is None


def test_memory_begins_a_huge_page_and_is_used_again() -> None:
    reference_work.start(REFERENCE_NS)
    own = reference_work._running
    assert own is not None
    kernel, first = own._kernel, own.state.ctypes.data
    assert first % kernel.HUGE_BYTES == 0
    flags = _mapping_flags(first)
    assert "sh" not in flags and ("hg" in flags or not Path("/sys/kernel/mm/transparent_hugepage").exists())
    _compute(0.05)
    reference_work.stop()
    reference_work.start(REFERENCE_NS / 2)
    again = reference_work._running
    assert again is not None and again.state.ctypes.data == first
    assert again.state[kernel.REFERENCE_NS] == REFERENCE_NS / 2 and again.state[kernel.SPENT_NS] < 50_000_000


@pytest.mark.slow
def test_the_reference_is_what_samples_take() -> None:
    found = reference_work.measured_reference_ns()
    assert found is not None and 1_000 < found < 10_000_000


@pytest.mark.parametrize("least, known", [(20, True), (10**9, False)])
def test_the_reference_takes_as_long_as_enough_samples_need(monkeypatch: pytest.MonkeyPatch, least: int, known: bool) -> None:
    monkeypatch.setattr(reference_work, "REFERENCE_SECONDS", 0.0)
    monkeypatch.setattr(reference_work, "MOST_SECONDS", 10.0 if known else 0.05)
    monkeypatch.setattr(reference_work, "LEAST_SAMPLES", least)
    assert (reference_work.measured_reference_ns() is not None) == known


def test_a_process_ends_with_its_timer_running() -> None:
    program = "from soap.emulation import reference_work; reference_work.start(2e4)\nfor _ in range(200): sum(range(10000))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
