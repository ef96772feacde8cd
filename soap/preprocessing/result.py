"""The result: which files it has, how they come to their place, and ``meta.json``, which is written last: where it is, all is whole."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from soap.files import write_text_atomically
from soap.preprocessing.container import PreprocessError, checksum_of, key_of, unwritable, whole
from soap.preprocessing.work import DICTIONARIES, FORMAT, NAMES, PARQUET_FOLDER, Done, Task, Work, part_name

META = "meta.json"
_OURS = re.compile(r"part-[0-9]{6,}\.parquet|[A-Za-z0-9_-]+\.(values|bounds|counts)\.npy")
"""Names that a result's files may have in its folders."""


def read(out: Path) -> dict[str, Any] | None:
    """What the finished result in a folder says of itself, if there is one."""
    try:
        found = json.loads((out / META).read_text(encoding="utf-8"))
        return found if isinstance(found, dict) and {"format", "key", "units"} <= found.keys() else None
    except (OSError, ValueError, RecursionError):
        return None


def document(work: Work, key: str, by_unit: Mapping[int, Sequence[Done]]) -> dict[str, Any]:
    """``meta.json`` of a run. ``by_unit``: what indexing each unit's chunks found."""
    from soap.preprocessing.container import read_arrays

    dictionaries = {}
    for name, columns in work.spec.dictionaries.items():
        counts = read_arrays(work.merged(name))[f"counts:{name}"]
        dictionaries[name] = {"rows": len(counts), "columns": [column.name for column in columns], "rare": columns[0].min_count > 1}
    units = [
        {"name": unit.name, "rows": sum(d.rows for d in own), "skipped": sum(d.skipped for d in own)}
        for unit, own in ((unit, by_unit[unit.number]) for unit in work.units)
    ]
    return {
        "format": FORMAT,
        "key": key,
        "rows": sum(unit["rows"] for unit in units),
        "skipped": sum(unit["skipped"] for unit in units),
        "spec": work.spec.document(),
        "units": units,
        "dictionaries": dictionaries,
    }


def is_there(work: Work, out: Path, meta: Mapping[str, Any]) -> bool:
    """Whether every file that steps made for the result is in its place, or where it is moved from."""
    made = {folder: names for folder, names in _files(work, meta["rows"]).items() if folder != DICTIONARIES}
    return all(any((top / folder / name).exists() for top in (work.out, out)) for folder, names in made.items() for name in names)


def put(work: Work, out: Path, meta: Mapping[str, Any]) -> None:
    """Move everything to where it belongs. A run may be ended here, and go on with moving later. PreprocessError if that fails."""
    try:
        _save_dictionaries(work)
        files = _files(work, meta["rows"])
        for folder, names in files.items():
            _move(work.out / folder, out / folder, names)
        for folder in (DICTIONARIES, PARQUET_FOLDER):
            _leave_only(out / folder, files[folder])
    except OSError as cause:
        raise unwritable(out, cause) from None
    write_text_atomically(out / META, json.dumps(meta, indent=1) + "\n", error=PreprocessError)


def _save_dictionaries(work: Work) -> None:
    import numpy as np

    from soap.preprocessing.container import read_arrays

    folder = work.out / DICTIONARIES
    folder.mkdir(parents=True, exist_ok=True)
    for name in work.spec.dictionaries:
        arrays = read_arrays(work.merged(name))
        for part in _parts(work, name):
            np.save(folder / f"{name}.{part}.npy", arrays[f"{part}:{name}"], allow_pickle=False)


def _parts(work: Work, dictionary: str) -> tuple[str, ...]:
    return ("values", "counts", *(["bounds"] if work.spec.dictionaries[dictionary][0].kind == "string" else []))


def _files(work: Work, rows: int) -> dict[str, set[str]]:
    """Folder in the output -> names of its files."""
    dictionaries = {f"{name}.{part}.npy" for name in work.spec.dictionaries for part in _parts(work, name)}
    parts = -(-rows // work.rows_per_group) if work.parquet else 0
    return {"": set(NAMES.values()), DICTIONARIES: dictionaries, PARQUET_FOLDER: {part_name(number) for number in range(parts)}}


def _move(source: Path, target: Path, names: Collection[str]) -> None:
    """Move files of these names, some of which may be there already."""
    if names:
        target.mkdir(exist_ok=True)
    for name in sorted(names):
        if (source / name).exists():
            os.replace(source / name, target / name)


def _leave_only(folder: Path, names: Collection[str]) -> None:
    """Remove what a run of another input or SPEC, which was ended while it moved its files, had put there under other names."""
    there = list(folder.iterdir()) if folder.is_dir() else []
    for path in there:
        if path.name not in names and _OURS.fullmatch(path.name):
            path.unlink()
    if there and not any(folder.iterdir()):
        folder.rmdir()


BLOCK_ROWS = 2**15
"""Rows that are converted at once: their block stays in the cache."""


def make_arrays(work: Work, rows: int) -> None:
    """Make the final arrays, with all of their space taken. Those that are there with the same shape stay."""
    try:
        (work.out / PARQUET_FOLDER).mkdir(parents=True, exist_ok=True)
    except OSError as cause:
        raise unwritable(work.out, cause) from None
    shapes = {"labels": len(work.spec.labels), "numbers": len(work.spec.numbers), "categories": len(work.spec.categories)}
    for name, columns in shapes.items():
        path = work.out / NAMES[name]
        try:
            there = np.load(path, mmap_mode="r")
            if there.shape == (rows, columns) and there.dtype == np.int32:
                continue
        except (OSError, ValueError):
            pass
        with whole(path) as temporary, temporary.open("wb") as stream:
            header = {"descr": "<i4", "fortran_order": False, "shape": (rows, columns)}
            np.lib.format.write_array_header_1_0(stream, header)
            size = rows * columns * 4
            if size:
                stream.flush()
                os.posix_fallocate(stream.fileno(), stream.tell(), size)  # a full disk is told now


def opened_arrays(work: Work, name: str) -> tuple[int, int]:
    """A final array's file, open, and where its data begin."""
    path = work.out / NAMES[name]
    with path.open("rb") as stream:
        version = np.lib.format.read_magic(stream)
        assert version == (1, 0)
        np.lib.format.read_array_header_1_0(stream)
        offset = stream.tell()
    return os.open(path, os.O_RDWR), offset


def written_arrays(work: Work, task: Task) -> str:
    """The checksum of what the final arrays hold of a chunk."""
    try:
        arrays = {name: np.load(work.out / file, mmap_mode="r") for name, file in NAMES.items()}
    except (OSError, ValueError):
        return ""
    sums = []
    for begin in range(task.first_row, task.first_row + task.rows, BLOCK_ROWS):
        end = min(task.first_row + task.rows, begin + BLOCK_ROWS)
        sums += [checksum_of(arrays[name][begin:end]) for name in NAMES]
    return key_of(sums)
