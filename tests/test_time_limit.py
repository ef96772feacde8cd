"""Times after which work ends."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from math import inf

import pytest

from soap import time_limit
from soap.time_limit import TimeIsUp, TimeLimit, held_back
from tests.alarms import alarm as alarm

pytestmark = [pytest.mark.skipif(os.name != "posix", reason="signals"), pytest.mark.usefixtures("alarm")]


class Clock:
    """A clock that stands until it is moved."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def ring() -> None:
    """What the timer sends. Clocks of these tests stand, so that the real one never does."""
    os.kill(os.getpid(), signal.SIGALRM)


def test_time_that_is_left_and_parts_of_it() -> None:
    clock = Clock()
    limit = TimeLimit(20, since_s=95.0, clock=clock)
    assert (limit.left_s, limit.over, limit.seconds(0.5), limit.seconds(0.5, 3.0)) == (15.0, False, 7.5, 3.0)
    part = limit.part(0.2)
    clock.now_s += 4
    assert part.over and not limit.over
    clock.now_s += 20
    assert limit.over and limit.left_s == -9.0 and limit.seconds() == time_limit.SOON_S
    none = TimeLimit(clock=clock)
    assert none.left_s == inf and not none.over and none.seconds(0.5) is None and not none.part(0.5).over


def test_each_limit_raises_once_and_the_inner_one_first() -> None:
    clock = Clock()
    with TimeLimit(1000, clock=clock) as outer, TimeLimit(500, clock=clock) as inner:
        assert time_limit.left_s() == 500.0
        ring()  # nothing is over
        clock.now_s += 600
        with pytest.raises(TimeIsUp):
            ring()
        ring()
        assert inner.over and not outer.over and time_limit.left_s() == 400.0
        clock.now_s += 600
        with pytest.raises(TimeIsUp):
            ring()
    ring()
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0.0


def test_a_limit_that_is_over_raises_at_once_and_by_the_real_timer() -> None:
    with pytest.raises(TimeIsUp), TimeLimit(0.0):
        threading.Event().wait(60)


def test_nothing_is_raised_while_it_is_held_back_but_at_its_end() -> None:
    clock, written = Clock(), []
    with TimeLimit(1000, clock=clock):
        with pytest.raises(TimeIsUp), held_back():
            clock.now_s += 2000
            ring()
            written.append("a file")
        with held_back():
            ring()
            written.append("another")
    assert written == ["a file", "another"]


def test_an_error_while_it_is_held_back_is_the_one_that_is_told() -> None:
    with pytest.raises(OSError, match="full"), TimeLimit(1000), held_back():
        raise OSError("full")


@pytest.mark.parametrize("use", [lambda: None, ring])
def test_whoever_uses_the_alarm_keeps_it(use: Callable[[], None]) -> None:
    heard = []
    before = signal.signal(signal.SIGALRM, lambda *_: heard.append(1))
    try:
        own, clock = signal.getsignal(signal.SIGALRM), Clock()
        with TimeLimit(10, clock=clock) as limit:
            clock.now_s += 20
            use()
            assert limit.over and time_limit.left_s() == inf
            with held_back():
                pass
        assert signal.getsignal(signal.SIGALRM) is own and len(heard) == (use is ring)
    finally:
        signal.signal(signal.SIGALRM, before)


def test_other_threads_ask() -> None:
    found = []

    def work() -> None:
        clock = Clock()
        with TimeLimit(10, clock=clock) as limit, held_back():
            clock.now_s += 20
            found.append((limit.over, time_limit.left_s()))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [(True, inf)]
