"""A device on which threads compute in turn, against a made-up processor's time."""

from __future__ import annotations

import threading

import pytest

from benchmarks.shared_processor import InTurn, SharedProcessor
from soap.emulation import placement
from soap.runtime.system import clock
from tests.test_virtual_clock import Machine


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()
    monkeypatch.setattr(placement.time, "perf_counter_ns", lambda: made.wall)
    monkeypatch.setattr(placement.time, "thread_time_ns", lambda: made.used)
    monkeypatch.setattr(placement.time, "sleep", made.sleep)
    monkeypatch.setattr(placement.VirtualClock, "_queued", lambda _: made.queued)
    return made


def in_another_thread(act: object) -> None:
    thread = threading.Thread(target=act)  # type: ignore[arg-type]
    thread.start()
    thread.join()


def test_threads_have_the_device_one_after_the_other(machine: Machine) -> None:
    """A quarter of a core: 1 ms of processor time takes 4. The second thread begins when the first one's device is free."""
    device = SharedProcessor(0.25)
    with device.computing():
        machine.compute(1_000_000)
    assert (machine.wall, device.busy_ns) == (4_000_000, 4_000_000)

    def second() -> None:
        with device.computing():
            machine.compute(2_000_000)

    in_another_thread(second)
    assert (machine.wall, device.busy_ns) == (12_000_000, 12_000_000)


def test_communication_holds_no_device(machine: Machine) -> None:
    device = SharedProcessor(0.5)
    clock.install(InTurn(device))
    try:
        with device.computing():
            machine.compute(1_000_000)
            clock.catch_up()
            assert machine.wall == 2_000_000

            def other() -> None:
                with device.computing():
                    machine.compute(3_000_000)

            in_another_thread(other)
            machine.compute(500_000)  # receiving: no work of the device
            clock.resume()
            machine.compute(1_000_000)
    finally:
        clock.install(None)
    assert (machine.wall, device.busy_ns) == (8_000_000 + 500_000 + 2_000_000, 2_000_000 + 6_000_000 + 2_000_000)


def test_an_error_frees_the_device(machine: Machine) -> None:
    device = SharedProcessor(0.5)
    with pytest.raises(ZeroDivisionError), device.computing():
        machine.compute(1_000_000 // 0)
    with device.computing():
        machine.compute(1_000_000)
    assert device.busy_ns == 2_000_000
