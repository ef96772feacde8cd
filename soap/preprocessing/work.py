"""What a run works on: its input, its SPEC, its folder and the tasks of its steps. Plain values, which executors send to their workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from soap.preprocessing.container import key_of
from soap.preprocessing.inputs import GZIP, Chunk, Unit
from soap.preprocessing.spec import Spec

FORMAT = 1
"""Of files that steps leave for each other; another number makes all of them anew."""
ROWS_PER_GROUP = 2**18
"""Rows of each Parquet file, which is one row group, whatever the chunks are."""
OPEN, INDEX, UNITE, MERGE, CONVERT, WRITE = "open", "index", "unite", "merge", "convert", "write"
STEPS = (OPEN, INDEX, UNITE, MERGE, CONVERT, WRITE)
"""Uncompress inputs; index chunks; unite the dictionaries of a unit's chunks; merge those of all units; convert chunks to the final
indices; write Parquet."""
NAMES = {"labels": "labels.npy", "numbers": "numbers.npy", "categories": "categories.npy"}
"""The final arrays."""
DICTIONARIES, PARQUET_FOLDER = "dictionaries", "parquet"
"""Folders of the result."""


def part_name(number: int) -> str:
    """The name of a Parquet file."""
    return f"part-{number:06d}.parquet"


@dataclass(frozen=True, slots=True)
class Work:
    """``folder``: of this run's files. ``stop``: a wrong line ends the run. ``parquet``: whether to write it, compressed by ``codec``."""

    folder: str
    spec: Spec
    units: tuple[Unit, ...]
    stop: bool = True
    parquet: bool = True
    codec: str = "none"
    rows_per_group: int = ROWS_PER_GROUP

    @property
    def path(self) -> Path:
        """The folder."""
        return Path(self.folder)

    @property
    def out(self) -> Path:
        """Where the result is put together."""
        return self.path / "out"

    @property
    def key(self) -> str:
        """What chunks depend on beside their bytes."""
        return key_of(FORMAT, self.spec.hash, self.stop)

    def source(self, unit: int) -> str:
        """The file whose bytes are read: the input, or what was uncompressed of it."""
        own = self.units[unit]
        return str(self.path / f"open-{unit:05d}.tsv") if own.kind == GZIP else own.path

    def indexed(self, chunk: Chunk) -> Path:
        """A chunk's numbers, codes and dictionaries."""
        return self.path / f"index-{chunk.name}.arrays"

    def united(self, unit: int) -> Path:
        """A unit's dictionaries, and where each of its chunks' entries are in them."""
        return self.path / f"unite-{unit:05d}.arrays"

    def merged(self, dictionary: str) -> Path:
        """A whole dictionary, and where each unit's entries are in it."""
        return self.path / f"merge-{dictionary}.arrays"


@dataclass(frozen=True, slots=True)
class Task:
    """One piece of work of a step. ``node`` does it. ``size``: bytes that it is about, ``chunk`` what it reads, ``first_row`` where rows
    belong; ``name``: of a dictionary; ``made_of``: what its inputs' records say."""

    step: str
    number: int
    unit: int = 0
    size: int = 0
    chunk: Chunk | None = None
    first_row: int = 0
    rows: int = 0
    name: str = ""
    made_of: str = ""
    others: tuple[Chunk, ...] = ()
    node: int = 0


@dataclass(frozen=True, slots=True)
class Done:
    """What a task did. ``made``: the checksum of what it left; ``kept``: whether that was there already; ``peak_bytes``: memory that it
    needed, at its peak, beyond what its process had before (0: not measured)."""

    task: Task
    rows: int = 0
    skipped: int = 0
    made: str = ""
    kept: bool = False
    peak_bytes: int = 0
    seconds: float = 0.0


def made_of(found: Sequence[Done]) -> str:
    """What a later step depends on: what earlier ones left."""
    return key_of([done.made for done in found])
