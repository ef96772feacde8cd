"""Which elements of a tensor are the largest, at the speed of memory on a processor. ``device_selection`` does the same on GPUs.

One pass notes the largest key of each block of 128 elements. Of the k blocks with the largest maxima each has an element
at least as large as the last one's maximum. So the k-th largest maximum is a bound: at least k elements reach it, and all that do are in
blocks whose maximum does. A second pass reads these blocks, and collects a little more than k elements; the rest is done among these.

What is compared is a *key*: an element's magnitude, or, where only one sign counts, its magnitude if it has that sign and else zero. A key
is ``max(up * value, down * value)``; for (1, -1) the magnitude, for (1, 0) and (-1, 0) of one sign. All numbers have the gradient's type.

Every block has its largest key noted, and later passes read only blocks that can have what they look for: at a density of a thousandth,
an eighth of the memory. Sums are made in an order that depends neither on vector units nor on threads, so equal runs give equal bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from numba import njit
from numba.extending import overload

from soap.errors import RuntimeFailure
from soap.plan.compression.seam import PROBES
from soap.runtime.compression.seam import not_finite
from soap.runtime.sync.row_update import parallel

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
    """Positions of keys above the threshold, in blocks from ``first`` to ``stop``, in order. Returns how many. ``maxima``: floats."""
    count, at = len(values), 0
    for block in range(first, stop):
        if maxima[block] > threshold:
            start = block * BLOCK
            for i in range(start, min(start + BLOCK, count)):
                if max(up * values[i], down * values[i]) > threshold:
                    found[at] = i
                    at += 1
    return at


Positions = npt.NDArray[np.int64]

TRIMS = (0.8, 0.6, 0.4, 0.2, 0.0)
"""Where trimmed top-k puts its threshold between mean and maximum, one after the other: 1 - eps, 1 - 2 eps, … with eps = 0.2."""
ALONE = 256
"""Chunks that are worth a thread."""
PIECE = 32
"""Chunks that are surveyed at a time: half a megabyte."""
PER_CHUNK = CHUNK // BLOCK
"""Blocks of a chunk."""
WHOLE: dict[torch.dtype, Any] = {torch.float32: np.int32, torch.float64: np.int64}
"""Types that are selected from -> whole numbers of that size."""


@dataclass(frozen=True)
class Surveyed:
    """A tensor after the first pass over it.

    ``values``: its elements. ``up``, ``down``: their keys are ``max(up * value, down * value)``. ``maxima``: largest key of each block.
    ``mean``: of all keys, if it was asked for. ``largest``: of the keys. ``signed``: whether only one sign counts, so that
    zeros are never selected.
    """

    values: npt.NDArray[Any]
    up: Any
    down: Any
    maxima: npt.NDArray[Any]
    mean: float
    largest: float
    signed: bool

    @classmethod
    def of(cls, tensor: torch.Tensor, sign: int = 0, *, mean: bool = True) -> Surveyed:
        """``tensor``: flat and contiguous, in float32 or float64, not empty. ``sign``: 1 or -1 if only these elements count. ``mean``:
        whether it is needed; else it is NaN.

        RuntimeFailure if an element that counts is not a finite number.
        """
        values = tensor.detach().numpy()
        real, whole = values.dtype.type, WHOLE[tensor.dtype]
        up, down = {0: (1, -1), 1: (1, 0), -1: (-1, 0)}[sign]
        limits = np.iinfo(whole)
        kind = np.array([limits.min if sign < 0 else 0, -1 if sign else limits.max], whole)
        chunks = -(-len(values) // CHUNK)
        maxima, sums = np.empty(-(-len(values) // BLOCK), whole), np.full(chunks, np.nan)

        def pass_over(part: tuple[int, int]) -> None:
            lanes = np.empty(BLOCK, real)
            for first in range(*part, PIECE):  # small pieces are still in the cache when they are summed
                stop = min(first + PIECE, part[1])
                note_maxima(values.view(whole), kind, first * PER_CHUNK, min(stop * PER_CHUNK, len(maxima)), maxima)
                if mean:
                    sum_keys(values, real(up), real(down), first, stop, lanes, sums)

        parallel(pass_over, _parts(chunks))
        keys = maxima.view(real)
        largest = float(keys.max())
        if not np.isfinite(largest):
            raise RuntimeFailure(not_finite(largest))
        return cls(values, real(up), real(down), keys, float(sums.sum()) / len(values), largest, bool(sign))

    def threshold(self, share: float) -> Any:
        """A number between mean (0) and maximum (1), in the tensor's type."""
        return self.values.dtype.type(self.mean + share * (self.largest - self.mean))

    def bound(self, count: int) -> Any:
        """At least ``count`` keys are as large as this, all in blocks whose maximum is. -1 if there are too few blocks to say more."""
        blocks = len(self.maxima)
        if not 0 < count <= blocks:
            return self.values.dtype.type(-1)
        return np.partition(self.maxima, blocks - count)[blocks - count]

    def above(self, threshold: Any) -> Positions:
        """Positions of keys that exceed a threshold, in order."""

        def collect(part: tuple[int, int]) -> Positions:
            first, stop = part[0] * PER_CHUNK, min(part[1] * PER_CHUNK, len(self.maxima))
            room = np.empty(BLOCK * np.count_nonzero(self.maxima[first:stop] > threshold), np.int64)  # memory is given when it is written
            return room[: collect_above(self.values, self.up, self.down, self.maxima, threshold, first, stop, room)]

        found = parallel(collect, _parts(-(-len(self.values) // CHUNK)))
        return found[0].copy() if len(found) == 1 else np.concatenate(found)

    def reaching(self, number: Any) -> Positions:
        """Positions of keys that are at least as large as a number above zero."""
        return self.above(np.nextafter(number, self.values.dtype.type(0)))

    def keys(self, positions: Positions) -> npt.NDArray[Any]:
        """The keys of some elements."""
        chosen = self.values[positions]
        found: npt.NDArray[Any] = np.maximum(self.up * chosen, self.down * chosen)
        return found


def exact(tensor: Surveyed, count: int) -> Positions:
    """Positions of the ``count`` largest keys, in order; of equal ones the lower. With one sign: fewer if fewer elements have it."""
    size = len(tensor.values)
    if count >= size and not tensor.signed:
        return np.arange(size)
    least = tensor.bound(count)
    if least > 0:
        return _largest(tensor, tensor.reaching(least), count)
    other = tensor.above(least.dtype.type(0))
    if len(other) >= count or tensor.signed:
        return _largest(tensor, other, count)
    zeros = np.setdiff1d(np.arange(count), other)[: count - len(other)]  # of the first k elements at most len(other) are not zero
    return np.sort(np.concatenate([other, zeros]))


def trimmed(tensor: Surveyed, count: int) -> Positions:
    """The same elements as ``exact``, by RedSync's algorithm 2: the largest of those above a threshold between mean and maximum, which goes
    down until k elements are above it. It need not go below the bound of blocks: these hold the k largest.

    Where not enough elements are above the mean (ties, zeros) it is ``exact``.
    """
    if count < len(tensor.values) and tensor.largest > tensor.mean:
        least = tensor.bound(count)
        for share in TRIMS:
            threshold = tensor.threshold(share)
            if threshold < least:
                return _largest(tensor, tensor.reaching(least), count)
            found = tensor.above(threshold)
            if len(found) >= count:
                return _largest(tensor, found, count)
    return exact(tensor, count)


def search(tensor: Surveyed, count: int) -> tuple[Positions, float | None]:
    """``count`` to twice as many positions, and the threshold that their keys exceed, by RedSync's algorithm 3 with its rule mended: fewer
    than k above it: lower it; more than 2 k: raise it. If no threshold is found (ties, zeros, one far outlier): ``exact`` and None.

    Below the (2 k + 1)-th largest maximum of blocks more than 2 k elements are above every threshold; so only elements that reach it are
    counted.
    """
    if count < len(tensor.values) and tensor.largest > tensor.mean:
        many = tensor.bound(2 * count + 1)
        positions = tensor.above(tensor.threshold(0)) if many <= tensor.mean else tensor.reaching(many)
        keys = np.sort(tensor.keys(positions))
        low, high = 0.0, 1.0
        for _ in range(PROBES):
            middle = (low + high) / 2
            threshold = tensor.threshold(middle)
            above = 2 * count + 1 if threshold < many else len(keys) - np.searchsorted(keys, threshold, "right")
            if count <= above <= 2 * count:
                return positions[tensor.keys(positions) > threshold], float(threshold)
            low, high = (low, middle) if above < count else (middle, high)
    return exact(tensor, count), None


def reused(tensor: Surveyed, threshold: float, least: int, most: int) -> Positions | None:
    """Positions of keys above the threshold of an earlier step; None if it has become a bad one: not ``least`` to ``most`` exceed it."""
    found = tensor.above(tensor.values.dtype.type(threshold))
    return found if least <= len(found) <= most else None


def _largest(tensor: Surveyed, positions: Positions, count: int) -> Positions:
    """Those of some positions whose keys are the ``count`` largest; of equal ones the first."""
    if len(positions) <= count:
        return positions
    keys = tensor.keys(positions)
    last = np.partition(keys, len(keys) - count)[len(keys) - count]
    taken: npt.NDArray[np.bool_] = keys > last
    taken[np.flatnonzero(keys == last)[: count - np.count_nonzero(taken)]] = True
    chosen: Positions = positions[taken]
    return chosen


def _parts(chunks: int) -> list[tuple[int, int]]:
    """Ranges of chunks, one for each thread that is worth it."""
    threads = max(1, min(torch.get_num_threads(), chunks // ALONE))
    ends = [chunks * i // threads for i in range(threads + 1)]
    return list(pairwise(ends))
