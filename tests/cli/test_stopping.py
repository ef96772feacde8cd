"""Signals while there is something to save."""

from __future__ import annotations

import os
import signal

import pytest

from soap.cli.stopping import Stopping
from soap.errors import StoppedBySignal
from soap.time_limit import TimeIsUp, TimeLimit
from tests.alarms import alarm as alarm

pytestmark = [pytest.mark.skipif(os.name != "posix", reason="signals"), pytest.mark.usefixtures("alarm")]


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


def test_the_best_way_that_is_done_in_time_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    def way(name: str, number: int | None = None) -> str:
        tried.append(name)
        if number is not None:
            send(number)
        return name

    with Stopping() as stopping:
        assert stopping.in_time(lambda: way("all"), lambda: way("less")) == "all"
        assert stopping.in_time(lambda: way("all", signal.SIGTERM), lambda: way("less"), lambda: way("least")) == "less"
        monkeypatch.setattr("soap.cli.stopping.FINISH_S", -1.0)  # the moment that is left is over
        assert stopping.in_time(lambda: way("all", signal.SIGALRM), lambda: way("least")) == "least"
    assert tried == ["all", "all", "less", "all", "least"]


def test_a_time_limit_ends_the_work_like_a_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [0.0]
    monkeypatch.setattr("soap.cli.stopping.LATE_S", 0.0)
    with TimeLimit(1000, clock=lambda: now_s[0]) as limit, Stopping(limit) as stopping:
        assert not stopping.ended

        def long() -> str:
            now_s[0] = 2000
            send(signal.SIGALRM)
            return "all"

        assert stopping.in_time(long, lambda: "less") == "less"
        assert stopping.ended and stopping.number is None
        stopping.heard(TimeIsUp())
        assert stopping.number is None
        stopping.heard(StoppedBySignal("ranks have ended", signal.SIGTERM))
        assert stopping.exit_code == 143


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
