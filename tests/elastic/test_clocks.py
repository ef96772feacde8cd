"""Workers are never further apart than they may be, may be as far apart as that, and never wait for ever."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from soap.elastic.clocks import ASYNC, SYNC, Clocks
from soap.elastic.faults import ElasticError
from soap.elastic.leases import Dealer, Finished
from tests.elastic.drawn import most_missing
from tests.extent import MANY


@MANY
@given(st.integers(1, 4), st.integers(0, 4), st.integers(1, 4), st.integers(0, 2**32))
def test_the_bound_is_never_exceeded_and_nobody_waits_for_ever(workers: int, bound: int, wave: int, seed: int) -> None:
    """Workers start, finish, leave and come back at random; somebody can always go on."""
    clocks, rng = Clocks(range(workers), bound, wave), random.Random(seed)
    flying = dict.fromkeys(range(workers), 0)
    for _ in range(200):
        starts = [worker for worker in flying if clocks.may_start(worker)]
        ends = [worker for worker, count in flying.items() if count]
        assert starts or ends or not flying, "all wait for each other"
        act = rng.choice(["start"] * 6 * bool(starts) + ["end"] * 6 * bool(ends) + ["leave"] * bool(flying) + ["join"])
        if act == "start":
            worker = rng.choice(starts)
            clocks.started(worker)
            flying[worker] += 1
        elif act == "end":
            worker = rng.choice(ends)
            clocks.finished(worker)
            flying[worker] -= 1
        elif act == "leave":
            worker = rng.choice(list(flying))
            clocks.left(worker)
            del flying[worker]
        else:
            worker = rng.randrange(workers)
            clocks.joined(worker)
            flying.setdefault(worker, 0)
        assert all(count <= wave for count in flying.values())
        for worker in flying:  # what must be there for its next minibatch, if it may start it
            if clocks.may_start(worker):
                assert clocks.slowest >= (clocks._of(worker).started + 1) // wave - 1 - bound
    assert max(clocks.missing, default=0) <= (most_missing(clocks.bound, clocks.wave) or 0)


@pytest.mark.parametrize("bound", [0, 1, 4])
@pytest.mark.parametrize("wave", [1, 2, 4])
def test_the_bound_is_attained(bound: int, wave: int) -> None:
    """One worker does all that it may while another does nothing; HetPipe's figures for waves of four are 6 (D = 0) and 22 (D = 4)."""
    clocks = Clocks(["quick", "slow"], bound, wave)
    for _ in range(1000):
        if not clocks.may_start("quick"):
            break
        clocks.started("quick")
        clocks.finished("quick")
    assert max(clocks.missing) == most_missing(clocks.bound, clocks.wave) == (bound + 1) * wave + (wave - 1) - 1
    assert most_missing(bound, wave) == {(0, 4): 6, (4, 4): 22, (4, 1): 4, (0, 1): 0}.get((bound, wave), max(clocks.missing))
    assert clocks.may_start("slow")
    clocks.left("slow")
    assert clocks.may_start("quick")


def test_synchronous_workers_go_in_step_and_asynchronous_ones_as_they_like() -> None:
    sync, free = Clocks("ab", SYNC), Clocks("ab", ASYNC)
    for clocks in (sync, free):
        clocks.started("a")
        assert not clocks.may_start("a"), "one minibatch at a time"
        clocks.finished("a")
    assert free.may_start("a") and most_missing(free.bound, free.wave) is None and not sync.may_start("a")
    sync.started("b")
    assert not sync.may_start("a"), "a push that has begun is not there yet"
    sync.finished("b")
    assert sync.may_start("a") and sync.missing == {0: 2}
    for _ in range(9):
        free.started("a")
        free.finished("a")
    assert free.missing == dict.fromkeys(range(10), 1) and free._of("a").pushed == 10


def test_who_joins_late_begins_where_the_slowest_is() -> None:
    clocks = Clocks("ab", 1)
    for worker in "aab":
        clocks.started(worker)
        clocks.finished(worker)
    clocks.joined("c")
    assert clocks._of("c").pushed == 1 and clocks.may_start("c")
    for worker in "abc":
        clocks.left(worker)
    clocks.joined("d")
    assert clocks._of("d").pushed >= 1, "where the last of them were"
    clocks.joined("d")
    assert clocks._of("d").pushed >= 1


@MANY
@given(st.integers(1, 4), st.sampled_from([0, 1, 3, None]), st.integers(1, 30), st.integers(1, 4), st.integers(0, 2**32))
def test_training_by_leases_and_clocks_ends(workers: int, bound: int | None, samples: int, epochs: int, seed: int) -> None:
    """As a session runs them: who gets no lease leaves the clocks until there is one. Workers are slow, or die and come back."""
    dealer, clocks, rng = Dealer(samples, 3, epochs), Clocks(range(workers), bound), random.Random(seed)
    holding: dict[int, int | None] = dict.fromkeys(range(workers))
    running: set[int] = set()
    finished: set[int] = set()
    for _ in range(100_000):
        if len(finished) == workers:
            break
        worker = rng.choice([w for w in range(workers) if w not in finished])
        if rng.random() < 0.02:  # dies, and another one comes in its place
            dealer.lost(worker)
            clocks.left(worker)
            running.discard(worker)
            holding[worker] = None
        lease = holding[worker]
        if worker in running and lease is not None:
            dealer.done(lease)
            clocks.finished(worker)
            running.discard(worker)
            holding[worker] = None
        elif lease is not None:
            clocks.joined(worker)
            if clocks.may_start(worker):
                clocks.started(worker)
                running.add(worker)
        else:
            dealt = dealer.deal(worker)
            if dealt is None or isinstance(dealt, Finished):
                clocks.left(worker)
                if isinstance(dealt, Finished):
                    finished.add(worker)
            else:
                holding[worker] = dealt.number
    assert len(finished) == workers, "they wait for each other"
    assert bound is None or max(clocks.missing) <= bound


def test_wrong_use_is_said() -> None:
    clocks = Clocks("ab", 0)
    with pytest.raises(ElasticError, match="call started first"):
        clocks.finished("a")
    clocks.started("a")
    with pytest.raises(ElasticError, match="before it may; ask may_start first"):
        clocks.started("a")
    with pytest.raises(ElasticError, match="worker 'c' is not there; expected one of 'a', 'b'"):
        clocks.may_start("c")
    with pytest.raises(ElasticError, match="a bound of -1"):
        Clocks("ab", -1)
