"""Snapshots of partitions: what they are at some version, in a file, so that a log need not be read back from its beginning. A file is
`header | encoded message | checksum`. Two are kept, and the log from the older one on, so that a damaged newest one loses nothing."""

from __future__ import annotations

import json
import os
import re
import struct
import threading
import time
import warnings
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from soap.elastic.faults import ElasticError
from soap.elastic.leases import Ledger
from soap.elastic.messages import Array, Kind, Message, decode, encode, size_bytes
from soap.elastic.shard import Gradient, ShardState
from soap.errors import SoapWarning, first_line
from soap.files import synchronize_folder, write_parts_atomically
from soap.runtime.sync.row_update import RowGradient

KEPT = 2
PIECE_BYTES = 2**20
"""So much is written between two looks whether somebody else needs the disk's room."""
_HEADER = struct.Struct("<4s4xq")
"""Magic, bytes of the message."""
_TRAILER = struct.Struct("<I4x")
"""Checksum of the message."""
_MAGIC = b"SNAP"
_NAME = re.compile(r"snapshot-(\d{12,18})")
_TEMPORARY = re.compile(r"\.snapshot-\d{12,18}\.[0-9a-f]{16}\.tmp")


class _GaveWayError(ElasticError):
    """A snapshot was given up so that the log could be written."""


def write(folder: Path, state: ShardState, give_way: threading.Event | None = None) -> None:
    """Write a snapshot. ElasticError in one line if that fails, or ``give_way`` is set meanwhile; nothing is left of it then."""
    write_parts_atomically(folder / f"snapshot-{state.version:012}", _pieces(packed(state), give_way), error=ElasticError)
    synchronize_folder(folder)  # before anything is removed that it stands for


def keep_latest(folder: Path) -> int:
    """Remove all but the latest two snapshots. Returns the version of the older one."""
    found = _versions(folder)
    for version in found[:-KEPT]:
        (folder / f"snapshot-{version:012}").unlink(missing_ok=True)
    return found[-KEPT:][0]


def read_latest(folder: Path) -> ShardState | None:
    """The latest snapshot that is whole; None if there are none. Damaged ones are warned of. ElasticError if all are damaged."""
    remove_leftovers(folder)
    damaged: list[Path] = []
    for version in reversed(_versions(folder)):
        path = folder / f"snapshot-{version:012}"
        try:
            state = read(path)
        except ElasticError as cause:
            damaged.append(path)
            error = cause
            continue
        for bad in damaged:  # it must not count as one of the two that are kept
            warnings.warn(f"{error}; the one before it and the log are used", SoapWarning, stacklevel=2)
            bad.rename(folder / f"damaged-{bad.name}")
        return state
    if damaged:
        raise error
    return None


def remove_leftovers(folder: Path) -> None:
    """Remove what a killed process has left of snapshots."""
    for name in os.listdir(folder):
        if _TEMPORARY.fullmatch(name):
            (folder / name).unlink(missing_ok=True)


def read(path: Path) -> ShardState:
    """Read a snapshot. ElasticError in one line if it is damaged."""
    try:
        data = bytearray(path.stat().st_size)
        with path.open("rb") as stream:
            stream.readinto(data)
    except OSError as cause:
        raise ElasticError(f"snapshot {str(path)!r} cannot be read: {cause.strerror}") from None
    body = memoryview(data)[_HEADER.size : -_TRAILER.size]
    if len(data) < _HEADER.size + _TRAILER.size or _HEADER.unpack_from(data) != (_MAGIC, len(body)):
        raise ElasticError(f"snapshot {str(path)!r} is damaged: it has not the length that it was written with")
    if _TRAILER.unpack_from(data, len(data) - _TRAILER.size) != (zlib.crc32(body),):
        raise ElasticError(f"snapshot {str(path)!r} is damaged: it does not match its checksum")
    return unpacked(decode(body))


def packed(state: ShardState) -> Message:
    """A state as a message: a text that names the optimizer's state and the pending leases, then the ledger, the values, the state's
    tensors, and the pending gradients, those of rows one after the other."""
    tensors = {key: value for key, value in state.optimizer.items() if isinstance(value, Tensor)}
    others = {key: value for key, value in state.optimizer.items() if key not in tensors}
    for key, value in others.items():
        if not (value is None or isinstance(value, (bool, int, float, str))):
            raise ElasticError(f"optimizer state {key!r} is a {type(value).__name__}; expected tensors and numbers: use another optimizer")
    rows = {lease: own for lease, own in state.pending.items() if isinstance(own, RowGradient)}
    whole = {lease: own for lease, own in state.pending.items() if isinstance(own, Tensor)}
    pending = {"rows": [[lease, len(own.rows)] for lease, own in rows.items()], "whole": list(whole)}
    text = json.dumps({"tensors": list(tensors), "others": others, **pending}).encode()
    arrays: list[Array] = [np.frombuffer(text, np.uint8), state.counted.array(), state.values.numpy()]
    arrays += [tensor.numpy() for tensor in tensors.values()]
    if rows:
        arrays += [torch.cat([own[part] for own in rows.values()]).numpy() for part in (0, 1)]
    if whole:
        arrays.append(torch.stack([*whole.values()]).numpy())
    return Message(Kind.SNAPSHOT, 0, 0, state.version, tuple(arrays))


