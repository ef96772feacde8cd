"""A partition's log: each push is written before it is acknowledged, and read back where a server was killed.

A log is a few files, *segments*, in a folder: ``log-N`` begins behind the N-th push. A record is `header | encoded message`; the header
holds the message's length, its push's version and lease, and checksums of both. docs/internals/servers.md says which damage a kill, a
crash of the machine or a disk leaves, and what becomes of it.
"""

from __future__ import annotations

import os
import re
import struct
import warnings
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from io import BufferedReader
from itertools import pairwise
from pathlib import Path

from soap.elastic.faults import ElasticError
from soap.elastic.messages import Buffer, Message, decode, encode, size_bytes
from soap.errors import SoapWarning
from soap.files import reason, synchronize_folder, write_text_atomically

_MAGIC = b"PUSH"
_HEADER = struct.Struct("<4sIqqq")
"""Magic, checksum of the message, its bytes, version, lease."""
_CHECK = struct.Struct("<II")
"""Checksum of the header, and zeros."""
HEADER_BYTES = _HEADER.size + _CHECK.size
_NAME = re.compile(r"log-(\d{12,18})")
BOOT, BOOT_ID = "boot", Path("/proc/sys/kernel/random/boot_id")
"""A file in the store's folder, and where Linux says what it holds: a name that each start of a machine draws."""


class WriteAheadLog:
    """Appends to the segment that begins at ``version``. ``fsync``: a record is on the disk before ``append`` returns, not only with the
    operating system; it then outlives the machine's crash, not only the process's."""

    def __init__(self, folder: Path, version: int, *, fsync: bool = False) -> None:
        self.folder, self.fsync = folder, fsync
        self._file, self._torn = -1, False
        self.begin(version)

    def begin(self, version: int) -> None:
        """Go on in a new segment, which begins behind this version. OSError if it cannot be made; the old segment then stays in use."""
        if self._torn:
            self.take_back()
        path = self.folder / f"log-{version:012}"
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        if self.fsync:
            synchronize_folder(self.folder)
        self.close()
        self.path, self._file = path, file
        self._start_bytes = self._end_bytes = os.fstat(file).st_size

    def append(self, message: Message) -> None:
        """Write a push. OSError if it cannot be written: then nothing of it is left in the log, or will be before the next one."""
        if self._torn:
            self.take_back()
        body, size = encode(message), size_bytes(message)
        self._start_bytes, self._torn = self._end_bytes, True
        try:
            _write_all(self._file, [_header(body, size, message), *body])
            if self.fsync:
                os.fdatasync(self._file)
        except BaseException:
            self.take_back()
            raise
        self._end_bytes, self._torn = self._end_bytes + HEADER_BYTES + size, False

    def take_back(self) -> None:
        """Cut off the last record, or what was written of it."""
        os.ftruncate(self._file, self._start_bytes)
        self._end_bytes, self._torn = self._start_bytes, False

    def close(self) -> None:
        """Close the segment."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _header(body: list[Buffer], size: int, message: Message) -> bytes:
    check = 0
    for part in body:
        check = zlib.crc32(part, check)
    header = _HEADER.pack(_MAGIC, check, size, message.version, message.lease)
    return header + _CHECK.pack(zlib.crc32(header), 0)


def _write_all(file: int, parts: list[Buffer]) -> None:
    """Write all parts; a system call may take fewer bytes than it is given."""
    left = [memoryview(part) for part in parts]
    while left:
        written = os.writev(file, left[:64])
        while left and written >= len(left[0]):
            written -= len(left.pop(0))
        if left and written:
            left[0] = left[0][written:]


@dataclass(frozen=True)
class Segment:
    """A file of a log, which begins behind push ``version``."""

    version: int
    path: Path


def segments(folder: Path) -> list[Segment]:
    """The segments of a log, oldest first."""
    named = [(found, entry) for entry in os.listdir(folder) if (found := _NAME.fullmatch(entry))]
    return sorted((Segment(int(found[1]), folder / entry) for found, entry in named), key=lambda one: one.version)


def boot_id() -> str:
    """The name of this start of the machine; empty where the system does not say."""
    try:
        return BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def note_boot(folder: Path) -> None:
    """Note that the logs below are written since this start of the machine."""
    write_text_atomically(folder / BOOT, boot_id(), error=ElasticError)


def may_have_crashed(folder: Path) -> bool:
    """Whether the machine was started, or may have been, since the logs below were last written to."""
    path, now = folder / BOOT, boot_id()
    return not now or not path.exists() or path.read_text(encoding="ascii", errors="replace") != now


def read_back(folder: Path, version: int, *, crashed: bool = True) -> Iterator[Message]:
    """The pushes behind a version, in order. The beginning of a record at the very end is cut off, and one of full length with a wrong
    checksum if the machine may have ``crashed``. ElasticError for other damage."""
    found = segments(folder)
    needed = found[max((number for number, one in enumerate(found) if one.version <= version), default=0) :]
    if needed and needed[0].version > version:
        raise ElasticError(
            f"log {str(folder)!r} lacks pushes {version + 1} to {needed[0].version}; expected a segment that holds them: bring back the "
            "files that were removed"
        )
    at = needed[0].version if needed else version
    for one in needed:
        if one.version != at:
            raise _damaged(one.path, f"it begins behind push {one.version}, and the segment before it ends with push {at}")
        for message in _records(one, last=one is needed[-1], crashed=crashed):
            if message.version != at + 1:
                raise _damaged(one.path, f"push {message.version} comes behind push {at}")
            at += 1
            if at > version:
                yield message


def forget(folder: Path, version: int) -> None:
    """Remove the segments that hold no push behind this version."""
    found = segments(folder)
    for one, after in pairwise(found):
        if after.version <= version:
            one.path.unlink(missing_ok=True)


def _records(segment: Segment, *, last: bool, crashed: bool) -> Iterator[Message]:
    with segment.path.open("rb") as stream:
        end = os.fstat(stream.fileno()).st_size
        at = 0
        while at < end:
            try:
                message = _record(stream, segment.path, at, end)
            except _TornError as torn:
                if not last:
                    raise _damaged(segment.path, f"it ends inside a record, at byte {at}") from torn
                if torn.whole:
                    if not crashed:
                        raise _damaged(segment.path, f"{torn.whole}, and the machine has not been started since") from torn
                    warnings.warn(
                        f"log {str(segment.path)!r}: {torn.whole}; it is left out: the machine crashed while it was written, or the disk "
                        "is damaged",
                        SoapWarning,
                        stacklevel=2,
                    )
                os.truncate(segment.path, at)
                return
            yield message
            at = stream.tell()


class _TornError(Exception):
    """The rest of a file is the beginning of a record. ``whole``: what it is, if it has a record's full length."""

    def __init__(self, whole: str = "") -> None:
        super().__init__()
        self.whole = whole


