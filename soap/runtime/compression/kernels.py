"""Passes over a gradient at the speed of memory, in compiled code.

What is compared is a *key*: an element's magnitude, or, where only one sign counts, its magnitude if it has that sign and else zero. A key
is ``max(up * value, down * value)``; for (1, -1) the magnitude, for (1, 0) and (-1, 0) of one sign. All numbers have the gradient's type.

Every block has its largest key noted, and later passes read only blocks that can have what they look for: at a density of a thousandth,
an eighth of the memory. Sums are made in an order that depends neither on vector units nor on threads, so equal runs give equal bits.
"""

from __future__ import annotations

from typing import Any

from numba import njit
from numba.extending import overload

BLOCK = 128
"""Elements that share a maximum."""
CHUNK = 4096
"""Elements that share a sum. Threads work on whole chunks."""

Array = Any
Number = Any

_kernel = njit(cache=True, nogil=True, error_model="numpy")


def _like(value: Number, example: Number) -> Number:
    """A whole number in the example's type. Numba computes with 64 bits otherwise, which halves what vector units do at once."""
    raise NotImplementedError("only compiled code calls it")


@overload(_like, inline="always")
def _compiled_like(value, example):  # type: ignore[no-untyped-def]
    kind = example

    def convert(value, example):  # type: ignore[no-untyped-def]
        return kind(value)

    return convert


@_kernel
def note_maxima(bits: Array, kind: Array, first: int, stop: int, maxima: Array) -> None:
    """Largest keys of blocks from ``first`` to ``stop``, as whole numbers: without its sign bit a float's bits grow with its magnitude, and
    those of NaN and infinity are above all others. ``bits``: the tensor's memory. ``kind``: a key's bits are (bits ^ kind[0]) & kind[1], if
    that is positive."""
    flip, mask = kind[0], kind[1]
    for block in range(first, stop):
        start = block * BLOCK
        largest = _like(0, flip)
        if start + BLOCK <= len(bits):
            for i in range(BLOCK):  # loops of constant length are vectorized best
                key = _like(_like(bits[start + i] ^ flip, flip) & mask, flip)
                largest = key if key > largest else largest
        else:
            for i in range(start, len(bits)):
                key = _like(_like(bits[i] ^ flip, flip) & mask, flip)
                largest = key if key > largest else largest
        maxima[block] = largest


@_kernel
def sum_keys(values: Array, up: Number, down: Number, first: int, stop: int, lanes: Array, sums: Array) -> None:
    """Sums of keys, for chunks from ``first`` to ``stop``. ``lanes``: room for BLOCK sums, which are made beside each other."""
    for chunk in range(first, stop):
        begin, end = chunk * CHUNK, min(chunk * CHUNK + CHUNK, len(values))
        blocks = (end - begin) // BLOCK
        for i in range(BLOCK):
            lanes[i] = 0
        for block in range(blocks):
            for i in range(BLOCK):
                value = values[begin + block * BLOCK + i]
                lanes[i] += max(up * value, down * value)
        rest = begin + blocks * BLOCK
        for i in range(rest, end):
            lanes[i - rest] += max(up * values[i], down * values[i])
        total = 0.0
        for i in range(BLOCK):
            total += lanes[i]
        sums[chunk] = total


@_kernel
def collect_above(values: Array, up: Number, down: Number, maxima: Array, threshold: Number, first: int, stop: int, found: Array) -> int:
    """Positions of keys that exceed the threshold, in blocks from ``first`` to ``stop``, in order. Returns how many. ``maxima``: as
    floats."""
    count, at = len(values), 0
    for block in range(first, stop):
        if maxima[block] > threshold:
            start = block * BLOCK
            for i in range(start, min(start + BLOCK, count)):
                if max(up * values[i], down * values[i]) > threshold:
                    found[at] = i
                    at += 1
    return at
