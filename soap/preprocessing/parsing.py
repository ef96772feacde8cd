"""One chunk of an input, as columns: from lines by the compiled parser, from Parquet by pyarrow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from soap.preprocessing import kernel
from soap.preprocessing.container import NO_ARROW, PreprocessError
from soap.preprocessing.inputs import Chunk, Unit, line_of
from soap.preprocessing.spec import Column, Spec


def parquet() -> Any:
    """The module ``pyarrow.parquet``. PreprocessError if pyarrow is not installed."""
    try:
        import pyarrow.parquet
    except ImportError:
        raise PreprocessError(NO_ARROW) from None
    return pyarrow.parquet


MOST_BAD = 1000
"""Bad lines of a chunk that are remembered one by one."""
SHOWN_BYTES = 60
_KINDS = {"label": kernel.NUMBER, "integer": kernel.NUMBER, "hex": kernel.HEX, "string": kernel.STRING}


@dataclass(frozen=True)
class Parsed:
    """Columns of one chunk's good rows, each in the SPEC's order. ``numbers`` (labels and integers, rows) int32; ``ids`` (hex columns,
    rows) uint64, modulo what the SPEC says; texts are ``data[starts:ends]``, both (string columns, rows). ``skipped``: rows left out."""

    rows: int
    numbers: NDArray[np.int32]
    ids: NDArray[np.uint64]
    data: NDArray[np.uint8]
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    skipped: int = 0


@dataclass(frozen=True)
class Layout:
    """A SPEC as arrays for the parser. ``spare``: bytes that stand for empty text fields, to be put behind the data."""

    spec: Spec
    spare: bytes = field(init=False, default=b"")

    def __post_init__(self) -> None:
        texts = [str(column.missing).encode() for column in self.spec.columns if column.kind == "string"]
        object.__setattr__(self, "spare", b"".join(texts))

    @cached_property
    def kinds(self) -> NDArray[np.int64]:
        """Of every column."""
        return np.array([_KINDS[column.kind] for column in self.spec.columns], np.int64)

    @cached_property
    def missing(self) -> NDArray[np.uint64]:
        """The number of empty fields, as 64 bits."""
        values = [_missing(column) for column in self.spec.columns]
        return np.array([value % 2**64 for value in values], np.uint64)

    @cached_property
    def moduli(self) -> NDArray[np.uint64]:
        """0 where there is none."""
        return np.array([column.modulus for column in self.spec.columns], np.uint64)

    def places(self, begin: int) -> NDArray[np.int64]:
        """(start, end) of each column's text for empty fields, if ``spare`` lies at ``begin``."""
        places = np.zeros((len(self.spec.columns), 2), np.int64)
        for i, column in enumerate(self.spec.columns):
            if column.kind == "string":
                places[i] = begin, begin + len(str(column.missing).encode())
                begin = int(places[i, 1])
        return places

    def count(self, *kinds: str) -> int:
        """Columns of these kinds."""
        return sum(column.kind in kinds for column in self.spec.columns)


def _missing(column: Column) -> int:
    if column.kind == "hex":
        return int(str(column.missing), 16)
    return int(column.missing) if column.kind in ("label", "integer") else 0


def parse_lines(layout: Layout, data: NDArray[np.uint8], size: int, unit: Unit, chunk: Chunk, path: str, stop: bool) -> Parsed:
    """The rows of lines: the first ``size`` bytes of ``data``, behind which ``layout.spare`` lies. ``path``: of their file.
    ``stop``: PreprocessError, naming file and line, if a line does not fit the SPEC; otherwise such lines are left out."""
    most = int(kernel.count_lines(data[:size]))
    numbers = np.empty((layout.count("label", "integer"), most), np.int32)
    ids = np.empty((layout.count("hex"), most), np.uint64)
    starts, ends = (np.empty((layout.count("string"), most), np.int64) for _ in range(2))
    bad = np.empty((1 if stop else MOST_BAD, 5), np.int64)
    rows, wrong, _ = kernel.parse(
        data, size, layout.kinds, layout.missing, layout.moduli, layout.places(size), kernel.DIGITS, numbers, ids, starts, ends, bad
    )
    if wrong and stop:
        raise PreprocessError(_fault(layout.spec, data[:size], bad[0], unit, chunk, path))
    return Parsed(rows, numbers[:, :rows], ids[:, :rows], data, starts[:, :rows], ends[:, :rows], int(wrong))


