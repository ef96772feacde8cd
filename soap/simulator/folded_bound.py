"""An upper bound of the memory that a folded strategy needs, and its time, without a plan."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from soap.simulator.costs import CostModel
from soap.simulator.engine import Engine
from soap.simulator.folding import Folding
from soap.simulator.memory.bound import MemoryBound
from soap.simulator.memory.residency import ALLOWANCE


def folded_engine(folding: Folding, costs: CostModel) -> Engine:
    """An engine that holds the two copies."""
    engine = Engine(folding.copies.graph, folding.topology, costs, folding.communication, training=folding.builder.training)
    engine.load(folding.copies.strategy)
    return engine


def most_bytes(folding: Folding, engine: Engine, optimizer_states: int) -> NDArray[np.int64]:
    """[copy 0 or 1, device]: what a device holds at most at its peak, in the order of micro-batches, with an allowance.
    ``engine``: holds the two copies."""
    bound = MemoryBound(engine, engine.topology.memory_limits, optimizer_states)
    in_order = np.ceil((1 + ALLOWANCE) * np.array(bound.in_order_bytes(), np.int64)).astype(np.int64)
    in_any_order = np.array([most for _, most in bound.bounds_bytes()], np.int64)
    found: NDArray[np.int64] = np.minimum(in_order, in_any_order)
    return found[np.searchsorted(folding.copies.devices, folding.copies.images[:2])]


def most_overflow_bytes(folding: Folding, engine: Engine, optimizer_states: int) -> int:
    """Bytes by which upper bounds exceed the devices' memory, in all copies; 0 if everything certainly fits. Devices that no copy uses hold
    the batch alone, as others do. ``engine``: holds the two copies."""
    limits = np.array(folding.whole.memory_limits)[folding.copies.images]
    limits[1] = limits[1:].min(axis=0)  # it stands for all the others
    first, other = np.maximum(0, most_bytes(folding, engine, optimizer_states) - limits[:2]).sum(axis=1).tolist()
    return int(first + (folding.count - 1) * other)
