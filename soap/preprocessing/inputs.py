"""Units of work: input files in chronological order, and the chunks of them."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from soap.files import reason
from soap.preprocessing.container import PreprocessError

TSV, GZIP, PARQUET = "tsv", "gzip", "parquet"
SEARCH_BYTES = 1 << 16
"""Bytes that are read at once in search of a line's end."""


@dataclass(frozen=True, slots=True)
class Unit:
    """One input file. ``size``: bytes; ``mtime_ns`` tells a changed file from what it was."""

    number: int
    path: str
    kind: str
    size: int
    mtime_ns: int

    @property
    def name(self) -> str:
        """The file's name without folders."""
        return Path(self.path).name


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a unit: lines that begin in bytes [begin, end), or Parquet row groups [begin, end). ``size``: bytes, about."""

    unit: int
    number: int
    begin: int
    end: int
    size: int

    @property
    def name(self) -> str:
        """Tells it from all chunks of any cut of the input."""
        return f"{self.unit:05d}-{self.begin:015d}-{self.end:015d}"


def find_units(paths: Sequence[str | Path]) -> tuple[Unit, ...]:
    """The units of these files, in this order. A folder stands for its files by name, where numbers count as such: ``day_2`` comes before
    ``day_10``. PreprocessError if one cannot be read, or there is none."""
    files: list[Path] = []
    for path in map(Path, paths):
        try:
            inside = (p for p in path.iterdir() if p.is_file() and not p.name.startswith(".")) if path.is_dir() else [path]
            files += sorted(inside, key=_by_name)
        except OSError as cause:
            raise _unreadable(path, cause) from None
    if not files:
        raise PreprocessError(f"no input files in {', '.join(map(str, paths)) or 'nothing'}; expected TSV, TSV.gz or Parquet files")
    return tuple(_unit(number, path) for number, path in enumerate(files))


def _by_name(path: Path) -> tuple[list[tuple[str, int]], str]:
    parts = re.findall(r"([^0-9]*)([0-9]*)", path.name)
    return [(text, int(digits or -1)) for text, digits in parts], path.name


def _unit(number: int, path: Path) -> Unit:
    try:
        if path.exists() and not path.is_file():
            raise OSError(None, "it is no ordinary file")
        with path.open("rb") as stream:
            begin = stream.read(4)
        stat = path.stat()
    except OSError as cause:
        raise _unreadable(path, cause) from None
    kind = GZIP if begin[:2] == b"\x1f\x8b" else PARQUET if begin == b"PAR1" else TSV
    return Unit(number, str(path.resolve()), kind, stat.st_size, stat.st_mtime_ns)


def cut_lines(unit: int, size: int, chunk_bytes: int) -> tuple[Chunk, ...]:
    """Chunks of so many bytes; one for an empty file, so that every unit has some."""
    begins = range(0, max(1, size), chunk_bytes)
    return tuple(
        Chunk(unit, number, begin, min(size, begin + chunk_bytes), min(size, begin + chunk_bytes) - begin)
        for number, begin in enumerate(begins)
    )


def read_lines(path: str, begin: int, end: int, spare: bytes = b"") -> tuple[NDArray[np.uint8], int]:
    """The lines that begin in bytes [begin, end) of a file, with ``spare`` behind them, and how many bytes they are.

    A chunk ends behind a line feed only: lines that end with a carriage return alone stay together.
    """
    try:
        with open(path, "rb", buffering=0) as stream:
            descriptor = stream.fileno()
            size = os.fstat(descriptor).st_size
            first = 0 if begin == 0 else _behind_newline(descriptor, begin - 1, size)
            last = size if end >= size else _behind_newline(descriptor, end - 1, size)
            length = max(0, last - first) if first < end or end >= size else 0
            data = np.empty(length + len(spare), np.uint8)
            view, done = data.data, 0
            while done < length:
                read = os.preadv(descriptor, [view[done : min(length, done + 2**30)]], first + done)
                if not read:
                    raise OSError(None, "it became shorter while it was read")
                done += read
    except OSError as cause:
        raise _unreadable(Path(path), cause) from None
    data[length:] = np.frombuffer(spare, np.uint8)
    return data, length


def line_of(path: str, begin: int, inside: int) -> tuple[int, int]:
    """Number, from 1, of the line that begins ``inside`` bytes into the chunk that begins at byte ``begin``, and its place in the file."""
    with open(path, "rb", buffering=0) as stream:
        descriptor = stream.fileno()
        first = 0 if begin == 0 else _behind_newline(descriptor, begin - 1, os.fstat(descriptor).st_size)
        place, lines, before = 0, 1, b""
        while place < first + inside:
            block = os.pread(descriptor, min(2**24, first + inside - place), place)
            joined = before + block
            # CRLF is one end of a line, also where a block ends between its two bytes
            lines += block.count(b"\n") + block.count(b"\r") - joined.count(b"\r\n")
            place, before = place + len(block), block[-1:] if block.endswith(b"\r") else b""
            if not block:
                break
    return lines, first + inside


def _behind_newline(descriptor: int, position: int, size: int) -> int:
    """Where the line behind the first line feed at or behind ``position`` begins."""
    while position < size:
        block = os.pread(descriptor, SEARCH_BYTES, position)
        found = block.find(b"\n")
        if found >= 0:
            return position + found + 1
        if not block:
            break
        position += len(block)
    return size


def _unreadable(path: Path, cause: OSError) -> PreprocessError:
    return PreprocessError(f"input {str(path)!r} cannot be read: {reason(cause)}; check the path and its permissions")
