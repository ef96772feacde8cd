"""The move that changes how one parameter is synchronized, or the parameters of a run together (compiled)."""

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
    again. Where there are sets of parameters that readers may own in parts, half of the moves give one to a whole set."""
    Q, X = Z.grids, Z.chain
    if len(Q.sync_parameter) == 0:
        return NO_EFFECT
    if len(Q.together_ptr) > 1 and below(X, 2) == 1:
        return _propose_together(Q, X, C, E)
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


@compiled
def _propose_together(Q, X, C, E):  # type: ignore[no-untyped-def]
    """Give all parameters of a set another method, if all have the same one now. Its own inverse: symmetric."""
    own = below(X, len(Q.together_ptr) - 1)
    first, last = Q.together_ptr[own], Q.together_ptr[own + 1]
    place = Q.together[first]
    code, begin = C.sync[Q.sync_parameter[place]], Q.sync_ptr[place]
    count, current = Q.sync_ptr[place + 1] - begin, -1
    for i in range(count):
        current = i if Q.sync_choice[begin + i] == code else current
    for i in range(first, last):
        if C.sync[Q.sync_parameter[Q.together[i]]] != code:
            current = -1
    if current < 0:
        return NO_EFFECT
    chosen = below(X, count - 1)
    chosen += 1 if chosen >= current else 0
    for i in range(first, last):
        E.parameter[i - first], E.sync[i - first] = Q.sync_parameter[Q.together[i]], Q.sync_choice[begin + chosen]
    E.count[PARAMETERS] = last - first
    return 0.0
