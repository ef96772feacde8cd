"""The pool of ranks: worlds of any size, failures that are told, and nothing that stays behind."""

from __future__ import annotations

import os
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
