"""The move that changes how one parameter is synchronized (compiled)."""

from __future__ import annotations

from soap.search.compiled.candidates import below
from soap.search.compiled.edits import NO_EFFECT
from soap.search.compiled.space_arrays import SearchTables
from soap.simulator.compiled.change import PARAMETERS, Edit
from soap.simulator.compiled.jit import compiled
from soap.simulator.compiled.state import State


@compiled
def propose_sync(Z: SearchTables, C: State, E: Edit) -> float:
    """Give one parameter another allowed method, both drawn uniformly: symmetric. A disallowed method is replaced and never proposed
    again."""
    Q, X = Z.grids, Z.chain
    if len(Q.sync_parameter) == 0:
        return NO_EFFECT
    place = below(X, len(Q.sync_parameter))
    parameter, first = Q.sync_parameter[place], Q.sync_ptr[place]
    count, current = Q.sync_ptr[place + 1] - first, -1
    for i in range(count):
        current = i if Q.sync_choice[first + i] == C.sync[parameter] else current
    chosen = below(X, count - 1) if current >= 0 else below(X, count)
    if current >= 0 and chosen >= current:
        chosen += 1
    E.parameter[0], E.sync[0] = parameter, Q.sync_choice[first + chosen]
    E.count[PARAMETERS] = 1
    return 0.0
