"""The resources of tasks that a compiled simulation has played, for Python."""

from __future__ import annotations

import numpy as np

from soap.simulator.compiled.graph_arrays import Ints, Longs
from soap.simulator.compiled.state import State


def held_resources(C: State, slots: Ints, static: Ints) -> tuple[Longs, Longs]:
    """(``held_ptr``, ``held``): the task in slot ``slots[k]`` holds the resources ``held[held_ptr[k]:held_ptr[k + 1]]``. ``static``: as in
    ``Groups``."""
    first, count = C.resource[slots], C.resource_n[slots]
    begins = np.concatenate(([0], np.cumsum(count, dtype=np.int64)))
    at = np.arange(begins[-1]) + np.repeat(np.where(first < 0, -1 - first, first) - begins[:-1], count)
    own = np.repeat(first < 0, count)
    held = np.empty(begins[-1], np.int64)
    held[own], held[~own] = C.arena[at[own]], static[at[~own]]
    return begins, held
