"""What each step does with one task. A task reads what is on disk, writes its own files as a whole, and may be done anywhere, any number of
times, in any order within its step: the result is the same.
"""

from __future__ import annotations

import errno
import gzip
import os
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from soap.files import reason
from soap.preprocessing import kernel
from soap.preprocessing.container import (
    Array,
    PreprocessError,
    checksum_of,
    file_checksum,
    key_of,
    read_arrays,
    read_record,
    unwritable,
    whole,
    write_all,
    write_arrays,
    write_record,
)
from soap.preprocessing.inputs import PARQUET, Chunk, read_lines
from soap.preprocessing.parsing import Layout, Parsed, parquet, parse_lines, parse_row_groups
from soap.preprocessing.result import BLOCK_ROWS, opened_arrays, written_arrays
from soap.preprocessing.spec import Column
from soap.preprocessing.work import CONVERT, INDEX, MERGE, NAMES, OPEN, PARQUET_FOLDER, UNITE, WRITE, Done, Task, Work, part_name

FIRST_PLACES = 1 << 10
NO_WEIGHTS: NDArray[np.int64] = np.empty(0, np.int64)


@dataclass(frozen=True)
class Texts:
    """Texts one after the other: text i is ``data[bounds[i]:bounds[i + 1]]``."""

    data: NDArray[np.uint8]
    bounds: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.bounds) - 1


