"""Chunks: a long communication as a chain of tasks, each ready when the one before it has ended, so that others come in between.

On links between processors, a sum of gradients or rows given to all is many small messages on connections of their own: it does not keep
a link from the messages of tiles, nor from other sums, until it is done. Links serve first come, first served (``reference``); in chunks,
what becomes ready meanwhile has its turn before the next chunk. Together the chunks take as long, and keep devices busy as long, as the
whole.
"""

from __future__ import annotations

from itertools import pairwise

MOST_CHUNKS = 8
"""A ring over n devices has 2 (n - 1) steps anyway; with 4 or 16 chunks predictions are hardly others (docs/accuracy.md)."""


def chunk_count(duration_ns: int) -> int:
    """How many chunks a communication has that takes so long, at least 1: each takes a nanosecond or more."""
    return max(1, min(MOST_CHUNKS, duration_ns))


def parts(whole: int, count: int) -> tuple[int, ...]:
    """A whole number in so many equal parts, to 1: floor(whole * (k + 1) / count) - floor(whole * k / count) for each k."""
    return tuple(after - before for before, after in pairwise(whole * k // count for k in range(count + 1)))
