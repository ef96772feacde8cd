"""Signals while there is something to save."""

from __future__ import annotations

import os
import signal

import pytest

from soap.cli.stopping import Stopping

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals")


def send(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_first_signal_ends_the_work(number: int, code: int) -> None:
    with Stopping() as stopping:
        with pytest.raises(KeyboardInterrupt):
            send(number)
        send(number)  # the impatient second one is no other wish
        assert stopping.exit_code == code


def test_saving_is_not_interrupted() -> None:
    with Stopping() as stopping:
        with stopping.saving():
            send(signal.SIGINT)
            send(signal.SIGTERM)
        assert stopping.exit_code == 130


def test_a_later_signal_ends_what_swallowed_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("soap.cli.stopping.GRACE_S", 0.0)
    with Stopping():
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                send(signal.SIGINT)


def test_what_was_to_end_has_ended_and_the_next_signal_ends_what_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    with Stopping() as stopping:
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)
        stopping.go_on()
        send(signal.SIGINT)  # still the same wish
        assert stopping.number is None and not stopping.is_terminated
        monkeypatch.setattr("soap.cli.stopping.GRACE_S", 0.0)
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGTERM)
        assert stopping.is_terminated and stopping.exit_code == 143


def test_handlers_come_back() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with Stopping():
        assert signal.getsignal(signal.SIGTERM) not in before
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_what_the_caller_ignores_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Stopping():
            send(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