def unpacked(message: Message) -> ShardState:
    """The state that ``packed`` made a message of."""
    names: dict[str, Any] = json.loads(message.arrays[0].tobytes())
    values, *kept = message.tensors()[2:]
    counted = Ledger.of(message.arrays[1].astype(np.int64))
    given = iter(map(Tensor.clone, kept))
    optimizer = {**{key: next(given) for key in names["tensors"]}, **names["others"]}
    pending: dict[int, Gradient] = {}
    if rows := names.get("rows"):
        lengths = [length for _, length in rows]
        parts = zip(torch.split(next(given), lengths), torch.split(next(given), lengths), strict=True)
        pending.update({lease: RowGradient(*own) for (lease, _), own in zip(rows, parts, strict=True)})
    if whole := names.get("whole"):
        pending.update(zip(whole, next(given).unbind(), strict=True))
    return ShardState(message.version, counted, values, optimizer, pending)


def _pieces(message: Message, give_way: threading.Event | None) -> Iterator[bytes | memoryview]:
    yield _HEADER.pack(_MAGIC, size_bytes(message))
    check = 0
    for part in encode(message):
        view = memoryview(part)
        for start in range(0, len(view), PIECE_BYTES):
            if give_way is not None and give_way.is_set():
                raise _GaveWayError("a snapshot was given up, because the log needs the room on the disk: free space")
            piece = view[start : start + PIECE_BYTES]
            check = zlib.crc32(piece, check)
            yield piece
    yield _TRAILER.pack(check)


def _versions(folder: Path) -> list[int]:
    return sorted(int(found[1]) for name in os.listdir(folder) if (found := _NAME.fullmatch(name)))


class Source(Protocol):
    """A partition of which snapshots are taken."""

    folder: Path

    def take(self) -> ShardState | None:
        """A copy of its state, from where on the log begins a new segment; None if no push came behind the last snapshot."""

    def saved(self, version: int) -> None:
        """Told when the snapshot of a version is on the disk."""


class Snapshotter:
    """The thread that writes snapshots: of those that are asked for, and every so many seconds of all. If some cannot be written, it warns
    once until all of them were, and training goes on with the older ones and longer logs."""

    def __init__(self, sources: Sequence[Source], every_s: float | None = None) -> None:
        self._sources, self._every_s = sources, every_s
        self._asked: dict[int, None] = {}
        self._wake = threading.Condition()
        self._give_way, self._writing = threading.Event(), threading.Lock()
        self._closing = self._busy = False
        self._failed: set[int] = set()
        self._thread = threading.Thread(target=self._run, name="soap-snapshots", daemon=True)
        self._thread.start()

    def ask(self, *numbers: int) -> None:
        """Have snapshots of some partitions taken soon."""
        with self._wake:
            self._asked.update(dict.fromkeys(numbers))
            self._wake.notify_all()

    def settle(self) -> None:
        """Wait until all that was asked for is written, or was found not to be possible."""
        with self._wake:
            self._wake.wait_for(lambda: not (self._asked or self._busy) or self._closing)

    def give_way(self) -> None:
        """Give up the snapshot that is being written, so that its room on the disk is free."""
        self._give_way.set()
        with self._writing:
            self._give_way.clear()

    def close(self) -> None:
        """End the thread; a snapshot that is being written is given up."""
        with self._wake:
            self._closing = True
            self._wake.notify_all()
        self._give_way.set()
        self._thread.join()

    def _run(self) -> None:
        last = time.monotonic()
        while True:
            with self._wake:
                self._busy = False
                self._wake.notify_all()
                left = None if self._every_s is None else max(0.0, last + self._every_s - time.monotonic())
                self._wake.wait_for(lambda: self._asked or self._closing, left)
                numbers = list(self._asked)
                self._asked.clear()
                self._busy = True
            if self._every_s is not None and time.monotonic() >= last + self._every_s:
                last, numbers = time.monotonic(), list(range(len(self._sources)))
            for number in numbers:
                if not self._closing:
                    self._save(number)
            if self._closing:
                return

    def _save(self, number: int) -> None:
        source = self._sources[number]
        try:
            state = source.take()
            if state is None:
                return
            with self._writing:
                write(source.folder, state, self._give_way)
            source.saved(state.version)
            self._failed.discard(number)
        except Exception as cause:  # want of memory, too: without this thread logs would grow for ever
            first = not self._failed
            self._failed.add(number)
            if first and not self._closing:
                warnings.warn(
                    f"no snapshot was taken: {first_line(cause)}; training goes on with the older one and the log",
                    SoapWarning,
                    stacklevel=1,
                )
