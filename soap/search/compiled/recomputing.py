"""The move that recomputes a set of operators, all or but for their products, or offloads what they keep, or no longer does (compiled)."""

from __future__ import annotations

from soap.search.compiled.candidates import below
from soap.search.compiled.edits import NO_EFFECT
from soap.search.compiled.space_arrays import SearchTables
from soap.simulator.compiled.change import OPERATORS, Edit
from soap.simulator.compiled.jit import compiled
from soap.simulator.compiled.pass_order import own_devices
from soap.simulator.compiled.world import World
from soap.strategy.recomputation import LEVELS, LIGHT, RECOMPUTED

NONE = -1
"""In place of an extent."""
EXTENTS = len(LEVELS)


@compiled
def propose_recompute(W: World, Z: SearchTables, E: Edit) -> float:
    """Give all operators of a set the marks of another extent than that which all of them have (``Space.marks``). Symmetric, as there are
    as many others wherever that leads; no effect where they are not all alike."""
    Q, X, C = Z.grids, Z.chain, W.state
    if len(Q.again_ptr) < 2:
        return NO_EFFECT
    own = below(X, len(Q.again_ptr) - 1)
    first, last = Q.again_ptr[own], Q.again_ptr[own + 1]
    extents, held = 1, NONE
    for extent in range(LIGHT + 1):
        alike = new = True
        for i in range(first, last):
            alike &= C.marked[Q.again[i]] == Q.again_mark[EXTENTS * i + extent]
        if extent == LIGHT:
            new = False
            for i in range(first, last):
                new |= Q.again_mark[EXTENTS * i + RECOMPUTED] != Q.again_mark[EXTENTS * i + LIGHT]
        extents += new and extent > 0
        held = extent if alike and new else held
    if held == NONE:
        return NO_EFFECT
    extent = (held + 1 + below(X, extents - 1)) % extents
    E.dev_ptr[0] = 0
    for i in range(first, last):
        op, n = Q.again[i], i - first
        at = E.dev_ptr[n]
        E.operator[n], E.variant[n], E.replicas[n] = op, C.variant[op], C.replicas[op]
        E.marked[n] = Q.again_mark[EXTENTS * i + extent]
        E.dev_ptr[n + 1] = at + own_devices(W, op, E.dev, at)
        X.edited[n] = X.grid[op]
    E.count[OPERATORS] = last - first
    return 0.0
