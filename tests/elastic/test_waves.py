"""Values of waves: each update is in the values of a start once or not at all, and all are there that the bound demands."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from soap.elastic.clocks import Clocks, GlobalWeights, Push, WorkerWeights, waves_needed
from soap.elastic.faults import ElasticError
from tests.elastic.drawn import most_missing
from tests.extent import MANY


@dataclass(frozen=True)
class Bag:
    """Updates, each by worker and minibatch. None may be in a sum twice."""

    updates: frozenset[tuple[int, int]] = frozenset()

    def __add__(self, other: Bag) -> Bag:
        assert not self.updates & other.updates, "an update counts twice"
        return Bag(self.updates | other.updates)


@dataclass
class _Worker:
    """A worker with ``count`` minibatches; pushes under way, in their order."""

    number: int
    count: int
    weights: WorkerWeights[Bag]
    started: int = 0
    finished: int = 0
    flying: deque[Push[Bag]] = field(default_factory=deque)
    ended: bool = False


class _Training:
    """Workers that begin, finish, push and pull at random, as far as clocks let them; every start is looked at."""

    def __init__(self, counts: list[int], bound: int | None, wave: int, rng: random.Random, fresh: float) -> None:
        self.bound, self.wave, self.rng, self.fresh = bound, wave, rng, fresh
        self.counts = counts
        self.clocks = Clocks(range(len(counts)), bound, wave)
        self.servers = GlobalWeights(Bag(), range(len(counts)))
        self.workers = [_Worker(number, count, WorkerWeights(wave, Bag())) for number, count in enumerate(counts)]

    def run(self) -> None:
        while acts := [(act, own) for own in self.workers for act in self._possible(own)]:
            act, own = self.rng.choice(acts)
            act(own)
            assert self.servers.version == self.clocks.slowest or all(own.ended for own in self.workers)
        assert all(own.ended for own in self.workers), "they wait for each other"

    def _possible(self, own: _Worker) -> list:  # type: ignore[type-arg]
        if own.ended:
            return []
        found = []
        if own.started < own.count and self.clocks.may_start(own.number):
            found.append(self.start)
        if own.finished < own.started:
            found.append(self.finish)
        if own.flying:
            found.append(self.arrive)
        if own.finished == own.count and not own.flying:
            found.append(self.end)
        return found

    def start(self, own: _Worker) -> None:
        if own.weights.version < self.clocks.needed(own.number) or self.rng.random() < self.fresh:
            own.weights.pull(self.servers.values, self.servers.version)
        self.clocks.started(own.number, own.weights.version)
        self.look(own, own.weights.values().updates)
        own.started += 1

    def look(self, own: _Worker, has: frozenset[tuple[int, int]]) -> None:
        """Local bound: all but those in flight. Global bound: whole waves of all, and no more is missing than may be."""
        p = own.started + 1  # as in the paper, from 1 on
        assert has >= {(own.number, q) for q in range(p - self.wave)}
        assert sum(worker == own.number for worker, _ in has) == own.finished
        if self.bound is None:
            return
        last = p // self.wave - self.bound - 2
        for other, count in enumerate(self.counts):
            assert has >= {(other, q) for q in range(min(count, (last + 1) * self.wave))}
            missing = {q for q in range(min(count, p - 1)) if (other, q) not in has}
            s_local = self.wave - 1
            assert len(missing) <= (self.bound + 1) * (s_local + 1) + s_local - 1 == most_missing(self.clocks.bound, self.clocks.wave)

    def finish(self, own: _Worker) -> None:
        push = own.weights.finished(Bag(frozenset({(own.number, own.finished)})))
        self.clocks.finished(own.number, pushed=False)
        own.finished += 1
        last = own.weights.ended() if own.finished == own.count else None
        own.flying.extend(each for each in (push, last) if each)

    def arrive(self, own: _Worker) -> None:
        push = own.flying.popleft()
        assert self.servers.push(own.number, push.wave, push.update)
        assert not self.servers.push(own.number, push.wave, push.update), "sent again, it counts no second time"
        if push.minibatches == self.wave:
            self.clocks.pushed(own.number)
        else:
            self.end(own)  # an incomplete wave is the last one

    def end(self, own: _Worker) -> None:
        self.servers.left(own.number)
        self.clocks.left(own.number)
        own.ended = True


@MANY
@given(
    st.lists(st.integers(0, 12), min_size=1, max_size=4),
    st.sampled_from([0, 1, 3, None]),
    st.integers(1, 4),
    st.sampled_from([0.0, 0.5]),
    st.integers(0, 2**32),
)
def test_every_start_has_what_it_must_once(counts: list[int], bound: int | None, wave: int, fresh: float, seed: int) -> None:
    """At random delays, with minibatches of unequal number; nobody waits for ever, and in the end every update has counted."""
    training = _Training(counts, bound, wave, random.Random(seed), fresh)
    training.run()
    assert training.servers.values.updates == {(worker, q) for worker, count in enumerate(counts) for q in range(count)}
    assert training.servers.pushes == sum(-(-count // wave) for count in counts), "one push a wave"


@pytest.mark.parametrize(("bound", "wave", "most"), [(0, 1, 0), (0, 4, 6), (4, 4, 22), (4, 1, 4)])
def test_the_bound_is_attained_at_the_end_of_a_wave(bound: int, wave: int, most: int) -> None:
    """One worker goes on as far as it may, while another does nothing: SYSTEMS' figures, at p = -1 modulo the wave."""
    training = _Training([100, 100], bound, wave, random.Random(0), 0.0)
    quick = training.workers[0]
    while training.clocks.may_start(0):
        training.start(quick)
        training.finish(quick)
        while quick.flying:
            training.arrive(quick)
    assert max(training.clocks.missing) == most == most_missing(training.clocks.bound, training.clocks.wave)
    assert quick.started % wave == (wave - 1) % wave
    assert not quick.weights.version


