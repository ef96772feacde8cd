"""The move that recomputes a set of operators, all or but for their products, or no longer does (compiled)."""

from __future__ import annotations

from soap.search.compiled.candidates import below
from soap.search.compiled.edits import NO_EFFECT
from soap.search.compiled.space_arrays import SearchTables
from soap.simulator.compiled.arrays import copy
from soap.simulator.compiled.change import OPERATORS, Edit
from soap.simulator.compiled.jit import compiled
from soap.simulator.compiled.state import State
from soap.strategy.recomputation import ALL, LEVELS, LIGHT

NONE = -1
"""In place of an extent."""
EXTENTS = len(LEVELS)


@compiled
def propose_recompute(Z: SearchTables, C: State, E: Edit) -> float:
    """Recompute a set of operators to another extent than that to which all of them are (``Space.recompute``). Symmetric, as there are as
    many others wherever that leads; no effect where they are not all alike."""
    Q, X = Z.grids, Z.chain
    if len(Q.again_ptr) < 2:
        return NO_EFFECT
    own = below(X, len(Q.again_ptr) - 1)
    first, last = Q.again_ptr[own], Q.again_ptr[own + 1]
    extents, held = 1, NONE
    for extent in range(LIGHT + 1):
        alike = new = True
        for i in range(first, last):
            alike &= C.marked[Q.again[i]] == Q.level[EXTENTS * i + extent]
        if extent == LIGHT:
            new = False
            for i in range(first, last):
                new |= Q.level[EXTENTS * i + ALL] != Q.level[EXTENTS * i + LIGHT]
        extents += new and extent > 0
        held = extent if alike and new else held
    if held == NONE:
        return NO_EFFECT
    extent = (held + 1 + below(X, extents - 1)) % extents
    E.dev_ptr[0] = 0
    for i in range(first, last):
        op, n = Q.again[i], i - first
        at = E.dev_ptr[n]
        E.operator[n], E.variant[n], E.replicas[n], E.marked[n] = op, C.variant[op], C.replicas[op], Q.level[EXTENTS * i + extent]
        copy(E.dev, at, C.dev, C.dev_ptr[op], C.dev_ptr[op] + C.tiles[op])
        E.dev_ptr[n + 1] = at + C.tiles[op]
        X.edited[n] = X.grid[op]
    E.count[OPERATORS] = last - first
    return 0.0
