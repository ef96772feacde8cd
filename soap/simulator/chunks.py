"""Chunks: a long communication as a chain of tasks, each ready when the one before it ends, so that other tasks run in between.

An all-reduce of gradients or a sparse all-gather is many small messages: between processors on connections of their own, between GPUs in
NCCL's slices beside those of other calls. It does not block a link for the messages of tiles, or for other sums, until it is done. But
links serve in order of readiness (``reference``). So the communication is cut into chunks: what becomes ready meanwhile has its turn
before the next chunk. Together the chunks take as long, and keep devices busy as long, as the whole.
"""

from __future__ import annotations

from itertools import pairwise

from soap.cluster.topology import Topology

MOST_CHUNKS = 8
"""A ring over n devices has 2 (n - 1) steps anyway. With 4 or 16 chunks predictions hardly change (docs/accuracy.md)."""

GPU_CHUNK_NS = 100_000
"""The shortest chunk between GPUs: a smaller sum is done before others would notice, and each chunk is one more task to simulate. Some
20 MB over NVLink, some megabytes over a NIC."""

NO_CHUNKS = 0


def shortest_chunk_ns(topology: Topology) -> int:
    """How long chunks are at least on this cluster: where links have ports a nanosecond, between GPUs ``GPU_CHUNK_NS``; ``NO_CHUNKS`` if
    nothing is cut."""
    if any(port.device is not None for port in topology.ports):
        return 1
    return GPU_CHUNK_NS if topology.has_gpus_alone else NO_CHUNKS


def chunk_count(duration_ns: int, shortest_ns: int = 1) -> int:
    """The number of chunks of a communication of this duration: 1 to ``MOST_CHUNKS``, each of at least ``shortest_ns`` if that is more than
    ``NO_CHUNKS``."""
    return max(1, min(MOST_CHUNKS, duration_ns // shortest_ns)) if shortest_ns else 1


def parts(whole: int, count: int) -> tuple[int, ...]:
    """``whole`` in ``count`` parts that differ by at most 1: part k is floor(whole * (k + 1) / count) - floor(whole * k / count)."""
    return tuple(after - before for before, after in pairwise(whole * k // count for k in range(count + 1)))
