"""An upper bound of the memory that a folded strategy lacks, without a plan."""

from __future__ import annotations

import numpy as np

from soap.simulator.engine import Engine
from soap.simulator.folding import Folding
from soap.simulator.memory.bound import MemoryBound


def most_overflow_bytes(folding: Folding, engine: Engine, optimizer_states: int) -> int:
    """Bytes by which upper bounds exceed the devices' memory, in all copies; 0 if everything certainly fits. Devices that no copy uses hold
    the batch alone, as others do. ``engine``: holds the two copies."""
    images = folding.copies.images
    limits = np.array(folding.whole.memory_limits)[images]
    limits[1] = limits[1:].min(axis=0)  # it stands for all the others
    places = np.searchsorted(folding.copies.devices, images[:2])
    by_device = dict(zip(places.ravel().tolist(), limits[:2].ravel().tolist(), strict=True))
    bound = MemoryBound(engine, [by_device[device] for device in range(len(by_device))], optimizer_states)
    lacking = bound.most_overflow_bytes()
    assert lacking is not None  # neither servers nor what hosts keep is folded
    first, other = lacking[places].sum(axis=1).tolist()
    return int(first + (folding.count - 1) * other)
