"""Chunks: a long communication as a chain of tasks, each ready when the one before it ends, so that other tasks run in between.

Between processors, an all-reduce of gradients or a sparse all-gather is many small messages on connections of their own. It does not block
a link for the messages of tiles, or for other sums, until it is done. But links serve in order of readiness (``reference``). So the
communication is cut into chunks: what becomes ready meanwhile has its turn before the next chunk. Together the chunks take as long, and
keep devices busy as long, as the whole.
"""

from __future__ import annotations

from itertools import pairwise

MOST_CHUNKS = 8
"""A ring over n devices has 2 (n - 1) steps anyway. With 4 or 16 chunks predictions hardly change (docs/accuracy.md)."""


def chunk_count(duration_ns: int) -> int:
    """The number of chunks of a communication of this duration: 1 to ``MOST_CHUNKS``, each of at least a nanosecond."""
    return max(1, min(MOST_CHUNKS, duration_ns))


def parts(whole: int, count: int) -> tuple[int, ...]:
    """``whole`` in ``count`` parts that differ by at most 1: part k is floor(whole * (k + 1) / count) - floor(whole * k / count)."""
    return tuple(after - before for before, after in pairwise(whole * k // count for k in range(count + 1)))