def _fault(spec: Spec, data: NDArray[np.uint8], bad: NDArray[np.int64], unit: Unit, chunk: Chunk, path: str) -> str:
    """What is wrong with a line, where it is, and how it begins."""
    _, begin, fault, fields, place = map(int, bad)
    line, _ = line_of(path, chunk.begin, begin)
    text = data[begin : begin + SHOWN_BYTES].tobytes().split(b"\n")[0].split(b"\r")[0]
    shown = repr(text.decode("utf-8", "backslashreplace")) + ("…" if len(text) == SHOWN_BYTES else "")
    expected = len(spec.columns)
    if fault == kernel.WRONG_COUNT:
        what = f"{fields} columns instead of {expected}"
    else:
        name = spec.columns[place].name
        limits = "a whole number below 2^31" if fault == kernel.NO_NUMBER else "at most 16 hexadecimal digits"
        what = f"column {place + 1} ({name}) is not {limits}"
    return f"{unit.path!r}, line {line}: {what}; it begins {shown}: correct it, or leave such lines out: on_error='skip' (--on-error skip)"


def cut_row_groups(unit: Unit, spec: Spec, chunk_bytes: int) -> tuple[Chunk, ...]:
    """Chunks of whole row groups, as many as ``chunk_bytes`` hold, but at least one. PreprocessError if a column is missing."""
    with _opened(unit) as file:
        _check_columns(file.schema_arrow.names, spec, unit)
        sizes = [file.metadata.row_group(i).total_byte_size for i in range(file.metadata.num_row_groups)]
    chunks: list[Chunk] = []
    begin = held = 0
    for i, size in enumerate(sizes):
        if i > begin and held + size > chunk_bytes:
            chunks.append(Chunk(unit.number, len(chunks), begin, i, held))
            begin, held = i, 0
        held += size
    return (*chunks, Chunk(unit.number, len(chunks), begin, len(sizes), held))


def parse_row_groups(layout: Layout, unit: Unit, chunk: Chunk, stop: bool) -> tuple[Parsed, list[NDArray[np.uint8]]]:
    """The rows of row groups, and the bytes that they were made from, for a checksum."""
    spec = layout.spec
    with _opened(unit) as file:
        _check_columns(file.schema_arrow.names, spec, unit)
        try:
            table = file.read_row_groups(range(chunk.begin, chunk.end), columns=[c.name for c in spec.columns], use_threads=False)
        except (OSError, ValueError, NotImplementedError) as cause:  # pyarrow's errors are such
            raise PreprocessError(f"input {unit.path!r} cannot be read: {_line(cause)}; check the file") from None
    if not chunk.end > chunk.begin:
        table = table.slice(0, 0)
    good = np.ones(len(table), bool)
    numbers, ids, texts = [], [], []
    raw: list[NDArray[np.uint8]] = []
    for column in spec.columns:
        values = table.column(column.name).combine_chunks()
        values = values.combine_chunks() if hasattr(values, "combine_chunks") else values
        if column.kind in ("label", "integer"):
            own, valid = _whole_numbers(values, column, unit)
            numbers.append(own)
            raw.append(own.view(np.uint8))
        elif column.kind == "hex":
            own_ids, valid = _hex_numbers(values, column, unit)
            ids.append(own_ids)
            raw.append(own_ids.view(np.uint8))
        else:
            text, valid = _text_of(values, column, unit), good
            texts.append(text)
            raw += [text[0], text[1].view(np.uint8)]
        raw.append(np.asarray(valid).view(np.uint8))
        if stop and not valid.all():
            row = int(np.flatnonzero(~valid)[0])
            kind = "a whole number below 2^31" if column.kind in ("label", "integer") else "at most 16 hexadecimal digits"
            where = f"row {row} from row group {chunk.begin} on"
            shown = repr(values[row].as_py())[:SHOWN_BYTES]
            raise PreprocessError(
                f"{unit.path!r}, {where}: column {column.name} is not {kind} but {shown}: correct it, or leave such rows out: "
                "on_error='skip' (--on-error skip)"
            )
        good &= valid
    kept = np.flatnonzero(good)
    data, starts, ends = _joined(texts, len(good))
    rows = len(kept)
    number = np.stack(numbers)[:, kept] if numbers else np.empty((0, rows), np.int32)
    number_ids = np.stack(ids)[:, kept] if ids else np.empty((0, rows), np.uint64)
    found = Parsed(rows, number, number_ids, data, starts[:, kept], ends[:, kept], len(good) - rows)
    return found, raw


def _joined(
    texts: Sequence[tuple[NDArray[np.uint8], NDArray[np.int64]]], rows: int
) -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.int64]]:
    """All texts' bytes one after the other, and where each begins and ends."""
    if not texts:
        return np.empty(0, np.uint8), np.empty((0, rows), np.int64), np.empty((0, rows), np.int64)
    begins = np.cumsum([0, *(len(data) for data, _ in texts)])
    starts = np.stack([bounds[:-1] + begin for (_, bounds), begin in zip(texts, begins, strict=False)])
    ends = np.stack([bounds[1:] + begin for (_, bounds), begin in zip(texts, begins, strict=False)])
    return np.concatenate([data for data, _ in texts]), starts, ends


