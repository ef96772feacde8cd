"""Hashes for hash tables, and random numbers (compiled).

Arithmetic is unsigned, so that it wraps around. The compiler assumes that signed numbers never overflow, and leaves out code that would
only matter if they did.
"""

from __future__ import annotations

import numpy as np

from soap.simulator.compiled.graph_arrays import Longs
from soap.simulator.compiled.jit import compiled


@compiled
def hash_place(key: int | np.int64, mask: int) -> np.int64:
    """Where to look first for a key in a table of ``mask`` + 1 places. All bits of the key count."""
    bits = np.uint64(key)
    return np.int64(((bits ^ (bits >> np.uint64(29))) * np.uint64(0x9E3779B97F4A7C1)) >> np.uint64(32)) & mask


@compiled
def hash_join(key: int | np.int64, item: int) -> np.int64:
    """The key of a list with one more item."""
    return np.int64(np.uint64(key) * np.uint64(1_000_003) + np.uint64(item))


@compiled
def draw(state: Longs, place: int) -> np.int64:
    """63 random bits, by splitmix64 (Steele, Lea & Flood, 2014). ``state[place]``: the generator's state."""
    z = np.uint64(state[place]) + np.uint64(0x9E3779B97F4A7C15)
    state[place] = np.int64(z)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.int64((z ^ (z >> np.uint64(31))) >> np.uint64(1))