def test_waves_that_minibatches_need() -> None:
    """p from 1 on needs the waves up to p // Nm - D - 2; with waves of one that is SSP's rule: p - 1 - D of each worker."""
    for wave in (1, 2, 4):
        for bound in (0, 1, 5):
            assert [waves_needed(p - 1, wave, bound) for p in range(1, 60)] == [max(0, p // wave - bound - 1) for p in range(1, 60)]
    assert [waves_needed(p, 1, 2) for p in range(6)] == [0, 0, 0, 1, 2, 3]
    assert waves_needed(99, 4, None) == 0


@pytest.mark.parametrize("seed", range(3))
def test_waves_of_one_without_slack_are_synchronous_descent(seed: int) -> None:
    """Bit for bit in float64, whoever is first: u = -lr * gradient / V."""
    generator, rng = torch.Generator().manual_seed(seed), random.Random(seed)
    data = torch.randn(20, 2, 8, generator=generator, dtype=torch.float64)
    start = torch.randn(8, generator=generator, dtype=torch.float64)
    rate = 0.125

    def gradient(values: torch.Tensor, sample: torch.Tensor) -> torch.Tensor:
        own = values.clone().requires_grad_()
        torch.tanh(own @ sample).square().backward()  # type: ignore[no-untyped-call]
        assert own.grad is not None
        return own.grad

    expected = start.clone().requires_grad_()
    optimizer = torch.optim.SGD([expected], lr=rate)
    for step in data:
        expected.grad = (gradient(expected.detach(), step[0]) + gradient(expected.detach(), step[1])) / 2
        optimizer.step()
    servers = GlobalWeights(start, range(2))
    clocks, workers = Clocks(range(2)), [WorkerWeights(1, start) for _ in range(2)]
    done = [0, 0]
    while min(done) < len(data):
        worker = rng.choice([w for w in range(2) if done[w] < len(data) and clocks.may_start(w)])
        workers[worker].pull(servers.values, servers.version)
        clocks.started(worker, servers.version)
        push = workers[worker].finished(-rate * gradient(workers[worker].values(), data[done[worker], worker]) / 2)
        assert push is not None
        clocks.finished(worker)
        servers.push(worker, push.wave, push.update)
        done[worker] += 1
    assert torch.equal(servers.values, expected.detach())


def test_wrong_use_is_said() -> None:
    servers = GlobalWeights(0, [0, 1])
    with pytest.raises(ElasticError, match="worker 0 pushes wave 1; expected wave 0"):
        servers.push(0, 1, 5)
    with pytest.raises(ElasticError, match="worker 7 pushes wave 0; expected one of 0, 1"):
        servers.push(7, 0, 5)
    servers.left(1)
    with pytest.raises(ElasticError, match="expected nothing: it has left"):
        servers.push(1, 0, 5)
    assert servers.push(0, 0, 5) and (servers.values, servers.version) == (5, 1)
    servers.joined(2)
    assert servers.push(0, 1, 1) and servers.version == 1, "it waits for the new one"
    assert servers.push(2, 1, 1) and (servers.values, servers.version) == (7, 2)
    with pytest.raises(ElasticError, match="worker 1 joins for the second time"):
        servers.joined(1)
    worker = WorkerWeights(2, 0)
    worker.pull(3, 4)
    with pytest.raises(ElasticError, match="values with 3 waves come after some with 4"):
        worker.pull(3, 3)
    with pytest.raises(ElasticError, match="waves of 0 minibatches"):
        WorkerWeights(0, 0)
    clocks = Clocks("ab", 0, 2)
    with pytest.raises(ElasticError, match="pushes wave 0 before it is finished"):
        clocks.pushed("a")
    with pytest.raises(ElasticError, match="begins minibatch 1 with 1 waves of all workers; expected 0 to 0"):
        clocks.started("a", 1)


class _Counted:
    """A value that counts its additions, and remembers their order."""

    additions = 0

    def __init__(self, name: str) -> None:
        self.name = name

    def __add__(self, other: _Counted) -> _Counted:
        _Counted.additions += 1
        return _Counted(f"({self.name}+{other.name})")


def test_a_start_adds_once_however_many_waves_are_missing() -> None:
    """The sum is that of all from left to right: what was pulled, whole waves in their order, and the one that is not complete."""
    worker = WorkerWeights(2, _Counted("p"))
    for number in range(7):
        worker.finished(_Counted(str(number)))
    _Counted.additions = 0
    assert worker.values().name == "((((p+(0+1))+(2+3))+(4+5))+6)"
    assert _Counted.additions == 1
    worker.pull(_Counted("q"), 1)
    assert worker.values().name == "(((q+(2+3))+(4+5))+6)"
    worker.pull(_Counted("r"), 3)
    worker.finished(_Counted("7"))
    _Counted.additions = 0
    assert worker.values().name == "(r+(6+7))" and _Counted.additions == 0, "nothing is incomplete"