def _whole_numbers(values: Any, column: Column, unit: Unit) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
    """Numbers, and which of them are such."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if not pa.types.is_integer(values.type):
        raise _wrong_type(values.type, column, unit, "integers")
    whole = pc.fill_null(values, pa.scalar(int(column.missing), values.type)) if values.null_count else values
    if pa.types.is_uint64(whole.type):
        own = whole.to_numpy(zero_copy_only=False)
        valid = own < 2**31
    else:
        own = whole.cast(pa.int64()).to_numpy(zero_copy_only=False)
        valid = (own < 2**31) & (own > -(2**31) - 1)
    return np.where(valid, own, 0).astype(np.int32), valid


def _hex_numbers(values: Any, column: Column, unit: Unit) -> tuple[NDArray[np.uint64], NDArray[np.bool_]]:
    """Ids: integers as they are, texts as hexadecimal digits."""
    import pyarrow as pa
    import pyarrow.compute as pc

    missing = _missing(column)
    if pa.types.is_integer(values.type):
        if not pa.types.is_unsigned_integer(values.type):
            negative = pc.any(pc.less(values, 0)).as_py()
            if negative:
                raise PreprocessError(f"{unit.path!r}: column {column.name} has negative ids; expected ids of at least 0, or text")
        filled = pc.fill_null(values.cast(pa.uint64()), pa.scalar(missing, pa.uint64()))
        own = filled.to_numpy(zero_copy_only=False).copy()
        valid = np.ones(len(own), bool)
    else:
        data, bounds = _text_of(values, column, unit, b"")
        spare = np.zeros((1, 2), np.int64)
        lines, size = _as_lines(data, bounds)
        own = np.empty((1, len(values)), np.uint64)
        none, empty = np.empty((0, len(values)), np.int32), np.empty((0, len(values)), np.int64)
        bad = np.empty((len(values), 5), np.int64)
        kinds, moduli = np.array([kernel.HEX]), np.zeros(1, np.uint64)
        rows, wrong, count = kernel.parse(
            lines, size, kinds, np.array([missing], np.uint64), moduli, spare, kernel.DIGITS, none, own, empty, empty, bad
        )
        if count != len(values):
            raise PreprocessError(f"{unit.path!r}: column {column.name} has texts with line breaks; expected hexadecimal digits")
        valid = np.ones(len(values), bool)
        valid[bad[:wrong, 0]] = False
        whole = np.zeros(len(values), np.uint64)
        whole[valid] = own[0, :rows]
        own = whole
    if column.modulus:
        own %= np.uint64(column.modulus)
    return own, valid


def _as_lines(data: NDArray[np.uint8], bounds: NDArray[np.int64]) -> tuple[NDArray[np.uint8], int]:
    """Texts with a line feed behind each."""
    lines = np.full(len(data) + len(bounds) - 1, kernel.NEWLINE, np.uint8)
    lengths = np.diff(bounds)
    lines[np.arange(len(data)) + np.repeat(np.arange(len(lengths)), lengths)] = data
    return lines, len(lines)


def _text_of(values: Any, column: Column, unit: Unit, missing: bytes | None = None) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Bytes and bounds of texts, with the SPEC's text in place of empty ones."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    kinds = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    if not any(is_kind(values.type) for is_kind in kinds):
        raise _wrong_type(values.type, column, unit, "texts")
    texts = values.cast(pa.large_binary())
    filler = pa.scalar(str(column.missing).encode() if missing is None else missing, pa.large_binary())
    texts = pc.fill_null(texts, filler)
    texts = pc.if_else(pc.equal(pc.binary_length(texts), 0), filler, texts)
    if not len(texts):
        return np.empty(0, np.uint8), np.zeros(1, np.int64)
    _, offsets, data = texts.buffers()
    bounds = np.frombuffer(offsets, np.int64)[texts.offset : texts.offset + len(texts) + 1]
    whole = np.frombuffer(data, np.uint8) if data is not None else np.empty(0, np.uint8)
    return whole[bounds[0] : bounds[-1]], bounds - bounds[0]


def _opened(unit: Unit) -> Any:
    try:
        return parquet().ParquetFile(unit.path)
    except (OSError, ValueError) as cause:
        raise PreprocessError(f"input {str(Path(unit.path))!r} cannot be read: {_line(cause)}; check the file") from None


def _check_columns(names: Sequence[str], spec: Spec, unit: Unit) -> None:
    for column in spec.columns:
        if column.name not in names:
            some = ", ".join(names[:10])
            raise PreprocessError(f"input {unit.path!r} has no column {column.name!r} but {some}; expected all columns of the SPEC")


def _wrong_type(found: Any, column: Column, unit: Unit, expected: str) -> PreprocessError:
    return PreprocessError(f"input {unit.path!r}: column {column.name!r} has type {found}; expected {expected}, as the SPEC says")


def _line(cause: Exception) -> str:
    return " ".join(str(cause).split())[:200]
