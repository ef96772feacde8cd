"""Each sample comes once an epoch if nobody dies, at least once whoever does; servers count a batch once."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from soap.elastic.faults import ElasticError
from soap.elastic.layout import cut
from soap.elastic.leases import Dealer, Finished, Lease, Ledger
from soap.elastic.snapshots import Shard
from tests.extent import MANY, USUAL

WORKERS = st.integers(0, 3)


class Leases(RuleBasedStateMachine):
    """Workers get leases, push to two partitions (perhaps twice, perhaps to one only before they die), report or die; the dealer is started
    again. The model: what was reported, and who holds what."""

    @initialize(samples=st.integers(1, 13), batch=st.integers(1, 5), epochs=st.integers(0, 3), seed=st.integers(0, 5))
    def begin(self, samples: int, batch: int, epochs: int, seed: int) -> None:
        self.dealer = Dealer(samples, batch, epochs, seed)
        self.plan = samples, epochs, epochs * -(-samples // batch)
        self.held: dict[int, set[int]] = {}
        self.done: set[int] = set()
        self.times_dealt: Counter[int] = Counter()
        self.deaths = 0
        self.shards = [Shard(p, torch.zeros(p.cell), lambda t: torch.optim.SGD(t, lr=1.0)) for p in cut("w", (2,), 2)]
        self.pushed: list[set[int]] = [set(), set()]

    @rule(worker=WORKERS)
    def deal(self, worker: int) -> None:
        lease = self.dealer.deal(worker)
        held = set().union(*self.held.values()) if self.held else set()
        if isinstance(lease, Finished):
            assert len(self.done) == self.plan[2]
        elif lease is None:
            assert held | self.done == set(range(self.plan[2])) and held
        else:
            assert lease.number not in held | self.done, "in two hands at once, or done before"
            self.held.setdefault(worker, set()).add(lease.number)
            self.times_dealt[lease.number] += 1

    @precondition(lambda self: any(self.held.values()))
    @rule(data=st.data(), only=st.sampled_from([None, 0, 1]))
    def push(self, data: st.DataObject, only: int | None) -> None:
        number = data.draw(st.sampled_from(sorted(set().union(*self.held.values()))))
        for place in (0, 1) if only is None else (only,):
            shard = self.shards[place]
            if number not in shard.counted:  # as a store does
                shard.apply(-torch.ones(1), number)
            self.pushed[place].add(number)

    @precondition(lambda self: any(self.held.values()))
    @rule(data=st.data())
    def report(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(set().union(*self.held.values()))))
        for place, shard in enumerate(self.shards):
            if number not in shard.counted:
                shard.apply(-torch.ones(1), number)
            self.pushed[place].add(number)
        assert self.dealer.done(number) and not self.dealer.done(number)
        self.done.add(number)
        for held in self.held.values():
            held.discard(number)

    @rule(worker=WORKERS)
    def die(self, worker: int) -> None:
        held = self.held.pop(worker, set())
        assert self.dealer.lost(worker) == len(held)
        self.deaths += len(held)

    @precondition(lambda self: self.times_dealt)
    @rule(data=st.data())
    def report_late(self, data: st.DataObject) -> None:
        """By a worker that was taken for dead: the batch need not be dealt again if it has not been yet."""
        number = data.draw(st.sampled_from(sorted(self.times_dealt)))
        assert self.dealer.done(number) == (number not in self.done)
        self.done.add(number)
        for held in self.held.values():
            held.discard(number)

    @rule()
    def restart(self) -> None:
        self.dealer = Dealer.restored(self.dealer.state())
        self.deaths += sum(map(len, self.held.values()))
        self.held = {}

    @invariant()
    def servers_count_once(self) -> None:
        for shard, pushed in zip(getattr(self, "shards", []), getattr(self, "pushed", []), strict=True):
            assert shard.values.item() == shard.version == len(pushed) == len(shard.counted)

    def teardown(self) -> None:
        """Whatever has happened, one worker can do what is left; then every sample was in the hands of somebody who reported it."""
        if not hasattr(self, "dealer"):
            return
        for worker in range(4):
            self.die(worker)
        while not isinstance(lease := self.dealer.deal(9), Finished):
            assert isinstance(lease, Lease) and self.dealer.done(lease.number)
            self.done.add(lease.number)
            self.times_dealt[lease.number] += 1
        samples, epochs, total = self.plan
        assert self.done == set(range(total))
        for epoch in range(epochs):
            own = [self.dealer.lease(number) for number in range(total) if self.dealer.lease(number).epoch == epoch]
            assert sorted(np.concatenate([one.indices for one in own]).tolist()) == list(range(samples))
        assert sum(self.times_dealt.values()) <= total + self.deaths, "exactly once if nobody died"


TestLeases = Leases.TestCase
TestLeases.settings = USUAL


def test_orders_follow_from_the_seed_and_differ_by_epoch() -> None:
    def orders(seed: int) -> list[list[int]]:
        dealer = Dealer(40, 7, 3, seed)
        leases = [dealer.deal("w") for _ in range(18)]
        assert [len(lease.indices) for lease in leases[:6] if isinstance(lease, Lease)] == [7, 7, 7, 7, 7, 5]
        return [[int(i) for lease in leases[e * 6 : e * 6 + 6] if isinstance(lease, Lease) for i in lease.indices] for e in range(3)]

    found = orders(1)
    assert found == orders(1) and found != orders(2)
    assert found[0] != found[1] != found[2]
    assert all(sorted(order) == list(range(40)) for order in found)


def test_wrong_use_is_said() -> None:
    with pytest.raises(ElasticError, match="0 samples in batches of 3"):
        Dealer(0, 3, 1)
    with pytest.raises(ElasticError, match="lease 0 was never dealt"):
        Dealer(5, 3, 1).done(0)


@MANY
@given(st.lists(st.integers(0, 30), max_size=40))
def test_a_ledger_is_a_set_in_intervals(numbers: list[int]) -> None:
    ledger, model = Ledger(), set[int]()
    for number in numbers:
        assert ledger.add(number) == (number not in model)
        model.add(number)
        assert {n for n in range(-1, 33) if n in ledger} == model and len(ledger) == len(model)
    assert len(ledger.intervals) == sum(number - 1 not in model for number in model), "as few intervals as there are"
    assert Ledger.of(ledger.array()) == ledger == ledger.copy()


def test_a_ledger_refuses_what_is_none() -> None:
    for wrong in ([(2, 2)], [(0, 2), (2, 3)], [(4, 5), (0, 1)], [(-1, 2)]):
        with pytest.raises(ElasticError, match="intervals that rise and do not touch"):
            Ledger(wrong)
    with pytest.raises(ElasticError, match="lease -1; expected a number from 0 on"):
        Ledger().add(-1)
