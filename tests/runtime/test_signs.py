"""Ranks that wait: for as long as others live, and no longer."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch.distributed as dist

from soap.errors import RuntimeFailure
from soap.runtime.comm import signs
from soap.runtime.comm.failures import Kind, RankLost, kind_of
from soap.runtime.comm.signs import LOOK_S, Signs, Silence


def test_silence_counts_what_was_watched_alone() -> None:
    silence = Silence()
    assert silence.look({1: b"0", 2: b"0"}, 100.0) == {1: 0.0, 2: 0.0}
    assert silence.look({1: b"1", 2: b"0"}, 101.0) == {1: 0.0, 2: 1.0}
    assert silence.look({1: b"1", 2: b"0"}, 5000.0) == {1: 2 * LOOK_S, 2: 1.0 + 2 * LOOK_S}, "nobody has looked for an hour"
    assert silence.look({1: b"1", 2: b"7"}, 5001.0) == {1: 2 * LOOK_S + 1.0, 2: 0.0}
    assert silence.look({2: b"7"}, 5002.0) == {2: 1.0}
    assert silence.look({1: b"1"}, 5003.0) == {1: 0.0}, "rank 1 was not asked for meanwhile"


@contextmanager
def ranks(patience_s: float = 1000.0) -> Iterator[tuple[Signs, Signs]]:
    """Two of them, in one store."""
    store: Any = dist.HashStore()
    both = Signs(store, 0, 2, patience_s), Signs(store, 1, 2, patience_s)
    try:
        yield both
    finally:
        for own in both:
            own.end()


def test_all_meet_each_time_anew() -> None:
    with ranks() as both:
        met: list[int] = []

        def meet_thrice(own: Signs, number: int) -> None:
            for _ in range(3):
                own.meet()
                met.append(number)

        threads = [threading.Thread(target=meet_thrice, args=(own, number)) for number, own in enumerate(both)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert sorted(met) == [0, 0, 0, 1, 1, 1]
        assert all(abs(met[:k].count(0) - met[:k].count(1)) <= 1 for k in range(7)), "nobody is ahead by a meeting"


@pytest.mark.parametrize("share", [0.0, 20.0])
def test_a_rank_that_lives_is_waited_for_beyond_all_patience(monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    """Time is played: each look is 100 s behind the last. Rank 1 gives signs between looks, or does not."""
    with ranks(patience_s=50.0) as (first, second):
        now, looks = 0.0, 0

        def later() -> float:
            nonlocal now
            now += 100.0
            return now

        def over() -> bool:
            nonlocal looks
            looks += 1
            if share:
                second._give(f"{looks}")
            return looks > 100

        monkeypatch.setattr(signs.time, "monotonic", later)
        monkeypatch.setattr(signs.time, "sleep", lambda _: None)
        if share:
            first.wait(over)
            assert looks == 101
        else:
            with pytest.raises(RankLost, match=r"^rank 1 has given no sign of life for \d+ s; has it, or its machine, ended\?$") as caught:
                first.wait(over)
            assert caught.value.rank == 1 and looks < 100


@pytest.mark.parametrize(
    ("error", "said"),
    [(RuntimeFailure("no rule"), r"rank 1 failed: no rule; expected"), (None, r"rank 1 left; expected")],
)
def test_a_rank_that_ends_ends_the_wait_with_its_cause(error: Exception | None, said: str) -> None:
    with ranks() as (first, second):
        second.end(error)
        with pytest.raises(RankLost, match=f"^{said} it to go on until all ranks are done$") as caught:
            first.meet()
        assert kind_of(caught.value) is Kind.AFTERMATH, "the other one's own error is the cause"


def test_signs_end_with_their_group() -> None:
    with ranks() as (first, _):
        names = [thread.name for thread in threading.enumerate()]
        assert names.count("signs of life") >= 2
        first.end()
        until = time.monotonic() + 60
        while [thread.name for thread in threading.enumerate()].count("signs of life") >= names.count("signs of life"):
            assert time.monotonic() < until, "the thread lives on"
            time.sleep(0.01)


def test_a_rank_that_is_alone_waits_for_nobody() -> None:
    signs.end()
    signs.meet()
    signs.require_life()