def _record(stream: BufferedReader, path: Path, at: int, end: int) -> Message:
    header = stream.read(HEADER_BYTES)
    if len(header) < HEADER_BYTES:
        raise _TornError
    magic, check, size, version, lease = _HEADER.unpack_from(header)
    (header_check, _) = _CHECK.unpack_from(header, _HEADER.size)
    if magic != _MAGIC or zlib.crc32(header[: _HEADER.size]) != header_check:
        if not any(header) and _is_zero(stream):  # a machine that crashed may have made the file longer before its contents were written
            raise _TornError(f"there are zeros from byte {at} on")
        raise _damaged(path, f"no record begins at byte {at}")
    if size > end - at - HEADER_BYTES:
        raise _TornError
    body = bytearray(size)
    stream.readinto(body)
    if zlib.crc32(body) != check:
        if at + HEADER_BYTES + size == end:  # likewise
            raise _TornError(f"its last record, of push {version} at byte {at}, does not match its checksum")
        raise _damaged(path, f"the record of push {version} at byte {at} does not match its checksum")
    message = decode(body)
    if (message.version, message.lease) != (version, lease):
        raise _damaged(path, f"the record of push {version} at byte {at} holds push {message.version}")
    return message


def _is_zero(stream: BufferedReader) -> bool:
    return not any(any(chunk) for chunk in iter(lambda: stream.read(2**20), b""))


def _damaged(path: Path, why: str) -> ElasticError:
    return ElasticError(f"log {str(path)!r} is damaged: {why}; bring back the file from a copy, or begin in a new folder")


def unwritable(path: Path, lease: int, cause: OSError) -> ElasticError:
    """The error for a push that could not be written."""
    return ElasticError(
        f"log {str(path)!r} cannot be written: {reason(cause)}; the push of lease {lease} does not count: free space, push again"
    )
