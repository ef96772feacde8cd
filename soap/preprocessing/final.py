"""The final arrays: files of their full size from the beginning, in which every chunk's rows have their place."""

from __future__ import annotations

import os

import numpy as np

from soap.preprocessing.container import checksum_of, key_of, temporary_of, unwritable
from soap.preprocessing.work import NAMES, PARQUET_FOLDER, Task, Work

BLOCK_ROWS = 2**15
"""Rows that are converted at once: their block stays in the cache."""


def make(work: Work, rows: int) -> None:
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
        temporary = temporary_of(path)
        try:
            with temporary.open("wb") as stream:
                header = {"descr": "<i4", "fortran_order": False, "shape": (rows, columns)}
                np.lib.format.write_array_header_1_0(stream, header)
                size = rows * columns * 4
                if size:
                    stream.flush()
                    os.posix_fallocate(stream.fileno(), stream.tell(), size)  # a full disk is told now
            os.replace(temporary, path)
        except OSError as cause:
            temporary.unlink(missing_ok=True)
            raise unwritable(path, cause) from None


def opened(work: Work, name: str) -> tuple[int, int]:
    """A final array's file, open, and where its data begin."""
    path = work.out / NAMES[name]
    with path.open("rb") as stream:
        version = np.lib.format.read_magic(stream)
        assert version == (1, 0)
        np.lib.format.read_array_header_1_0(stream)
        offset = stream.tell()
    return os.open(path, os.O_RDWR), offset


def written(work: Work, task: Task) -> str:
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
