"""Which elements of a tensor are the largest, at the speed of memory on a processor. ``device_selection`` does the same on GPUs.

One pass notes the largest key of each block of 128 elements (``kernels``). Of k + 1 blocks with the largest maxima each has an element at
least as large as the last one's maximum. So the (k + 1)-th largest maximum bounds how many elements exceed a threshold, and where they can
be, before any of them is counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from soap.errors import RuntimeFailure
from soap.runtime.compression.kernels import BLOCK, CHUNK, collect_above, count_above, survey
from soap.runtime.sync.row_update import parallel

Positions = npt.NDArray[np.int64]

TRIMS = (0.8, 0.6, 0.4, 0.2, 0.0)
"""Where trimmed top-k puts its threshold between mean and maximum, one after the other: 1 - eps, 1 - 2 eps, … with eps = 0.2."""
PROBES = 24
"""How often the binary search halves its interval: to single precision."""
ALONE = 256
"""Chunks that are worth a thread."""
WHOLE: dict[torch.dtype, Any] = {torch.float32: np.int32, torch.float64: np.int64}
"""Types that are selected from -> whole numbers of that size."""


@dataclass(frozen=True)
class Surveyed:
    """A tensor after the first pass over it.

    ``values``: its elements. ``up``, ``down``: their keys are ``max(up * value, down * value)``. ``maxima``: largest key of each block.
    ``mean``: of all keys. ``largest``: of the keys. ``signed``: whether only one sign counts, so that zeros are never selected.
    """

    values: npt.NDArray[Any]
    up: Any
    down: Any
    maxima: npt.NDArray[Any]
    mean: float
    largest: float
    signed: bool

    @classmethod
    def of(cls, tensor: torch.Tensor, sign: int = 0) -> Surveyed:
        """``tensor``: flat and contiguous, in float32 or float64, not empty. ``sign``: 1 or -1 if only these elements count.

        RuntimeFailure if an element that counts is not a finite number.
        """
        values = tensor.detach().numpy()
        real, whole = values.dtype.type, WHOLE[tensor.dtype]
        up, down = {0: (1, -1), 1: (1, 0), -1: (-1, 0)}[sign]
        limits = np.iinfo(whole)
        kind = np.array([limits.min if sign < 0 else 0, -1 if sign else limits.max], whole)
        chunks = -(-len(values) // CHUNK)
        maxima, sums = np.empty(-(-len(values) // BLOCK), whole), np.empty(chunks)

        def pass_over(part: tuple[int, int]) -> None:
            lanes = np.empty(BLOCK, real)
            survey(values, values.view(whole), kind, real(up), real(down), *part, lanes, maxima, sums)

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
        """At least ``count`` keys are as large as this number, and all keys that are larger are in blocks whose maximum is. -1 if there are
        too few blocks to say more."""
        blocks = len(self.maxima)
        if not 0 < count <= blocks:
            return self.values.dtype.type(-1)
        return np.partition(self.maxima, blocks - count)[blocks - count]

    def counts(self, threshold: Any) -> list[int]:
        """How many keys exceed a threshold, in each part of the tensor."""
        parts = self._parts()
        return parallel(lambda part: count_above(self.values, self.up, self.down, self.maxima, threshold, *part), parts)

    def above(self, threshold: Any, counts: Sequence[int] | None = None) -> Positions:
        """Positions of keys that exceed a threshold, in order. ``counts``: what ``counts`` said of it."""
        counts = self.counts(threshold) if counts is None else counts
        ends = np.cumsum([0, *counts])
        found = np.empty(ends[-1], np.int64)

        def collect(part: tuple[tuple[int, int], Any]) -> None:
            collect_above(self.values, self.up, self.down, self.maxima, threshold, *part[0], found, part[1])

        parallel(collect, list(zip(self._parts(), ends, strict=False)))
        return found

    def keys(self, positions: Positions) -> npt.NDArray[Any]:
        """The keys of some elements."""
        chosen = self.values[positions]
        return np.maximum(self.up * chosen, self.down * chosen)

    def _parts(self) -> list[tuple[int, int]]:
        per_chunk = CHUNK // BLOCK
        return [(a * per_chunk, min(b * per_chunk, len(self.maxima))) for a, b in _parts(-(-len(self.values) // CHUNK))]


def exact(tensor: Surveyed, count: int) -> Positions:
    """Positions of the ``count`` largest keys, in order; of equal ones the lower. With one sign: fewer if fewer elements have it."""
    size = len(tensor.values)
    if count >= size and not tensor.signed:
        return np.arange(size)
    least = tensor.bound(count)
    if least > 0:
        return _largest(tensor, tensor.above(np.nextafter(least, least.dtype.type(0))), count)
    other = tensor.above(least.dtype.type(0))
    if len(other) >= count or tensor.signed:
        return _largest(tensor, other, count)
    zeros = np.setdiff1d(np.arange(count), other)[: count - len(other)]  # of the first k elements at most len(other) are not zero
    return np.sort(np.concatenate([other, zeros]))


def trimmed(tensor: Surveyed, count: int) -> Positions:
    """The same elements as ``exact``, by RedSync's algorithm 2: those above a threshold between mean and maximum, and of these the largest.
    Where not enough are above the mean (ties, zeros), or too many elements are wanted, it is ``exact``."""
    if count < len(tensor.values) and tensor.largest > tensor.mean:
        for share in TRIMS:
            threshold = tensor.threshold(share)
            found = tensor.counts(threshold)
            if sum(found) >= count:
                return _largest(tensor, tensor.above(threshold, found), count)
    return exact(tensor, count)


def search(tensor: Surveyed, count: int) -> tuple[Positions, float | None]:
    """``count`` to twice as many positions, and the threshold that their keys exceed, by RedSync's algorithm 3 with its rule mended: fewer
    than k above it: lower it; more than 2 k: raise it. If no threshold is found (ties, zeros, one far outlier): ``exact`` and None.

    A threshold below the (2 k + 1)-th largest maximum of blocks has more than 2 k elements above it; nothing has to be counted then.
    """
    if count < len(tensor.values) and tensor.largest > tensor.mean:
        many = tensor.bound(2 * count + 1)
        low, high = 0.0, 1.0
        for _ in range(PROBES):
            middle = (low + high) / 2
            threshold = tensor.threshold(middle)
            if threshold < many:
                low = middle
                continue
            found = tensor.counts(threshold)
            if count <= sum(found) <= 2 * count:
                return tensor.above(threshold, found), float(threshold)
            low, high = (low, middle) if sum(found) < count else (middle, high)
    return exact(tensor, count), None


def reused(tensor: Surveyed, threshold: float, least: int, most: int) -> Positions | None:
    """Positions of keys above the threshold of an earlier step; None if it has become a bad one: not ``least`` to ``most`` exceed it."""
    number = tensor.values.dtype.type(threshold)
    found = tensor.counts(number)
    return tensor.above(number, found) if least <= sum(found) <= most else None


def not_finite(value: float) -> str:
    """The line about a gradient that cannot be compressed."""
    return f"a gradient to be compressed has an element that is {value}; expected finite numbers: lower the learning rate, or clip"


def _largest(tensor: Surveyed, positions: Positions, count: int) -> Positions:
    """Those of some positions whose keys are the ``count`` largest; of equal ones the first."""
    if len(positions) <= count:
        return positions
    keys = tensor.keys(positions)
    last = np.partition(keys, len(keys) - count)[len(keys) - count]
    taken = keys > last
    taken[np.flatnonzero(keys == last)[: count - np.count_nonzero(taken)]] = True
    return positions[taken]


def _parts(chunks: int) -> list[tuple[int, int]]:
    """Ranges of chunks, one for each thread that is worth it."""
    threads = max(1, min(torch.get_num_threads(), chunks // ALONE))
    ends = [chunks * i // threads for i in range(threads + 1)]
    return list(pairwise(ends))
