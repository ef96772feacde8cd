"""Updates of whole steps: the sum of their leases in order, made when a later step reads, and after a restart as before."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from soap.elastic.faults import ElasticError
from soap.elastic.layout import cut
from soap.elastic.leases import Dealer, Finished, Lease, Steps
from soap.elastic.snapshots import ShardState, TooOld
from soap.runtime.sync.row_update import RowGradient
from tests.elastic.drawn import drawn
from tests.elastic.stores import Store
from tests.elastic.test_arithmetic import OPTIMIZERS
from tests.elastic.test_store import assert_same, killed

CELLS = (*cut("table", (9, 3), 1), *cut("bias", (3,), 1))
VALUES = [drawn(cell.cell, number) for number, cell in enumerate(CELLS)]
STEPS = Steps(leases=8, workers=3)  # steps of 3, 3 and 2 leases


@given(st.integers(1, 9), st.integers(1, 4), st.integers(0, 40))
def test_steps_divide_epochs(leases: int, workers: int, step: int) -> None:
    steps = Steps(leases, workers)
    members = steps.members(step)
    assert [*members] and all(steps.of(lease) == step for lease in members)
    assert steps.members(step + 1).start == members.stop and len(members) <= workers
    assert len({lease // leases for lease in members}) == 1


def opened(folder: Path, optimizer: str, **options: Any) -> Store:
    return Store(folder, CELLS, VALUES, OPTIMIZERS[optimizer], steps=STEPS, **options)


def gradients(lease: int) -> tuple[RowGradient, torch.Tensor]:
    rows = torch.unique(torch.randint(9, (4,), generator=torch.Generator().manual_seed(lease)))
    return RowGradient(rows, drawn((len(rows), 3), lease)), drawn((3,), 100 + lease)


def push(store: Store, lease: int, places: tuple[int, ...] = (0, 1)) -> None:
    for place in places:
        store.push(place, lease, gradients(lease)[place])


def expected(optimizer: str, steps: int) -> list[torch.Tensor]:
    """Values after so many steps of one process."""
    values = [value.clone() for value in VALUES]
    made = [OPTIMIZERS[optimizer]([value]) for value in values]
    for step in range(steps):
        own = [gradients(lease) for lease in STEPS.members(step)]
        values[0].grad = sum((rows.dense(0, 9) for rows, _ in own), torch.zeros(9, 3, dtype=torch.float64))
        values[1].grad = sum((whole for _, whole in own), torch.zeros(3, dtype=torch.float64))
        for one in made:
            one.step()
    return values


@pytest.mark.parametrize("optimizer", ["adagrad", "momentum"])
def test_a_step_is_one_update_whoever_pushes_first(optimizer: str, tmp_path: Path) -> None:
    """Bits do not depend on the order of pushes, nor on restarts in between, with a snapshot that has half of a step."""
    found: list[tuple[ShardState, ...]] = []
    for seed in range(3):
        folder, store = tmp_path / f"{seed}", opened(tmp_path / f"{seed}", optimizer)
        for step in range(4):
            leases = [*STEPS.members(step)]
            random.Random(seed).shuffle(leases)
            for lease in leases:
                push(store, lease)
                if seed == 1 and lease in (4, 7, 8):
                    store.save()
                    push(store, lease)  # again
                if seed and lease in (1, 4, 10):
                    folder = killed(store, tmp_path / f"{seed}-{lease}")
                    before = store.state()
                    store.close()
                    store = opened(folder, optimizer)
                    assert_same(store.state(), before)
                    assert [{*state.pending} for state in store.state()] == [{*state.pending} for state in before]
            for place in (0, 1):
                store.pull(place, step + 1)
        found.append(store.state())
        store.close()
    for other in found[1:]:
        assert_same(other, found[0])
    for state, value in zip(found[0], expected(optimizer, 4), strict=True):
        torch.testing.assert_close(state.values, value, rtol=1e-12, atol=1e-14)
        assert state.version == 11 and not state.pending


def test_all_of_a_step_read_the_same_values(tmp_path: Path) -> None:
    """A lease that is dealt again reads what the others have read, though all of them have pushed."""
    store = opened(tmp_path / "store", "adagrad")
    for lease in STEPS.members(0):
        push(store, lease)
    assert torch.equal(store.pull(0, 0)[1], VALUES[0])
    assert not torch.equal(store.pull(0, 1)[1], VALUES[0]) and torch.equal(store.pull(1, 0)[1], VALUES[1])
    push(store, 3)
    push(store, 3)
    with pytest.raises(TooOld, match=r"^partition 'table/0' is at version 1; expected at least 2"):
        store.pull(0, 2)
    with pytest.raises(TooOld, match=r"expected at least 2"):
        push(store, 6)
    assert [state.version for state in store.state()] == [4, 4]
    store.close()
    with pytest.raises(ElasticError, match=r"was made with other steps; expected the same as before"):
        Store(tmp_path / "store", CELLS, VALUES, OPTIMIZERS["adagrad"])


def test_dealer_holds_back_what_is_not_due() -> None:
    dealer = Dealer(23, 3, 2, shuffled=False, most=11)
    sizes = [dealer.size(number) for number in range(11)]
    assert dealer.total == 11 and sizes == [3] * 7 + [2] + [3] * 3
    first = [dealer.deal(worker, 3) for worker in "abc"]
    assert [own.number for own in first if isinstance(own, Lease)] == [0, 1, 2] and dealer.deal("d", 3) is None
    assert isinstance(first[1], Lease) and first[1].indices.tolist() == [3, 4, 5]
    dealer.done(0)
    dealer.done(2)
    assert dealer.first_left == 1 and dealer.lost("b") == 1
    again = dealer.deal("a", 3)
    assert isinstance(again, Lease) and again.number == 1
    dealer.done(1)
    assert dealer.first_left == 3 and Dealer.restored(dealer.state()).first_left == 3
    while isinstance(lease := dealer.deal("a"), Lease):
        dealer.done(lease.number)
    assert isinstance(lease, Finished) and dealer.first_left == 11