class IdEncoder:
    """A dictionary of ids (uint64)."""

    def __init__(self) -> None:
        self._known = 0
        self._table = np.full(FIRST_PLACES, -1, np.int32)
        self._seen = np.empty(FIRST_PLACES // 2, np.uint64)
        self._counts = np.empty(FIRST_PLACES // 2, np.int64)

    def add(self, values: NDArray[np.uint64], weights: NDArray[np.int64] = NO_WEIGHTS) -> NDArray[np.int32]:
        """Indices of values (columns, rows), which are new row by row, and in a row by column. ``weights``: how often each row counts."""
        codes = np.empty(values.shape, np.int32)
        position = 0
        while True:
            position, self._known = kernel.add_ids(values, weights, position, self._known, self._table, self._seen, self._counts, codes)
            if position == values.size:
                return codes
            self._grow()

    def _grow(self) -> None:
        places = 4 * len(self._table)
        self._table = np.full(places, -1, np.int32)
        self._seen, self._counts = _longer(self._seen, places // 2), _longer(self._counts, places // 2)
        kernel.place_ids(self._seen, self._known, self._table)

    @property
    def values(self) -> NDArray[np.uint64]:
        """All values, by index."""
        return self._seen[: self._known]

    @property
    def counts(self) -> NDArray[np.int64]:
        """How often each came."""
        return self._counts[: self._known]


class TextEncoder:
    """A dictionary of texts (bytes)."""

    def __init__(self) -> None:
        self._known = self._used = 0
        self._table = np.full(FIRST_PLACES, -1, np.int32)
        self._hashes = np.empty(FIRST_PLACES // 2, np.uint64)
        self._counts = np.empty(FIRST_PLACES // 2, np.int64)
        self._bounds = np.zeros(FIRST_PLACES // 2 + 1, np.int64)
        self._text = np.empty(FIRST_PLACES, np.uint8)

    def add(
        self, data: NDArray[np.uint8], starts: NDArray[np.int64], ends: NDArray[np.int64], weights: NDArray[np.int64] = NO_WEIGHTS
    ) -> NDArray[np.int32]:
        """Indices of the texts ``data[starts:ends]`` (columns, rows); see ``IdEncoder.add``."""
        codes = np.empty(starts.shape, np.int32)
        position = 0
        while True:
            position, self._known, self._used = kernel.add_texts(
                data, (starts, ends), weights, position, self._known, self._table, self._hashes, self._text, self._bounds, self._used,
                self._counts, codes,
            )  # fmt: skip
            if position == starts.size:
                return codes
            column, row = position % len(starts), position // len(starts)
            self._grow(int(ends[column, row] - starts[column, row]))

    def _grow(self, more: int) -> None:
        if self._known >= len(self._hashes):
            places = 4 * len(self._table)
            self._table = np.full(places, -1, np.int32)
            self._hashes, self._counts = _longer(self._hashes, places // 2), _longer(self._counts, places // 2)
            self._bounds = _longer(self._bounds, places // 2 + 1)
            kernel.place_texts(self._hashes, self._known, self._table)
        if self._used + more > len(self._text):
            self._text = _longer(self._text, 2 * len(self._text) + more)

    @property
    def values(self) -> Texts:
        """All texts, by index."""
        return Texts(self._text[: self._used], self._bounds[: self._known + 1])

    @property
    def counts(self) -> NDArray[np.int64]:
        """How often each came."""
        return self._counts[: self._known]


def _longer(array: NDArray[Any], length: int) -> NDArray[Any]:
    grown = np.empty(length, array.dtype)
    grown[: len(array)] = array
    return grown


NARROW = 2**16
"""Dictionaries of at most so many entries have codes of two bytes."""
MOST_INFLATED, INFLATED_SPARE_BYTES = 200, 2**30
"""A compressed input may become so many times as long, and so much longer in any case. Rows of numbers become about ten times as long."""


def perform(work: Work, task: Task) -> Done:
    """Do one task, unless what it would leave is there already. PreprocessError if that fails; MemoryError if memory is too short."""
    try:
        return _STEPS[task.step](work, task)
    except OSError as cause:  # writers have told theirs: a file that was there is gone, or cannot be mapped
        if cause.errno == errno.ENOMEM:
            raise MemoryError from None
        path = str(cause.filename or work.folder)
        raise PreprocessError(f"{path!r} cannot be read: {reason(cause)}; check it: the same command goes on from what is done") from None


def _open(work: Work, task: Task) -> Done:
    """Uncompress a unit."""
    unit, path = work.units[task.unit], Path(work.source(task.unit))
    record = Path(f"{path}.json")
    key = key_of(work.key, unit.path, _file_key(unit.path))
    found = read_record(record, key)
    if found and path.exists() and path.stat().st_size == found["size"]:
        return Done(task, rows=found["size"], kept=True)
    with gzip.open(unit.path) as source, whole(path) as temporary, temporary.open("wb") as target:
        while block := _block(source, unit.path):
            if target.tell() > MOST_INFLATED * unit.size + INFLATED_SPARE_BYTES:
                said = f"its {unit.size} bytes became more than {target.tell()}"
                raise PreprocessError(f"input {unit.path!r} is no data: {said}; uncompress it yourself if it is right")
            target.write(block)
    size = path.stat().st_size
    write_record(record, key, size=size)
    return Done(task, rows=size)


def _block(source: gzip.GzipFile, path: str) -> bytes:
    try:
        return source.read(2**22)
    except (EOFError, zlib.error, gzip.BadGzipFile, OSError) as cause:
        text = reason(cause) if isinstance(cause, OSError) else str(cause)
        raise PreprocessError(f"input {path!r} cannot be uncompressed: {text}; expected a whole gzip file") from None


def _file_key(path: str) -> str:
    """Of all bytes of a file."""
    data = np.memmap(path, np.uint8, "r") if os.path.getsize(path) else np.empty(0, np.uint8)
    return key_of([checksum_of(data[i : i + 2**26]) for i in range(0, len(data), 2**26)])


def _index(work: Work, task: Task) -> Done:
    """Parse a chunk and index its categories by themselves."""
    chunk, layout = _chunk(task), Layout(work.spec)
    path, record = work.indexed(chunk), _record(work.indexed(chunk))
    unit = work.units[chunk.unit]
    if unit.kind == PARQUET:
        parsed, raw = parse_row_groups(layout, unit, chunk, work.stop)
        key = key_of(work.key, [checksum_of(one) for one in raw])
        del raw
    else:
        source = work.source(chunk.unit)
        data, size = read_lines(source, chunk.begin, chunk.end, layout.spare)
        key = key_of(work.key, size, checksum_of(data))
    found = read_record(record, key)
    if found and file_checksum(path) == found["made"]:
        return Done(task, found["rows"], found["skipped"], found["made"], kept=True)
    if unit.kind != PARQUET:
        parsed = parse_lines(layout, data, size, unit, chunk, source, work.stop)
    made = write_arrays(path, encoded(layout, parsed))
    write_record(record, key, made=made, rows=parsed.rows, skipped=parsed.skipped)
    return Done(task, parsed.rows, parsed.skipped, made)


def encoded(layout: Layout, parsed: Parsed) -> dict[str, Array]:
    """A chunk's numbers, codes by column, and values and counts by dictionary."""
    arrays: dict[str, Array] = {"numbers": parsed.numbers}
    ids = {column.name: i for i, column in enumerate(c for c in layout.spec.columns if c.kind == "hex")}
    texts = {column.name: i for i, column in enumerate(c for c in layout.spec.columns if c.kind == "string")}
    for name, columns in layout.spec.dictionaries.items():
        if columns[0].kind == "hex":
            encoder = IdEncoder()
            codes = encoder.add(_rows_of(parsed.ids, [ids[column.name] for column in columns]))
            arrays[f"values:{name}"], counts = encoder.values, encoder.counts
        else:
            own = [texts[column.name] for column in columns]
            texts_encoder = TextEncoder()
            codes = texts_encoder.add(parsed.data, _rows_of(parsed.starts, own), _rows_of(parsed.ends, own))
            arrays[f"values:{name}"], counts = texts_encoder.values.data, texts_encoder.counts
            arrays[f"bounds:{name}"] = texts_encoder.values.bounds
        arrays[f"counts:{name}"] = counts
        narrow = codes.astype(np.uint16) if len(counts) <= NARROW else codes
        arrays |= {f"codes:{column.name}": narrow[i] for i, column in enumerate(columns)}
    return arrays


def _rows_of(array: Array, rows: list[int]) -> Array:
    """These rows, without a copy where they follow each other."""
    if rows == list(range(rows[0], rows[0] + len(rows))):
        return array[rows[0] : rows[0] + len(rows)]
    return array[rows]


def _unite(work: Work, task: Task) -> Done:
    """The dictionaries of a unit: those of its chunks, in order."""
    path, key = work.united(task.unit), key_of(work.key, task.made_of)
    return _kept(task, path, key) or _finished(task, path, key, _united(work, task))


def _united(work: Work, task: Task) -> dict[str, Array]:
    joined = {name: _Joined(name, columns[0]) for name, columns in work.spec.dictionaries.items()}
    for chunk in task.others:
        part = read_arrays(work.indexed(chunk))
        for own in joined.values():
            own.add(part)
    return {name: array for own in joined.values() for name, array in own.arrays().items()}


class _Joined:
    """One dictionary of several, in order of first appearance."""

    def __init__(self, name: str, column: Column) -> None:
        self._name = name
        self._encoder = IdEncoder() if column.kind == "hex" else TextEncoder()
        self._places: list[NDArray[np.int32]] = [np.empty(0, np.int32)]

    def add(self, part: Mapping[str, Array]) -> None:
        """The next one."""
        values, counts = part[f"values:{self._name}"], part[f"counts:{self._name}"]
        if isinstance(self._encoder, IdEncoder):
            found = self._encoder.add(values[None], counts)
        else:
            bounds = part[f"bounds:{self._name}"]
            found = self._encoder.add(values, bounds[None, :-1], bounds[None, 1:], counts)
        self._places.append(found[0])

    def arrays(self) -> dict[str, Array]:
        """All values and counts, and the new place of every part's entries (``places``, part after part, cut at ``cuts``)."""
        found: dict[str, Array] = {"counts": self._encoder.counts, "places": np.concatenate(self._places)}
        found["cuts"] = np.cumsum([len(own) for own in self._places])
        if isinstance(self._encoder, IdEncoder):
            found["values"] = self._encoder.values
        else:
            found |= {"values": self._encoder.values.data, "bounds": self._encoder.values.bounds}
        return {f"{key}:{self._name}": array for key, array in found.items()}


def _merge(work: Work, task: Task) -> Done:
    """One dictionary of all units, in their order; what is too rare shares row 0."""
    path, key = work.merged(task.name), key_of(work.key, task.made_of, task.name)
    kept = _kept(task, path, key)
    if kept:
        return kept
    column = work.spec.dictionaries[task.name][0]
    name = task.name
    joined = _Joined(name, column)
    for unit in work.units:
        joined.add(read_arrays(work.united(unit.number)))
    whole = joined.arrays()
    if column.min_count > 1:
        whole = _without_rare(name, column, whole)
    return _finished(task, path, key, whole)


def _without_rare(name: str, column: Column, whole: dict[str, Array]) -> dict[str, Array]:
    """Row 0 counts everything that is seen less than ``min_count`` times; the others follow in their order."""
    counts, places = whole[f"counts:{name}"], whole[f"places:{name}"]
    often = counts >= column.min_count
    row = np.where(often, np.cumsum(often), 0).astype(np.int32)
    found = {**whole, f"places:{name}": row[places]}
    found[f"counts:{name}"] = np.concatenate([[counts[~often].sum()], counts[often]]).astype(np.int64)
    if column.kind == "hex":
        found[f"values:{name}"] = whole[f"values:{name}"][often]
    else:
        bounds = whole[f"bounds:{name}"]
        lengths = np.diff(bounds)
        found[f"values:{name}"] = whole[f"values:{name}"][np.repeat(often, lengths)]
        found[f"bounds:{name}"] = np.concatenate([[0], np.cumsum(lengths[often])]).astype(np.int64)
    return found


def _convert(work: Work, task: Task) -> Done:
    """A chunk's rows in the final arrays, at their place."""
    chunk = _chunk(task)
    record = work.path / f"convert-{chunk.name}.json"
    key = key_of(work.key, task.made_of, task.first_row, task.rows)
    found = read_record(record, key)
    if found and written_arrays(work, task) == found["made"]:
        return Done(task, task.rows, made=found["made"], kept=True)
    indexed = read_arrays(work.indexed(chunk))
    united = read_arrays(work.united(chunk.unit))
    mappings = {name: _mapping(work, name, united, chunk) for name in work.spec.dictionaries}
    kinds = [column.kind for column in work.spec.columns if column.kind in ("label", "integer")]
    labels = [i for i, kind in enumerate(kinds) if kind == "label"]
    numbers = [i for i, kind in enumerate(kinds) if kind == "integer"]
    sums: list[str] = []
    files = {name: opened_arrays(work, name) for name in NAMES}
    try:
        for begin in range(0, task.rows, BLOCK_ROWS):
            end = min(task.rows, begin + BLOCK_ROWS)
            block = indexed["numbers"][:, begin:end]
            blocks = {
                "labels": np.ascontiguousarray(block[labels].T),
                "numbers": np.ascontiguousarray(np.maximum(block[numbers], 0).T),
                "categories": _categories(work, indexed, mappings, begin, end - begin),
            }
            for name, own in blocks.items():
                sums.append(checksum_of(own))
                descriptor, offset = files[name]
                write_all(descriptor, own, offset + (task.first_row + begin) * 4 * own.shape[1])
    except OSError as cause:
        raise unwritable(work.out, cause) from None
    finally:
        for descriptor, _ in files.values():
            os.close(descriptor)
    made = key_of(sums)
    write_record(record, key, made=made)
    return Done(task, task.rows, made=made)


def _categories(
    work: Work, indexed: Mapping[str, Array], mappings: Mapping[str, NDArray[np.int32]], begin: int, rows: int
) -> NDArray[np.int32]:
    out = np.empty((rows, len(work.spec.categories)), np.int32)
    for place, column in enumerate(work.spec.categories):
        kernel.convert(indexed[f"codes:{column.name}"], rows, begin, mappings[column.dictionary], out, place)
    return out


def _mapping(work: Work, name: str, united: Mapping[str, Array], chunk: Chunk) -> NDArray[np.int32]:
    """The final row of each entry of a chunk's dictionary."""
    merged = read_arrays(work.merged(name))
    to_unit = _part(united, name, chunk.number)
    found: NDArray[np.int32] = _part(merged, name, chunk.unit)[to_unit]
    return found


def _part(arrays: Mapping[str, Array], name: str, number: int) -> Array:
    cuts = arrays[f"cuts:{name}"]
    return arrays[f"places:{name}"][cuts[number] : cuts[number + 1]]


def _write(work: Work, task: Task) -> Done:
    """One Parquet file of so many rows."""
    path = work.out / PARQUET_FOLDER / part_name(task.number)
    record = work.path / f"write-{task.number:06d}.json"
    key = key_of(work.key, task.made_of, task.first_row, task.rows, work.codec)
    found = read_record(record, key)
    if found and path.exists() and _file_key(str(path)) == found["made"]:
        return Done(task, task.rows, made=found["made"], kept=True)
    module = parquet()
    import pyarrow as pa

    arrays = {name: np.load(work.out / file, mmap_mode="r")[task.first_row : task.first_row + task.rows] for name, file in NAMES.items()}
    groups = (("labels", work.spec.labels), ("numbers", work.spec.numbers), ("categories", work.spec.categories))
    columns = {column.name: pa.array(np.ascontiguousarray(arrays[name][:, i])) for name, own in groups for i, column in enumerate(own)}
    table = pa.table({column.name: columns[column.name] for column in work.spec.columns})
    with whole(path) as temporary:
        packed = work.codec != "none"
        module.write_table(
            table, temporary, compression=work.codec, use_dictionary=packed, write_statistics=False, row_group_size=work.rows_per_group
        )
    made = _file_key(str(path))
    write_record(record, key, made=made)
    return Done(task, task.rows, made=made)


def _chunk(task: Task) -> Chunk:
    assert task.chunk is not None, f"a task of step {task.step} has a chunk"
    return task.chunk


def _record(path: Path) -> Path:
    return path.with_suffix(".json")


def _kept(task: Task, path: Path, key: str) -> Done | None:
    """What is there, if it was made from the same."""
    found = read_record(_record(path), key)
    if found and file_checksum(path) == found["made"]:
        return Done(task, made=found["made"], kept=True)
    return None


def _finished(task: Task, path: Path, key: str, arrays: dict[str, Array]) -> Done:
    made = write_arrays(path, arrays)
    write_record(_record(path), key, made=made)
    return Done(task, made=made)


_STEPS: dict[str, Callable[[Work, Task], Done]] = {
    OPEN: _open, INDEX: _index, UNITE: _unite, MERGE: _merge, CONVERT: _convert, WRITE: _write,
}  # fmt: skip
