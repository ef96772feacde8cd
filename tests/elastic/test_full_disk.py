"""A disk without room: a snapshot that does not fit is warned of once and training goes on; a push that does not fit does not count."""

from __future__ import annotations

import errno
import os
import subprocess
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from soap.elastic import snapshots, write_ahead
from soap.elastic.faults import ElasticError
from soap.elastic.layout import cut
from soap.elastic.messages import Message
from soap.errors import SoapWarning
from soap.runtime.sync.row_update import RowGradient
from tests.elastic.stores import Store, settle

ROWS = 2**16
(CELL,) = cut("table", (ROWS, 1), 1)
SNAPSHOT_BYTES = 4 * ROWS
ROW = RowGradient(torch.tensor([0]), torch.full((1, 1), -1.0))


def opened(folder: Path, every: int | None = None) -> Store:
    return Store(folder, [CELL], [torch.zeros(ROWS, 1)], lambda t: torch.optim.SGD(t, lr=1.0), snapshot_every_pushes=every)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Room for a snapshot and some of the next one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={SNAPSHOT_BYTES * 7 // 4}", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("needs root, to mount a small disk")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_training_goes_on_without_room_for_a_snapshot(small_disk: Path) -> None:
    store = opened(small_disk / "store", every=2)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for lease in range(40):
            assert store.push(0, lease, ROW) == lease + 1
            settle(store._snapshotter)
    (warning,) = said
    assert warning.category is SoapWarning and str(warning.message).startswith("no snapshot was taken: cannot write ")
    assert "no space left on device" in str(warning.message) and str(warning.message).endswith(
        "training goes on with the older one and the log"
    )
    store.save()
    left = sorted(os.listdir(small_disk / "store" / "partition-000000"))
    assert [name for name in left if not name.startswith("log-")] == ["snapshot-000000000000"]
    state = store.state()[0]
    store.close()
    again = opened(small_disk / "store")
    assert (again.state()[0].version, again.state()[0].values[:2].tolist()) == (40, [[40.0], [0.0]])
    assert torch.equal(again.state()[0].values, state.values)
    again.close()


def test_a_snapshot_that_failed_is_taken_when_there_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(tmp_path)
    store.push(0, 0, ROW)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched, pytest.warns(SoapWarning, match="no snapshot was taken"):
        patched.setattr("soap.files.os.fsync", full)
        store.save()
    assert not (tmp_path / "partition-000000" / "snapshot-000000000001").exists()
    store.save()
    assert (tmp_path / "partition-000000" / "snapshot-000000000001").exists()
    store.close()
    store.close()


def test_several_partitions_without_room_are_warned_of_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if others of the server have room meanwhile; and again behind a snapshot of all."""
    store = Store(tmp_path, cut("t", (4, 1), 3), [torch.zeros(n, 1) for n in (2, 1, 1)], lambda t: torch.optim.SGD(t, lr=1.0))
    write, full = snapshots.write, {0, 1}

    def unless_full(folder: Path, *others: object) -> None:
        if int(folder.name[-1]) in full:
            raise ElasticError("full")
        write(folder, *others)  # type: ignore[arg-type]

    def save(lease: int) -> int:
        for partition in range(3):
            store.push(partition, lease, RowGradient(torch.tensor([0]), torch.ones(1, 1)))
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            store.save()
        return len(said)

    monkeypatch.setattr(snapshots, "write", unless_full)
    assert [save(0), save(1)] == [1, 0]
    full.clear()
    assert save(2) == 0
    full.add(2)
    assert [save(3), save(4)] == [1, 0]
    store.close()


def test_a_push_without_room_does_not_count_until_there_is_some(small_disk: Path) -> None:
    store = opened(small_disk / "store")
    filler = small_disk / "filler"
    with filler.open("wb", buffering=0) as stream, pytest.raises(OSError, match="No space left"):
        while True:
            stream.write(bytes(4096))
    counted = 0
    with pytest.raises(ElasticError) as refused:  # the last page of the log may have room for some
        while True:
            store.push(0, counted, ROW)
            counted += 1
    said = str(refused.value)
    assert (
        said.endswith(f"no space left on device; the push of lease {counted} does not count: free space, push again") and "\n" not in said
    )
    assert store.state()[0].version == counted
    filler.unlink()
    assert store.push(0, counted, ROW) == counted + 1
    store.close()
    again = opened(small_disk / "store")
    assert again.state()[0].values[0].item() == counted + 1 == again.state()[0].version
    again.close()


def test_a_half_written_snapshot_gives_way_to_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log meets a full disk while a snapshot is being written: that is given up, and its room taken for the push."""
    monkeypatch.setattr(snapshots, "PIECE_BYTES", 2**12)
    store = opened(tmp_path, every=2)
    writev, pieces, halfway = os.writev, snapshots._pieces, threading.Event()

    def slowly(message: Message, give_way: threading.Event | None) -> Iterator[bytes | memoryview]:
        for number, piece in enumerate(pieces(message, give_way)):
            yield piece
            if number == 3 and give_way is not None:
                halfway.set()
                give_way.wait(30)

    def full(file: int, parts: list[memoryview]) -> int:
        if halfway.is_set() and any(name.endswith(".tmp") for name in os.listdir(tmp_path / "partition-000000")):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return writev(file, parts)

    monkeypatch.setattr(snapshots, "_pieces", slowly)
    monkeypatch.setattr(write_ahead.os, "writev", full)
    with pytest.warns(SoapWarning, match="no snapshot was taken: a snapshot was given up, because the log needs the room on the disk"):
        for lease in range(2):
            store.push(0, lease, ROW)
        assert halfway.wait(30)
        assert store.push(0, 2, ROW) == 3
    store.close()
    again = opened(tmp_path)
    assert again.state()[0].version == again.state()[0].values[0].item() == 3
    again.close()
