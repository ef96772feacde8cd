"""The move that recomputes a set of operators, or offloads what they keep, or no longer does (compiled)."""

from __future__ import annotations

from soap.search.compiled.candidates import below
from soap.search.compiled.edits import NO_EFFECT
from soap.search.compiled.space_arrays import SearchTables
from soap.simulator.compiled.change import OPERATORS, Edit
from soap.simulator.compiled.jit import compiled
from soap.simulator.compiled.pass_order import own_devices
from soap.simulator.compiled.state import STAYS
from soap.simulator.compiled.world import World


@compiled
def propose_recompute(W: World, Z: SearchTables, E: Edit) -> float:
    """Give all operators of a set their mark, if none of them has one, or the reverse. Its own inverse: symmetric."""
    Q, X, C = Z.grids, Z.chain, W.state
    if len(Q.again_ptr) < 2:
        return NO_EFFECT
    own = below(X, len(Q.again_ptr) - 1)
    first, last = Q.again_ptr[own], Q.again_ptr[own + 1]
    held = C.marked[Q.again[first]]
    mark = Q.again_mark[own] if held == STAYS else STAYS
    if held != STAYS and held != Q.again_mark[own]:
        return NO_EFFECT
    for i in range(first, last):
        if C.marked[Q.again[i]] != held:
            return NO_EFFECT
    E.dev_ptr[0] = 0
    for i in range(first, last):
        op, n = Q.again[i], i - first
        at = E.dev_ptr[n]
        E.operator[n], E.variant[n], E.replicas[n], E.marked[n] = op, C.variant[op], C.replicas[op], mark
        E.dev_ptr[n + 1] = at + own_devices(W, op, E.dev, at)
        X.edited[n] = X.grid[op]
    E.count[OPERATORS] = last - first
    return 0.0
