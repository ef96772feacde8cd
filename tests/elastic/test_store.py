"""Stores: what is acknowledged stays, bit for bit; leases count once; messages do the same; damage is one line."""

from __future__ import annotations

import os
import shutil
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from soap.elastic import snapshots
from soap.elastic.faults import ElasticError
from soap.elastic.layout import Lookups, Partition, cut, divide, route
from soap.elastic.messages import Kind, Message
from soap.elastic.snapshots import Shard, ShardState, TooOld
from soap.errors import SoapWarning
from soap.runtime.sync.row_update import RowGradient
from tests.elastic.drawn import batches, drawn
from tests.elastic.stores import Store, settle
from tests.elastic.test_arithmetic import OPTIMIZERS
from tests.extent import FEW

CELLS = (*cut("table", (9, 3), 2), *cut("wide", (5, 4), 2, 1), *cut("bias", (3,), 1), *cut("scale", (), 1))
VALUES = [drawn(cell.cell, number) for number, cell in enumerate(CELLS)]
TABLE, WIDE, BIAS, SCALE = (0, 1), (2, 3), 4, 5


def opened(folder: Path, optimizer: str = "adagrad", cells: Sequence[Partition] = CELLS, **options: Any) -> Store:
    return Store(folder, cells, VALUES[: len(cells)], OPTIMIZERS[optimizer], **options)


def push_all(store: Store, lease: int, table: Lookups, wide: Lookups) -> None:
    """A batch's gradients for all partitions, in all three ways."""
    for places, batch, outputs in ((TABLE, table, 3), (WIDE, wide, 4)):
        cells = [CELLS[place] for place in places]
        grads = divide(cells, drawn([batch.samples, outputs], lease))
        for place, part, grad in zip(places, route(cells, batch), grads, strict=True):
            store.push_outputs(place, lease, part, grad)
    store.push(BIAS, lease, RowGradient(torch.tensor([0, 2]), drawn([2], lease)))
    store.push(SCALE, lease, drawn([], lease))


