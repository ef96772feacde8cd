"""Messages between workers and servers, and records of logs and snapshots: a small header, then the raw numbers. Nothing is pickled.

A message is `header | (array header, dims)... | (numbers, padding)...`, little-endian, everything at multiples of 8 bytes so that arrays
are read where they lie. What is decoded may come from anywhere: sizes and types are checked before anything is made of them.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from soap.elastic.faults import ElasticError

Array = NDArray[np.generic]
Buffer = bytes | memoryview

MAGIC = b"SOAP"
FORMAT = 1
_HEADER = struct.Struct("<4sBBHi4xqq")
"""Magic, format, kind, number of arrays, partition, lease, version."""
_ARRAY = struct.Struct("<BB6x")
"""Code of the type, number of dimensions; the dimensions follow, 8 bytes each."""
_DTYPES = tuple(np.dtype(name) for name in ("<i4", "<i8", "<f4", "<f8", "u1"))
"""Types by code, a closed list: new ones at the end."""
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}
MOST_ARRAYS, MOST_DIMS, MOST_BYTES = 64, 8, 2**40


class Kind(IntEnum):
    """What a message asks or answers. Numbers are part of the format."""

    LOOK_UP = 1  # ids, offsets[, values]; version: the least of steps, where these count -> SUMS or TOO_OLD
    SUMS = 2  # sums
    PULL = 3  # version: the least that will do -> VALUES or TOO_OLD
    VALUES = 4  # values
    PUSH = 5  # gradient of the whole cell -> VERSION
    PUSH_ROWS = 6  # rows, values -> VERSION
    PUSH_OUTPUTS = 7  # gradient of the sums, ids, offsets[, values] -> VERSION
    VERSION = 8  # of the partition, once the push is counted
    TOO_OLD = 9  # version: the one that is there
    ERROR = 10  # one line of text
    SNAPSHOT = 11  # state of a partition, in a file
    START = 12  # of a virtual worker (partition), how many minibatches it has finished (version): may it begin the next? -> STARTED
    STARTED = 13  # version that its values are to have; lease: the least that anybody will ask for
    PUSHED = 14  # servers have a stage's part of a virtual worker's wave (lease) -> STARTED
    LEFT = 15  # a virtual worker (partition) has no more waves -> STARTED


@dataclass(frozen=True, eq=False)
class Message:
    """``partition``: its number at the server. ``lease``: whose gradient it is, or 0. ``version``: pushes that are counted; of a PULL or
    LOOK_UP the least pushes, or steps, that will do. ``arrays``: int32, int64, float32, float64 and uint8."""

    kind: Kind
    partition: int
    lease: int = 0
    version: int = 0
    arrays: tuple[Array, ...] = field(default=())

    @staticmethod
    def of(kind: Kind, partition: int, tensors: Sequence[Tensor] = (), *, lease: int = 0, version: int = 0) -> Message:
        """A message of tensors, which are not copied where they are contiguous. ElasticError for types that numpy does not have."""
        try:
            arrays = tuple(tensor.detach().contiguous().numpy() for tensor in tensors)
        except TypeError as cause:
            raise ElasticError(f"a tensor cannot be sent: {cause}; expected {', '.join(map(str, _DTYPES))}") from None
        return Message(kind, partition, lease, version, arrays)

    def tensors(self) -> tuple[Tensor, ...]:
        """The arrays as tensors; copied only where they lie in memory that must not be written to, or not at a multiple of their size."""
        return tuple(torch.from_numpy(a if a.flags.writeable and a.flags.aligned else a.copy()) for a in self.arrays)


def encode(message: Message) -> list[Buffer]:
    """The message's bytes in several buffers, in their order; numbers are not copied. ElasticError for a type that is not in the list."""
    if len(message.arrays) > MOST_ARRAYS or any(array.dtype not in _CODES or array.ndim > MOST_DIMS for array in message.arrays):
        told = ", ".join(f"{array.dtype}{list(array.shape)}" for array in message.arrays[:8])
        raise ElasticError(f"arrays {told} cannot be sent; expected at most {MOST_ARRAYS} of {', '.join(map(str, _DTYPES))}")
    head = [_HEADER.pack(MAGIC, FORMAT, message.kind, len(message.arrays), message.partition, message.lease, message.version)]
    for array in message.arrays:
        head.append(_ARRAY.pack(_CODES[array.dtype], array.ndim) + struct.pack(f"<{array.ndim}q", *array.shape))
    found: list[Buffer] = [b"".join(head)]
    for array in message.arrays:
        if array.size:
            found.append(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
            if padding := -array.nbytes % 8:
                found.append(bytes(padding))
    return found


def overhead_bytes(message: Message) -> int:
    """How much of ``size_bytes`` is header and padding."""
    return _HEADER.size + sum(_ARRAY.size + 8 * array.ndim + -array.nbytes % 8 for array in message.arrays)


def size_bytes(message: Message) -> int:
    """How many bytes ``encode`` gives."""
    return overhead_bytes(message) + sum(array.nbytes for array in message.arrays)


def decode(buffer: Buffer | bytearray) -> Message:
    """A message whose arrays lie in ``buffer``, which must hold it and nothing else. ElasticError in one line if it does not."""
    view = memoryview(buffer).cast("B")
    if len(view) < _HEADER.size:
        raise _wrong(f"it has {len(view)} bytes, less than a header")
    magic, made, number, count, partition, lease, version = _HEADER.unpack_from(view)
    if magic != MAGIC or made != FORMAT:
        raise _wrong(f"it begins with {bytes(magic)!r}, format {made}; expected {MAGIC!r}, format {FORMAT}")
    if number not in _KINDS or count > MOST_ARRAYS:
        raise _wrong(f"it is of kind {number} with {count} arrays")
    specs, at = _specs(view, count)
    arrays = []
    for dtype, shape in specs:
        size = prod(shape) * dtype.itemsize
        if at + size > len(view):
            raise _wrong(f"an array {dtype}{list(shape)} goes beyond its {len(view)} bytes")
        arrays.append(np.frombuffer(view, dtype, prod(shape), at).reshape(shape) if size else np.empty(shape, dtype))
        at += size + -size % 8
    if at != len(view):
        raise _wrong(f"it has {len(view)} bytes where its header says {at}")
    return Message(Kind(number), partition, lease, version, tuple(arrays))


_KINDS = frozenset(Kind)


def _specs(view: memoryview, count: int) -> tuple[list[tuple[np.dtype[np.generic], tuple[int, ...]]], int]:
    """Types and shapes of the arrays, and where the numbers begin."""
    found, at = [], _HEADER.size
    for _ in range(count):
        if at + _ARRAY.size > len(view):
            raise _wrong("it ends inside its header")
        code, dims = _ARRAY.unpack_from(view, at)
        at += _ARRAY.size
        if code >= len(_DTYPES) or dims > MOST_DIMS or at + 8 * dims > len(view):
            raise _wrong(f"an array has type {code} and {dims} dimensions")
        shape = struct.unpack_from(f"<{dims}q", view, at)
        at += 8 * dims
        if min(shape, default=0) < 0 or prod(max(size, 1) for size in shape) > MOST_BYTES:  # numpy multiplies sizes of none, too
            raise _wrong(f"an array has shape {list(shape)}")
        found.append((_DTYPES[code], shape))
    return found, at


def _wrong(why: str) -> ElasticError:
    return ElasticError(f"a message cannot be read: {why}; is the peer of the same version, and are its files whole?")


def checked(answer: Message, expected: Kind) -> Message:
    """A server's answer, if it is what was expected. ElasticError in one line otherwise, with the server's own words if it has failed."""
    if answer.kind is Kind.ERROR:
        raise ElasticError(bytes(answer.arrays[0]).decode("utf-8", "replace"))
    if answer.kind is Kind.TOO_OLD:
        raise ElasticError(
            f"partition {answer.partition} of a server lacks updates of earlier steps (it has {answer.version}); is its folder whole?"
        )
    if answer.kind is not expected:
        raise ElasticError(f"a server has answered {answer.kind.name}; expected {expected.name}: are all processes of one version?")
    return answer
