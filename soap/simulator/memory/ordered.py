"""The Python side of ``compiled.ordered_memory``: room for its tables, made anew each time, as they grow with the micro-batches."""

from __future__ import annotations

from typing import Any

import numpy as np

from soap.simulator.compiled.graph_arrays import Longs
from soap.simulator.compiled.handles import handle
from soap.simulator.compiled.memory_tables import MemoryTables
from soap.simulator.compiled.ordered_memory import order_memory
from soap.simulator.compiled.pass_places import PlaceTables, count_passes
from soap.simulator.engine import Engine

MOST_KNOWN = 2**27
"""Of ``PlaceTables.done``, which takes 4 bytes for each node and device. Where it would be larger, nothing is known of other devices."""


def ordered_bytes(engine: Engine, tables: MemoryTables) -> tuple[bool, Longs]:
    """(whether hosts certainly have enough memory, by device the upper bound in bytes) of the strategy that an engine holds or proposes, if
    its passes follow its order of micro-batches. ``tables``: of ``bound_memory``, which was called for this strategy."""
    devices = engine.topology.device_count
    fixed: dict[str, Any] = {"chunk": np.zeros(len(engine.graph.operators), np.int32), "sizes": np.zeros(2, np.int64)}
    fixed |= {name: np.zeros(devices + 1, np.int32) for name in ("base", "node_base", "next")}
    fixed |= {name: np.zeros(devices, np.int64) for name in ("steady", "ordered")}

    def work() -> bool:
        counting = _tables(fixed)
        count_passes(engine.world, counting)
        slots, actions = fixed["sizes"].tolist()
        places = _begins(fixed["base"], 1)
        nodes = _begins(fixed["node_base"], 0)
        sizes = {"rank": actions + 1, "place": slots, "node": places, "change": places + 1, "node_rank": nodes, "node_first": nodes}
        sizes["done"] = nodes * devices if nodes * devices <= MOST_KNOWN else 0
        return bool(order_memory(engine.world, tables, _tables(fixed, sizes)))

    return engine.consult(work), fixed["ordered"]


def _begins(counts: np.ndarray[tuple[int, ...], np.dtype[np.int32]], spare: int) -> int:
    """Make of each device's number where its own begin, with so many spare ones behind them; returns how many there are."""
    own = counts[:-1] + spare
    counts[1:] = np.cumsum(own)
    counts[0] = 0
    return int(counts[-1])


def _tables(fixed: dict[str, Any], sizes: dict[str, int] | None = None) -> PlaceTables:
    """The handle of tables of these sizes, by name, beside those that are there."""
    arrays = dict(fixed)
    for name, kind in PlaceTables.__annotations__.items():
        if name not in arrays:
            arrays[name] = np.zeros((sizes or {}).get(name, 0), np.int64 if "Longs" in str(kind) else np.int32)
    return handle(PlaceTables(**arrays))
