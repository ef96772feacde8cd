"""What edges between operators transfer, for the dynamic programme (``search.dynamic``), which asks for each pair of configurations."""

from __future__ import annotations

from soap.simulator.compiled.graph_arrays import Floats, Longs
from soap.simulator.compiled.jit import entry


@entry
def busiest_reader_seconds(
    holders: Longs, readers: Longs, common: Longs, nearest: Longs, latency: Floats, per_byte: Floats, itemsize: int, moved: Longs
) -> float:
    """Seconds for which the busiest device receives: it gets from the nearest holder what its tiles read and it does not hold.

    ``holders``: [part, device], whether it holds the part. ``readers``: [tile], its device. ``common``: [part, tile], elements that it
    reads of the part. ``nearest``: [rank, device], the other devices by how near they are. ``latency``, ``per_byte``: [from, to], in
    seconds. ``moved``: [from, to], room for bytes."""
    parts, tiles, devices = len(holders), len(readers), len(latency)
    for a in range(devices):
        for b in range(devices):
            moved[a, b] = 0
    for part in range(parts):
        for tile in range(tiles):
            reader = readers[tile]
            if common[part, tile] == 0 or holders[part, reader]:
                continue
            for rank in range(devices):
                if holders[part, nearest[rank, reader]]:
                    moved[nearest[rank, reader], reader] += common[part, tile] * itemsize
                    break
    most = 0.0
    for b in range(devices):
        seconds = 0.0
        for a in range(devices):
            if moved[a, b] > 0:
                seconds += latency[a, b] + moved[a, b] * per_byte[a, b]
        most = max(most, seconds)
    return most
