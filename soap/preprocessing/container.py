"""Files that steps leave for later steps: arrays by name, and a record of what they were made from.

A record says the ``key`` of its inputs and the checksum of its file. A file whose record has another key, or that is not what was
written, is made again. The record is written last, so an interrupted step has none.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from soap.errors import SoapError
from soap.files import reason

MAGIC = b"SOAPARR1"
ALIGNMENT = 64
LONGEST_HEADER_BYTES = 2**26

Array = NDArray[Any]


class PreprocessError(SoapError):
    """Data cannot be read or written, or do not fit the SPEC."""


NO_ARROW = "Parquet needs pyarrow: pip install 'soap-search[preprocess]', or leave Parquet out: parquet=False (--no-parquet)"


def key_of(*parts: object) -> str:
    """A hash of plain values."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def checksum_of(array: Array) -> str:
    """Of an array's bytes."""
    from soap.preprocessing.kernel import checksum  # numba, which commands start without

    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    whole = len(data) // 8 * 8
    return f"{int(checksum(data[:whole].view(np.uint64), data[whole:])):016x}"


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Where to write a file within this context: after it the file is there as a whole, or not at all. PreprocessError if it cannot be
    written."""
    temporary = path.with_name(f".{path.name}.{owner(os.getpid())}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    except OSError as cause:
        raise unwritable(path, cause) from None
    finally:
        temporary.unlink(missing_ok=True)


def owner(process: int) -> str:
    """A process of this machine: others that share the folder may have one of the same number."""
    return f"{platform.node().replace('/', '')}-{process}"


def write_arrays(path: Path, arrays: Mapping[str, Array]) -> str:
    """Write arrays as a whole or not at all. Returns the file's checksum. PreprocessError if they cannot be written."""
    entries, position, sums = [], 0, []
    for name, array in arrays.items():
        entries.append({"name": name, "type": array.dtype.str, "shape": list(array.shape), "at": position})
        sums.append(checksum_of(array))
        position += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
    header = json.dumps(entries).encode()
    header += b" " * (-(len(MAGIC) + 8 + len(header)) % ALIGNMENT)
    with whole(path) as temporary, temporary.open("wb", buffering=0) as stream:
        write_all(stream.fileno(), MAGIC + len(header).to_bytes(8, "little") + header)
        for array in arrays.values():
            write_all(stream.fileno(), np.ascontiguousarray(array))
            write_all(stream.fileno(), b"\0" * (-array.nbytes % ALIGNMENT))
    return key_of(header.decode(), sums)


def read_arrays(path: Path) -> dict[str, Array]:
    """The arrays of a file, mapped read-only: bytes are read when they are used. PreprocessError if it is no such file."""
    try:
        mapped = np.memmap(path, np.uint8, "r").view(np.ndarray)  # slices of a memmap cost ten times as much
        size = int.from_bytes(mapped[8:16].tobytes(), "little")
        if mapped[:8].tobytes() != MAGIC or size > LONGEST_HEADER_BYTES:
            raise ValueError("it is no file of arrays")
        begin = 16 + size
        found = {}
        for entry in json.loads(mapped[16:begin].tobytes()):
            kind, shape = np.dtype(entry["type"]), tuple(entry["shape"])
            length = kind.itemsize * prod(shape)
            first = begin + entry["at"]
            if first + length > len(mapped):
                raise ValueError("it is cut short")
            found[entry["name"]] = mapped[first : first + length].view(kind).reshape(shape)
        return found
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as cause:
        raise PreprocessError(f"{str(path)!r} cannot be read: {cause}; remove the folder {str(path.parent)!r} and start again") from None


def file_checksum(path: Path) -> str:
    """What ``write_arrays`` returned for this file, from what it holds now. Empty if it cannot be read."""
    try:
        arrays = read_arrays(path)
        mapped = np.memmap(path, np.uint8, "r")
        header = mapped[16 : 16 + int.from_bytes(mapped[8:16].tobytes(), "little")].tobytes().decode()
        return key_of(header, [checksum_of(array) for array in arrays.values()])
    except (SoapError, OSError, ValueError):
        return ""


def write_record(path: Path, key: str, **facts: Any) -> dict[str, Any]:
    """Write down what a step has done. Returns the record."""
    record = {"key": key, **facts}
    with whole(path) as temporary:
        temporary.write_text(json.dumps(record), encoding="utf-8")
    return record


def read_record(path: Path, key: str) -> dict[str, Any] | None:
    """The record, if it is there and was made from what has this key."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and found.get("key") == key else None


def write_all(descriptor: int, data: bytes | Array, offset: int | None = None) -> None:
    """Write all bytes, at an offset if one is given."""
    view = memoryview(data if isinstance(data, bytes) else data.reshape(-1).view(np.uint8).data)
    done = 0
    while done < len(view):
        rest = view[done : done + 2**30]
        done += os.write(descriptor, rest) if offset is None else os.pwrite(descriptor, rest, offset + done)


def unwritable(path: Path, cause: OSError) -> PreprocessError:
    """The error for a file that cannot be written."""
    return PreprocessError(
        f"cannot write {str(path)!r}: {reason(cause)}; make room or give another -o; the same command goes on from what is done"
    )
