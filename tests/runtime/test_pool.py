"""The pool of ranks: worlds of any size, failures that are told, and nothing that stays behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.runtime.pool import Pool, RankError

ROOT = Path(__file__).parents[2]


@pytest.fixture
def two() -> Iterator[Pool]:
    pool = Pool(2, timeout_s=6)
    yield pool
    pool.close()


def sum_of_ranks(base: int) -> tuple[int, int]:
    total = torch.tensor(base + dist.get_rank())
    dist.all_reduce(total)
    return int(total), int(os.environ["WORLD_SIZE"])


def fail_in_rank_one() -> None:
    if dist.get_rank() == 1:
        raise ValueError("seven is no prime")
    dist.barrier()


def hang_in_rank_one() -> None:
    while dist.get_rank() == 1:
        time.sleep(0.01)


def die_in_rank_one() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def leave_early_in_rank_one() -> None:
    if dist.get_rank() == 0:
        dist.barrier()


def answer_what_cannot_be_sent() -> object:
    return lambda: None


def test_worlds_of_any_size(pool: Pool) -> None:
    for size in (3, 2, 3, 1, 2):
        assert pool.run(sum_of_ranks, 10, ranks=size) == [(10 * size + size * (size - 1) // 2, size)] * size
    assert pool.run(sum_of_ranks, 0) == [(3, 3)] * 3


@pytest.mark.slow
def test_failure_is_told_before_those_who_wait_for_it_and_the_pool_can_be_used_again(two: Pool) -> None:
    two.run(sum_of_ranks, 0)
    with pytest.raises(RankError) as caught:
        two.run(fail_in_rank_one)
    first, _, rest = str(caught.value).partition("\n")
    assert first == "rank 1: Traceback (most recent call last):"
    assert "ValueError: seven is no prime" in rest
    assert "in fail_in_rank_one\n" in rest
    assert rest.index("seven") < rest.index("rank 0 gave no answer 1 s after that; it stands at") < rest.rindex("barrier")
    assert two.run(sum_of_ranks, 1) == [(3, 2)] * 2
    with pytest.raises(RankError, match=r"(?s)^rank [01]: Traceback .*answer_what_cannot_be_sent"):
        two.run(answer_what_cannot_be_sent)


@pytest.mark.long
def test_interrupted_run_leaves_no_answer_for_the_next(two: Pool) -> None:
    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    two.run(sum_of_ranks, 0)
    before = signal.signal(signal.SIGUSR2, interrupt)
    try:
        timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGUSR2))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            two.run(hang_in_rank_one)
        timer.join()
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert two.run(sum_of_ranks, 1) == [(3, 2)] * 2


@pytest.mark.long
def test_rank_that_hangs_shows_where(two: Pool) -> None:
    with pytest.raises(RankError, match=r"(?s)^rank 1 gave no answer in 6 s; it stands at\n.*in hang_in_rank_one\n"):
        two.run(hang_in_rank_one)


@pytest.mark.long
def test_rank_that_waits_in_vain_shows_where(two: Pool) -> None:
    with pytest.raises(RankError, match=r"(?s)^rank 0: Traceback .*in leave_early_in_rank_one\n.*barrier"):
        two.run(leave_early_in_rank_one)


@pytest.mark.long
def test_rank_that_dies_is_named(two: Pool) -> None:
    with pytest.raises(RankError, match=r"(?m)^rank 1 died of SIGKILL$"):
        two.run(die_in_rank_one)


@pytest.mark.long  # of the tests' own ranks; ``no_process_stays_behind`` looks at the end of every run
def test_ranks_do_not_outlive_a_parent_that_is_killed() -> None:
    code = (
        "import os, time\nfrom tests.runtime.pool import Pool\n"
        "if __name__ == '__main__':\n"
        "    print(*Pool(2).run(os.getpid), flush=True)\n"
        "    time.sleep(100)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert len(parent.stdout.readline().split()) == 2
        parent.kill()
        parent.communicate(timeout=100)  # ends when nobody holds the other end any more: the ranks have it as well
