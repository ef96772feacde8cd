"""Passes over a gradient at the speed of memory, in compiled code.

What is compared is a *key*: an element's magnitude, or, where only one sign counts, its magnitude if it has that sign and else zero. A key
is ``max(up * value, down * value)``; for (1, -1) the magnitude, for (1, 0) and (-1, 0) of one sign. All numbers have the gradient's type.

Every block has its largest key noted, and later passes read only blocks that can have what they look for: at a density of a thousandth,
an eighth of the memory. Sums are made in an order that depends neither on vector units nor on threads, so equal runs give equal bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.extending import overload

from soap.simulator.compiled.jit import entry

BLOCK = 128
"""Elements that share a maximum."""
CHUNK = 4096
"""Elements that share a sum. Threads work on whole chunks."""

Array = Any
Number = Any


def _like(value: Number, example: Number) -> Number:
    """A whole number in the example's type. Numba computes with 64 bits otherwise, which halves what vector units do at once."""
    raise NotImplementedError("only compiled code calls it")


@overload(_like, inline="always")  # type: ignore[untyped-decorator]
def _compiled_like(value, example):  # type: ignore[no-untyped-def]
    kind = example

    def convert(value, example):  # type: ignore[no-untyped-def]
        return kind(value)

    return convert


@entry
def survey(
    values: Array, bits: Array, kind: Array, up: Number, down: Number, first: int, stop: int, lanes: Array, maxima: Array, sums: Array
) -> None:
    """Largest keys of blocks, and sums of chunks' keys, for chunks from ``first`` to ``stop``.

    The largest are found as whole numbers: without its sign bit a float's bits grow with its magnitude, and those of NaN and infinity are
    above all others. ``bits``: the memory of ``values``. ``kind``: a key's bits are (bits ^ kind[0]) & kind[1], if positive. ``lanes``:
    room for BLOCK sums, made beside each other. ``maxima``: whole numbers as well.
    """
    flip, mask = kind[0], kind[1]
    for chunk in range(first, stop):
        begin, end = chunk * CHUNK, min(chunk * CHUNK + CHUNK, len(values))
        blocks = (end - begin) // BLOCK
        rest = begin + blocks * BLOCK
        for block in range(blocks):  # loops of constant length are vectorized best
            largest = _like(0, flip)
            for i in range(BLOCK):
                key = _like(_like(bits[begin + block * BLOCK + i] ^ flip, flip) & mask, flip)
                largest = key if key > largest else largest
            maxima[begin // BLOCK + block] = largest
        if rest < end:
            maxima[rest // BLOCK] = 0
            for i in range(rest, end):
                maxima[rest // BLOCK] = max(maxima[rest // BLOCK], (bits[i] ^ flip) & mask)
        for i in range(BLOCK):
            lanes[i] = 0
        for block in range(blocks):
            for i in range(BLOCK):
                value = values[begin + block * BLOCK + i]
                lanes[i] += max(up * value, down * value)
        for i in range(rest, end):
            lanes[i - rest] += max(up * values[i], down * values[i])
        total = 0.0
        for i in range(BLOCK):
            total += lanes[i]
        sums[chunk] = total


@entry
def count_above(values: Array, up: Number, down: Number, maxima: Array, threshold: Number, first: int, stop: int) -> int:
    """How many keys exceed the threshold, in blocks from ``first`` to ``stop``. ``maxima``: as floats."""
    count, found = len(values), 0
    for block in range(first, stop):
        if maxima[block] > threshold:
            start = block * BLOCK
            if start + BLOCK <= count:
                own = np.int32(0)
                for i in range(BLOCK):
                    value = values[start + i]
                    own = np.int32(own + np.int32(max(up * value, down * value) > threshold))
                found += own
            else:
                for i in range(start, count):
                    found += max(up * values[i], down * values[i]) > threshold
    return found


@entry
def collect_above(
    values: Array, up: Number, down: Number, maxima: Array, threshold: Number, first: int, stop: int, positions: Array, at: int
) -> int:
    """Positions of keys that exceed the threshold, in blocks from ``first`` to ``stop``, in order, from ``positions[at]`` on. Returns where
    they end. ``maxima``: as floats."""
    count = len(values)
    for block in range(first, stop):
        if maxima[block] > threshold:
            start = block * BLOCK
            for i in range(start, min(start + BLOCK, count)):
                if max(up * values[i], down * values[i]) > threshold:
                    positions[at] = i
                    at += 1
    return at
