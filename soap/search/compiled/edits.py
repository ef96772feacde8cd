"""Writing a move's proposal into the edit (compiled)."""

from __future__ import annotations

from soap.search.compiled.memory import WANTED_GRID, WANTED_OPERATOR
from soap.simulator.compiled.change import KEEP, OPERATORS
from soap.simulator.compiled.jit import compiled

UNKNOWN = "a variant is not known yet"
"""The message that compiled code raises when a variant is missing. ``ChainTables.at`` says which one."""

NO_EFFECT = 1e300
"""Returned instead of a log_ratio if a move proposes nothing."""


@compiled
def add(Q, X, E, op, grid, devices, first):  # type: ignore[no-untyped-def]
    """Add an operator to the edit: its new grid, on ``devices[first:]``."""
    n = E.count[OPERATORS]
    variant = X.variant[Q.estimate_ptr[op] + grid - Q.grid_ptr[Q.space[op]]]
    if variant < 0:
        X.at[WANTED_OPERATOR], X.at[WANTED_GRID] = op, grid
        raise LookupError(UNKNOWN)
    E.operator[n], E.variant[n], E.replicas[n], E.marked[n] = op, variant, Q.replicas[grid], KEEP
    E.dev_ptr[0] = 0
    at = E.dev_ptr[n]
    E.dev_ptr[n + 1] = at + Q.tiles[grid]
    for tile in range(Q.tiles[grid]):
        E.dev[at + tile] = devices[first + tile]
    X.edited[n] = grid
    E.count[OPERATORS] = n + 1
