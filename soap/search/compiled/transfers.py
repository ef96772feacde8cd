"""What edges between operators transfer, for the dynamic programme (``search.dynamic``), which asks for each pair of configurations."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from soap.simulator.compiled.graph_arrays import FloatRows, LongRows, Longs
from soap.simulator.compiled.handles import arrays_of
from soap.simulator.compiled.jit import compiled
from soap.simulator.compiled.machine_code import entry

Boxes = np.ndarray[tuple[int, int, int], np.dtype[np.int64]]


class Edges(NamedTuple):
    """Edges from each of some sources to each of some readers.

    Source a has the parts ``part_ptr[a]:part_ptr[a + 1]``: ``holders``, [part, device], whether it holds the part; ``boxes``, [part,
    dimension, start or stop]. Reader b has the tiles ``tile_ptr[b]:tile_ptr[b + 1]``: ``readers``, [tile], its device; ``reads``, as
    ``boxes``, what it reads. ``nearest``: [rank, device], the other devices by how near they are. ``latency``, ``per_byte``: [from, to], in
    seconds. ``moved``: [from, to], room for bytes.
    ``found``: [source, reader], seconds.
    """

    part_ptr: Longs
    holders: LongRows
    boxes: Boxes
    tile_ptr: Longs
    readers: Longs
    reads: Boxes
    nearest: LongRows
    latency: FloatRows
    per_byte: FloatRows
    moved: LongRows
    found: FloatRows


@entry
def busiest_readers_seconds(edges: Edges, itemsize: int) -> None:
    """Fill ``found``: for how long the busiest device receives; it gets from the nearest holder what its tiles read and it does not
    hold."""
    part_ptr, holders, boxes, tile_ptr, readers, reads, nearest, latency, per_byte, moved, found = arrays_of(edges)
    devices = len(latency)
    for source in range(len(part_ptr) - 1):
        for reader in range(len(tile_ptr) - 1):
            for a in range(devices):
                for b in range(devices):
                    moved[a, b] = 0
            for part in range(part_ptr[source], part_ptr[source + 1]):
                for tile in range(tile_ptr[reader], tile_ptr[reader + 1]):
                    if not holders[part, readers[tile]]:
                        _move(holders, part, readers[tile], nearest, _common(boxes, part, reads, tile) * itemsize, moved)
            found[source, reader] = _longest(latency, per_byte, moved)


@compiled
def _common(boxes, part, reads, tile):  # type: ignore[no-untyped-def]
    """Elements that a part and what a tile reads have in common."""
    volume = 1
    for dim in range(boxes.shape[1]):
        length = min(boxes[part, dim, 1], reads[tile, dim, 1]) - max(boxes[part, dim, 0], reads[tile, dim, 0])
        if length <= 0:
            return 0
        volume *= length
    return volume


@compiled
def _move(holders, part, reader, nearest, size, moved):  # type: ignore[no-untyped-def]
    """Let a device get so many bytes of a part from the nearest of those that hold it."""
    if size == 0:
        return
    for rank in range(len(nearest)):
        if holders[part, nearest[rank, reader]]:
            moved[nearest[rank, reader], reader] += size
            return


@compiled
def _longest(latency, per_byte, moved):  # type: ignore[no-untyped-def]
    """Seconds for which the busiest device receives."""
    most = 0.0
    for b in range(len(latency)):
        seconds = 0.0
        for a in range(len(latency)):
            if moved[a, b] > 0:
                seconds += latency[a, b] + moved[a, b] * per_byte[a, b]
        most = max(most, seconds)
    return most