def assert_same(found: Sequence[ShardState], expected: Sequence[ShardState]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert (one.version, one.counted) == (other.version, other.counted)
        assert bits(one.values) == bits(other.values)
        assert list(one.optimizer) == list(other.optimizer)
        for key, value in one.optimizer.items():
            same = bits(value) == bits(other.optimizer[key]) if isinstance(value, Tensor) else value == other.optimizer[key]
            assert same, key


def bits(tensor: Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    return tensor.dtype, tuple(tensor.shape), tensor.numpy().tobytes()


def killed(store: Store, copy: Path) -> Path:
    """The folder as a process that is killed now leaves it; copied while nothing is renamed in it (``test_kills`` has other moments)."""
    settle(store._snapshotter)
    shutil.copytree(store.folder, copy)
    return copy


@FEW
@given(st.sampled_from(sorted(OPTIMIZERS)), st.sampled_from([None, 1, 2]), st.booleans(), st.data())
def test_a_recovered_store_is_the_one_that_was_killed(
    tmp_path_factory: pytest.TempPathFactory, optimizer: str, every: int | None, lazy: bool, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("store")
    store = opened(folder / "0", optimizer, lazy=lazy, snapshot_every_pushes=every)
    for lease in range(6):
        push_all(store, lease, data.draw(batches(9)), data.draw(batches(5)))
        if lease in (2, 4):
            before = store.state()
            copied = killed(store, folder / f"{lease}")
            store.close()
            store = opened(copied, optimizer, lazy=lazy, snapshot_every_pushes=every)
            assert_same(store.state(), before)
    assert [state.version for state in store.state()] == [6] * len(CELLS)
    store.close()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    found = opened(tmp_path / "store")
    yield found
    found.close()


def test_a_lease_counts_once_for_each_partition(store: Store, tmp_path: Path) -> None:
    gradient = torch.ones(3).double()
    assert [store.push(BIAS, lease, gradient) for lease in (7, 5, 7, 5)] == [1, 2, 2, 2]
    before = store.state()
    again = opened(killed(store, tmp_path / "copy"))
    assert again.push(BIAS, 7, gradient) == 2 and again.push(SCALE, 7, torch.tensor(1.0).double()) == 1
    assert_same(again.state()[:SCALE], before[:SCALE])
    again.close()


def test_pulls_wait_for_versions(store: Store) -> None:
    assert store.pull(BIAS)[0] == 0
    with pytest.raises(TooOld, match="partition 'bias/0' is at version 0; expected at least 1") as old:
        store.pull(BIAS, 1)
    assert old.value.version == 0
    version, values = store.pull(BIAS, store.push(BIAS, 0, torch.ones(3).double()))
    kept = values.clone()
    store.push(BIAS, 1, torch.ones(3).double())
    assert version == 1 and torch.equal(values, kept), "a copy"


@pytest.mark.parametrize("place", [TABLE[0], BIAS])
def test_who_reads_waits_for_updates(store: Store, place: int) -> None:
    ids = Lookups.padded(torch.tensor([[0]]))
    act = partial(store.look_up, place, ids) if place in TABLE else partial(store.pull, place)
    reader = threading.Thread(target=act)
    with store._shards[place].shard.lock:
        reader.start()
        reader.join(0.05)
        assert reader.is_alive()
    reader.join(60)
    assert not reader.is_alive()


def test_messages_do_the_same(store: Store, tmp_path: Path) -> None:
    other = opened(tmp_path / "other")
    lookups, grad = Lookups.padded(torch.tensor([[0, 3], [3, 1]])), drawn([2, 3], 1)
    rows = RowGradient(torch.tensor([1]), drawn([1, 3], 2))
    asked = [
        Message.of(Kind.PUSH_OUTPUTS, 0, (grad, *lookups.tensors()), lease=1),
        Message.of(Kind.PUSH_ROWS, 0, rows, lease=2),
        Message.of(Kind.PUSH, BIAS, [torch.ones(3).double()], lease=1),
    ]
    assert [(answer.kind, answer.version) for answer in map(store.answer, asked)] == [(Kind.VERSION, n) for n in (1, 2, 1)]
    other.push_outputs(0, 1, lookups, grad)
    other.push(0, 2, rows)
    other.push(BIAS, 1, torch.ones(3).double())
    assert_same(store.state(), other.state())
    sums, values = store.answer(Message.of(Kind.LOOK_UP, 0, lookups.tensors())), store.answer(Message(Kind.PULL, BIAS, version=1))
    version, expected = other.look_up(0, lookups)
    assert (sums.kind, sums.version) == (Kind.SUMS, version) == (Kind.SUMS, 2) and torch.equal(sums.tensors()[0], expected)
    assert (values.kind, values.version) == (Kind.VALUES, 1) and torch.equal(values.tensors()[0], other.pull(BIAS)[1])
    late = store.answer(Message(Kind.PULL, BIAS, version=2))
    assert (late.kind, late.version) == (Kind.TOO_OLD, 1)
    other.close()


DOUBLE = torch.float64


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (Message(Kind.SUMS, 0), "a server does not answer SUMS; expected LOOK_UP, PULL, PUSH, PUSH_ROWS, PUSH_OUTPUTS"),
        (Message(Kind.PULL, 9), "partition 9 is not here; expected 0 to 5"),
        (Message(Kind.PULL, -1), "partition -1 is not here"),
        (Message(Kind.LOOK_UP, 0), "look-ups of 0 arrays; expected ids, offsets and perhaps values"),
        (Message.of(Kind.LOOK_UP, BIAS, Lookups.padded(torch.tensor([[0]])).tensors()), "has shape [3]; expected rows and outputs: pull"),
        (Message.of(Kind.LOOK_UP, 0, Lookups.padded(torch.tensor([[5]])).tensors()), "id 5 is out of range; expected ids from 0 to 4"),
        (Message.of(Kind.PUSH, BIAS, [torch.ones(3)]), "gradient float32[3] for partition 'bias/0'; expected float64[3]"),
        (Message.of(Kind.PUSH, BIAS, [torch.ones(4, dtype=DOUBLE)]), "gradient float64[4]"),
        (Message.of(Kind.PUSH, BIAS, [torch.ones(3, dtype=DOUBLE)], lease=-1), "lease -1; expected a number from 0 on"),
        (Message.of(Kind.PUSH, BIAS), "a message PUSH of 0 arrays; expected a gradient"),
        (Message.of(Kind.PUSH_ROWS, 0, (torch.tensor([4, 4]), torch.ones(2, 3, dtype=DOUBLE))), "int64 that rise, from 0 to 4"),
        (Message.of(Kind.PUSH_ROWS, 0, (torch.tensor([5]), torch.ones(1, 3, dtype=DOUBLE))), "int64 that rise, from 0 to 4"),
        (Message.of(Kind.PUSH_ROWS, 0, (torch.tensor([1]), torch.ones(2, 3, dtype=DOUBLE))), "expected float64[1, 3]"),
        (Message.of(Kind.PUSH_ROWS, SCALE, (torch.tensor([0]), torch.ones(1, dtype=DOUBLE))), "expected a dense gradient"),
        (
            Message.of(Kind.PUSH_OUTPUTS, 0, (torch.ones(2, 3, dtype=DOUBLE), torch.tensor([1]), torch.tensor([0, 1]))),
            "gradient of shape [2, 3] for 1 samples; expected (1, outputs)",
        ),
        (
            Message.of(Kind.PUSH_OUTPUTS, 0, (torch.ones(1, 2, dtype=DOUBLE), torch.tensor([1]), torch.tensor([0, 1]))),
            "expected float64[1, 3]",
        ),
    ],
)
def test_what_cannot_be_done_is_answered_in_one_line_and_changes_nothing(store: Store, message: Message, said: str) -> None:
    before = store.state()
    answer = store.answer(message)
    text = answer.arrays[0].tobytes().decode()
    assert answer.kind is Kind.ERROR and said in text and "\n" not in text
    assert_same(store.state(), before)


def alone(act: Callable[..., Any]) -> Callable[..., Any]:
    """The same, where nobody else may read or change the shard meanwhile."""

    def checked(shard: Shard, *arguments: Any) -> Any:
        assert shard.lock.locked() or shard.version == 0, "a new store takes a snapshot before anybody knows it"
        return act(shard, *arguments)

    return checked


def test_threads_lose_no_push(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every lease is pushed by two threads, to partitions in different orders, while others look up and pull and snapshots are taken."""
    (table,), count = cut("table", (4, 2), 1), 40
    for name in ("apply", "state"):
        monkeypatch.setattr(Shard, name, alone(getattr(Shard, name)))
    store = Store(tmp_path, [table, table], [torch.zeros(4, 2)] * 2, lambda t: torch.optim.SGD(t, lr=1.0), snapshot_every_pushes=3)
    lookups = Lookups.padded(torch.tensor([[0, 1, 2, 3]]))
    errors: list[BaseException] = []

    def work(order: tuple[int, int], leases: range) -> None:
        try:
            for lease in leases:
                for partition in order:
                    store.push_outputs(partition, lease, lookups, torch.full((1, 2), -1.0))
                    version, sums = store.look_up(partition, lookups)
                    pulled, values = store.pull(partition, version)
                    assert sums.tolist() == [[4.0 * version] * 2] and torch.equal(values, torch.full((4, 2), float(pulled)))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(order, range(part, count, 2))) for order in ((0, 1), (1, 0)) for part in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert [(state.version, len(state.counted), state.values.unique().tolist()) for state in store.state()] == [(count, count, [count])] * 2
    store.close()
    monkeypatch.undo()
    again = Store(tmp_path, [table, table], [torch.zeros(4, 2)] * 2, lambda t: torch.optim.SGD(t, lr=1.0))
    assert [(state.version, state.values.unique().tolist()) for state in again.state()] == [(count, [count])] * 2
    again.close()


def test_two_snapshots_are_kept_and_a_damaged_newest_one_loses_nothing(tmp_path: Path) -> None:
    store = opened(tmp_path / "0", snapshot_every_pushes=2)
    for lease in range(9):
        store.push(BIAS, lease, drawn([3], lease))
        settle(store._snapshotter)
    before, folder = store.state(), killed(store, tmp_path / "1") / f"partition-{BIAS:06}"
    store.close()
    assert sorted(name for name in os.listdir(folder) if name.startswith("snap")) == ["snapshot-000000000006", "snapshot-000000000008"]
    newest = folder / "snapshot-000000000008"
    data = bytearray(newest.read_bytes())
    data[len(data) // 2] ^= 1
    newest.write_bytes(data)
    with pytest.warns(SoapWarning, match="snapshot .* is damaged: it does not match its checksum; the one before it and the log are used"):
        again = opened(tmp_path / "1")
    assert_same(again.state(), before)
    again.close()
    again = opened(tmp_path / "1")
    assert_same(again.state(), before)
    again.close()
    (folder / "snapshot-000000000006").write_bytes(b"half")
    with pytest.raises(ElasticError, match="is damaged: it has not the length that it was written with"):
        opened(tmp_path / "1")
    (folder / "snapshot-000000000006").unlink()
    with pytest.raises(ElasticError, match="has a log but no snapshot; bring back the files that were removed"):
        opened(tmp_path / "1")


def test_snapshots_by_time(tmp_path: Path) -> None:
    store = opened(tmp_path, snapshot_every_pushes=None, snapshot_every_s=0.05)
    store.push(BIAS, 0, drawn([3], 0))
    path = tmp_path / f"partition-{BIAS:06}" / "snapshot-000000000001"
    for _ in range(3000):
        if path.exists():
            break
        threading.Event().wait(0.01)
    store.close()
    assert path.exists()
    assert sorted(os.listdir(tmp_path / f"partition-{SCALE:06}")) == ["log-000000000000", "snapshot-000000000000"], "nothing was pushed"


def test_a_saved_store_has_no_log_to_read(store: Store, tmp_path: Path) -> None:
    for lease in range(3):
        store.push(BIAS, lease, drawn([3], lease))
    store.save()
    before, copy = store.state(), killed(store, tmp_path / "copy")
    for log in copy.glob("*/log-*"):
        assert log.stat().st_size == 0 or log.name == "log-000000000000"
        log.write_bytes(b"")
    again = opened(copy)
    assert_same(again.state(), before)
    again.close()


def test_what_a_killed_snapshot_left_is_removed(tmp_path: Path) -> None:
    opened(tmp_path).close()
    left = tmp_path / "partition-000000" / f".snapshot-000000000009.{'0a' * 8}.tmp"
    left.write_bytes(b"half of one")
    opened(tmp_path).close()
    assert not left.exists()


def test_another_store_s_folder_is_refused(tmp_path: Path) -> None:
    first = opened(tmp_path)
    with pytest.raises(ElasticError, match="is in use by another server; end that one, or choose another folder"):
        opened(tmp_path)
    first.close()
    with pytest.raises(ElasticError, match="was made with other options; expected the same as before, or an empty folder"):
        Store(tmp_path, CELLS, VALUES, lambda t: torch.optim.Adagrad(t, lr=0.3, initial_accumulator_value=1.0))
    for other in ({"optimizer": "sgd"}, {"lazy": True}, {"cells": CELLS[:4]}):
        with pytest.raises(ElasticError, match="was made with other"):
            opened(tmp_path, **other)
    (tmp_path / "store.json").write_text("{")
    with pytest.raises(ElasticError, match=r"store.json' is damaged: "):
        opened(tmp_path)


def test_values_and_optimizers_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ElasticError, match="1 initial values for 6 partitions"):
        Store(tmp_path, CELLS, VALUES[:1], OPTIMIZERS["sgd"])
    with pytest.raises(ElasticError, match=r"values of 'table/1' have shape \[5, 3\]; expected \[4, 3\]"):
        Store(tmp_path, CELLS[:2], [VALUES[0], VALUES[0]], OPTIMIZERS["sgd"])
    with pytest.raises(ElasticError, match="optimizer Muon updates a parameter as a whole, but servers keep it in partitions"):
        Store(tmp_path, CELLS[:1], VALUES[:1], lambda t: torch.optim.Muon(t, lr=0.1))


class Breaks(torch.optim.SGD):
    """Fails in its third step, with half of the update done."""

    steps = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        Breaks.steps += 1
        if Breaks.steps == 3:
            raise RuntimeError("out of luck")


def test_an_update_that_fails_is_neither_counted_nor_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("soap.elastic.store.check_optimizer", lambda *_: None)
    store = Store(tmp_path, CELLS[BIAS:SCALE], VALUES[BIAS:SCALE], lambda t: Breaks(t, lr=0.1))
    for lease in range(2):
        store.push(0, lease, torch.ones(3).double())
    before = store.state()
    for _ in range(2):
        with pytest.raises(ElasticError, match="failed in an update: out of luck; start the server again, which recovers it"):
            store.push(0, 2, torch.ones(3).double())
    store.close()
    again = Store(tmp_path, CELLS[BIAS:SCALE], VALUES[BIAS:SCALE], lambda t: Breaks(t, lr=0.1))
    assert_same(again.state(), before)
    assert again.push(0, 2, torch.ones(3).double()) == 3
    again.close()


def test_a_state_that_cannot_be_saved_is_said() -> None:
    with pytest.raises(ElasticError, match="optimizer state 'history' is a list; expected tensors and numbers"):
        snapshots.packed(ShardState(0, snapshots.Ledger(), torch.zeros(1), {"history": [1]}))


def test_snapshots_hold_every_kind_of_state() -> None:
    kept = {"step": torch.tensor(3.0), "sum": torch.arange(3.0), "beta": 0.1, "done": True, "name": "x", "nothing": None}
    state = ShardState(5, snapshots.Ledger([(0, 4), (6, 7)]), torch.ones(3), kept)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = snapshots.unpacked(snapshots.packed(state))
    assert_same([found], [state])
