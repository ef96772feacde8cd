"""Logs: what was appended is read back; a torn end is dropped; what is damaged elsewhere is one line."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from soap.elastic import write_ahead
from soap.elastic.faults import ElasticError
from soap.elastic.messages import Kind, Message, size_bytes
from soap.elastic.write_ahead import HEADER_BYTES, WriteAheadLog, forget, read_back, segments
from soap.errors import SoapWarning


def push(version: int, size: int = 3) -> Message:
    return Message(Kind.PUSH, 0, 100 + version, version, (np.full(size, version, np.float32),))


def written(folder: Path, versions: range, begin: tuple[int, ...] = (), fsync: bool = False) -> list[int]:
    """A log with these pushes, and new segments behind some of them. Returns where each record of the last segment begins, and its end."""
    log = WriteAheadLog(folder, versions.start - 1, fsync=fsync)
    bounds = [0]
    for version in versions:
        log.append(push(version))
        bounds.append(os.path.getsize(log.path))
        if version in begin:
            log.begin(version)
            bounds = [0]
    log.close()
    return bounds


def versions(folder: Path, behind: int = 0) -> list[int]:
    found = []
    for message in read_back(folder, behind):
        assert message.lease == 100 + message.version and message.arrays[0].tolist() == [message.version] * 3
        found.append(message.version)
    return found


@pytest.mark.parametrize("fsync", [False, True])
def test_pushes_are_read_back_in_their_order(tmp_path: Path, fsync: bool) -> None:
    bounds = written(tmp_path, range(1, 8), (2, 5), fsync)
    assert bounds == [0, *(n * (HEADER_BYTES + size_bytes(push(1))) for n in (1, 2))]
    assert versions(tmp_path) == [1, 2, 3, 4, 5, 6, 7]
    assert [versions(tmp_path, behind) for behind in (1, 2, 4, 5, 7)] == [[2, 3, 4, 5, 6, 7], [3, 4, 5, 6, 7], [5, 6, 7], [6, 7], []]
    forget(tmp_path, 4)
    assert [one.version for one in segments(tmp_path)] == [2, 5] and versions(tmp_path, 2) == [3, 4, 5, 6, 7]
    forget(tmp_path, 5)
    assert versions(tmp_path, 5) == [6, 7]
    with pytest.raises(ElasticError, match="lacks pushes 5 to 5; expected a segment that holds them"):
        versions(tmp_path, 4)


def test_a_torn_end_is_dropped_wherever_it_was_torn(tmp_path: Path) -> None:
    """The process was killed in a write: a beginning of the record is there. Then the log goes on."""
    (whole,) = (tmp_path / "whole",)
    whole.mkdir()
    *_, start, end = written(whole, range(1, 5), (2,))
    data = segments(whole)[-1].path.read_bytes()
    for size in range(start, end):
        segments(whole)[-1].path.write_bytes(data[:size])
        assert versions(whole) == [1, 2, 3]
        assert os.path.getsize(segments(whole)[-1].path) == start
    log = WriteAheadLog(whole, 3)
    log.append(push(4))
    log.close()
    assert versions(whole) == [1, 2, 3, 4]


@pytest.mark.parametrize("size", [1, 40, 5000])
def test_zeros_at_the_end_are_dropped(tmp_path: Path, size: int) -> None:
    """A machine crashed: the file was made longer, what belongs there was never written."""
    written(tmp_path, range(1, 4))
    with segments(tmp_path)[-1].path.open("ab") as stream:
        stream.write(bytes(size))
    if size >= HEADER_BYTES:
        with pytest.raises(ElasticError, match="there are zeros from byte"):
            list(read_back(tmp_path, 0, crashed=False))
        with pytest.warns(SoapWarning, match="there are zeros from byte"):
            assert versions(tmp_path) == [1, 2, 3]
    assert versions(tmp_path) == [1, 2, 3]


def test_a_start_of_the_machine_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert write_ahead.may_have_crashed(tmp_path), "nothing is noted"
    write_ahead.note_boot(tmp_path)
    assert not write_ahead.may_have_crashed(tmp_path)
    monkeypatch.setattr(write_ahead, "boot_id", lambda: "another")
    assert write_ahead.may_have_crashed(tmp_path)
    monkeypatch.setattr(write_ahead, "boot_id", lambda: "")
    write_ahead.note_boot(tmp_path)
    assert write_ahead.may_have_crashed(tmp_path), "it is not known"


@given(data=st.data())
def test_a_changed_byte_is_never_passed_on(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """In the last record it may have been torn; anywhere else it is an error, and the file stays as it is."""
    folder = tmp_path_factory.mktemp("log")
    *_, start, end = written(folder, range(1, 5))
    path = segments(folder)[0].path
    content = bytearray(path.read_bytes())
    place = data.draw(st.integers(0, end - 1))
    content[place] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    if place >= start + HEADER_BYTES:
        with pytest.raises(ElasticError, match=r"its last record, of push 4 at byte .* and the machine has not been started since"):
            list(read_back(folder, 0, crashed=False))
        assert path.read_bytes() == content
        with pytest.warns(SoapWarning, match=r"its last record, of push 4 at byte .* does not match its checksum; it is left out"):
            assert versions(folder) == [1, 2, 3]
    elif (place - HEADER_BYTES + 4) % (end // 4) < 4 and place % (end // 4) >= HEADER_BYTES - 4 and place % (end // 4) < HEADER_BYTES:
        assert versions(folder) == [1, 2, 3, 4], "padding of the header"
    else:
        with pytest.raises(ElasticError, match="is damaged: ") as refused:
            versions(folder)
        assert "\n" not in str(refused.value) and path.read_bytes() == content


def test_an_older_segment_must_be_whole(tmp_path: Path) -> None:
    written(tmp_path, range(1, 5), (2,))
    first = segments(tmp_path)[0].path
    data = first.read_bytes()
    first.write_bytes(data[:-1])
    with pytest.raises(ElasticError, match="is damaged: it ends inside a record, at byte"):
        versions(tmp_path)
    first.write_bytes(data[: len(data) // 2])
    assert len(data) % 2 == 0
    with pytest.raises(ElasticError, match="is damaged: it begins behind push 2, and the segment before it ends with push 1"):
        versions(tmp_path)


def test_a_failed_write_leaves_nothing_and_the_next_one_follows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = WriteAheadLog(tmp_path, 0)
    log.append(push(1))
    writev = os.writev

    def half(file: int, parts: list[memoryview]) -> int:
        writev(file, [parts[0][:20]])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(write_ahead.os, "writev", half)
        with pytest.raises(OSError, match="No space left"):
            log.append(push(2))
    log.append(push(2))
    log.append(push(3))
    log.take_back()
    log.append(push(3))
    log.close()
    assert versions(tmp_path) == [1, 2, 3]


def test_a_system_that_writes_a_few_bytes_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writev = os.writev
    monkeypatch.setattr(write_ahead.os, "writev", lambda file, parts: writev(file, [parts[0][:7]]))
    written(tmp_path, range(1, 4))
    assert versions(tmp_path) == [1, 2, 3]
