"""A move that gives a connected run of operators new configurations at once, each aligned with the one before (compiled).

The run is drawn without a look at the configurations: from one operator it grows along random edges. In half of all cases that one is a
source, which keeps its configuration and spreads it. Each candidate beside the current one configures all of the run, in the order in
which it grew: a first operator that is no source by weight, each other one mostly as the operator that it grew from suggests
(``suggestions``), most of all with the shared dimensions split alike. The probability of that is known, for the current configurations
as well, and does not depend on them. One candidate is chosen in proportion to exp(-focus * rough cost), with transfers inside of the
run and to its surroundings.
"""

from __future__ import annotations

from math import exp, log

from soap.search.compiled.candidates import FIRST_LISTED, below, choose, draw_candidate, log_density, log_weight, same, uniform
from soap.search.compiled.edits import NO_EFFECT, add
from soap.search.compiled.memory import CANDIDATES, LONGEST_RUN, ChainTables
from soap.search.compiled.suggestions import list_aligned
from soap.search.compiled.tables import GridTables, NeighbourTables
from soap.search.compiled.weighing import edge_ns, own_ns
from soap.simulator.compiled.arrays import copy
from soap.simulator.compiled.change import Edit
from soap.simulator.compiled.jit import compiled
from soap.simulator.compiled.state import State
from soap.simulator.compiled.tables import ClusterTables

FOLLOWING_SHARE = 0.7
"""How often an operator of a run takes the first suggestion of the one that it grew from, which is to split alike what they share."""
LISTED_SHARE = 0.7
"""How often, else, it takes any of the suggestions; else it is configured on its own."""

MOST_DRAWS = LONGEST_RUN * LONGEST_RUN
"""Edges that are looked at for a run, at most: some lead back into it."""


@compiled
def propose_run(Q: GridTables, N: NeighbourTables, K: ClusterTables, C: State, W: ChainTables, E: Edit, focus: float) -> float:
    """See ``moves.propose``."""
    length = _grow(Q, N, W)
    source = below(W, 2)
    inside = _take_run(Q, C, W, length)
    if inside:
        for candidate in range(1, CANDIDATES + 1):
            _draw_run(Q, N, W, length, candidate, source)
        for candidate in range(CANDIDATES + 1):
            W.c_weight[candidate] = -focus * _rough_run_ns(Q, N, K, C, W, length, candidate)
    for i in range(length):
        W.r_place[W.r_op[i]] = -1
    if not inside:
        return NO_EFFECT
    chosen = choose(W, True)
    effect = False
    for i in range(length):
        _bring(Q, W, 0, i, 0)
        _bring(Q, W, chosen, i, 1)
        if not same(Q, W, 0, 1):
            add(Q, W, E, W.r_op[i], W.c_grid[1], W.c_dev, len(W.order))
            effect = True
    if not effect:
        return NO_EFFECT
    log_ratio = W.c_weight[0] - W.c_weight[chosen]
    return log_ratio + _log_run(Q, N, W, length, 0, source) - _log_run(Q, N, W, length, chosen, source)


@compiled
def _grow(Q, N, W):  # type: ignore[no-untyped-def]
    """Draw a run, into ``r_op``, ``r_from``, ``r_edge`` and ``r_place``; its length."""
    wanted, length = 2 + below(W, LONGEST_RUN - 1), 1
    W.r_op[0] = Q.movable[below(W, len(Q.movable))]
    W.r_place[W.r_op[0]] = 0
    for _ in range(MOST_DRAWS):
        place = below(W, length)
        op = W.r_op[place]
        edges = N.edge_ptr[op + 1] - N.edge_ptr[op]
        if length < wanted and edges > 0:
            neighbour = N.neighbour[N.edge_ptr[op] + below(W, edges)]
            if W.r_place[neighbour] < 0 and Q.structured[Q.space[neighbour]] > 1:
                back = N.edge_ptr[neighbour]
                while N.neighbour[back] != op:
                    back += 1
                W.r_op[length], W.r_from[length], W.r_edge[length], W.r_place[neighbour] = neighbour, place, back, length
                length += 1
    return length


@compiled
def _take_run(Q, C, W, length):  # type: ignore[no-untyped-def]
    """The current configurations become candidate 0; whether all of them are inside of the space."""
    for i in range(length):
        op = W.r_op[i]
        if W.grid[op] < 0:
            return False
        W.r_grid[i] = W.grid[op]
        copy(W.r_dev, i * len(W.order), C.dev, C.dev_ptr[op], C.dev_ptr[op] + C.tiles[op])
    return True


@compiled
def _draw_run(Q, N, W, length, candidate, source):  # type: ignore[no-untyped-def]
    """Configure all of the run but the first ``source`` operators."""
    for i in range(length):
        if i < source:
            _bring(Q, W, 0, i, 1)
        else:
            listed = _list(Q, N, W, candidate, i)
            if listed > 0 and uniform(W) <= FOLLOWING_SHARE:
                _take_listed(Q, W, 1)
            else:
                draw_candidate(Q, W, W.r_op[i], listed, 1, LISTED_SHARE)
        row = candidate * LONGEST_RUN + i
        W.r_grid[row] = W.c_grid[1]
        copy(W.r_dev, row * len(W.order), W.c_dev, len(W.order), len(W.order) + Q.tiles[W.c_grid[1]])


@compiled
def _take_listed(Q, W, slot):  # type: ignore[no-untyped-def]
    """The first one that is listed, into a slot."""
    W.c_grid[slot], first = W.c_grid[FIRST_LISTED], FIRST_LISTED * len(W.order)
    copy(W.c_dev, slot * len(W.order), W.c_dev, first, first + Q.tiles[W.c_grid[FIRST_LISTED]])


@compiled
def _list(Q, N, W, candidate, i):  # type: ignore[no-untyped-def]
    """List what a candidate suggests to the operator at place ``i``; how many."""
    if i == 0:
        return 0
    row = candidate * LONGEST_RUN + W.r_from[i]
    return list_aligned(Q, N, W, W.r_op[i], W.r_edge[i], W.r_grid[row], W.r_dev, row * len(W.order), 0)


@compiled
def _bring(Q, W, candidate, i, slot):  # type: ignore[no-untyped-def]
    """What a candidate gives the operator at place ``i``, into a slot."""
    row, first = candidate * LONGEST_RUN + i, slot * len(W.order)
    W.c_grid[slot] = W.r_grid[row]
    copy(W.c_dev, first, W.r_dev, row * len(W.order), row * len(W.order) + Q.tiles[W.r_grid[row]])
    W.c_log[slot] = log_weight(Q, W, W.r_op[i], W.r_grid[row], first)


@compiled
def _log_run(Q, N, W, length, candidate, source):  # type: ignore[no-untyped-def]
    """Logarithm of the probability of drawing a candidate over its weight."""
    found = 0.0
    for i in range(source, length):
        listed = _list(Q, N, W, candidate, i)
        _bring(Q, W, candidate, i, 0)
        density = log_density(Q, W, W.r_op[i], listed, 0, LISTED_SHARE)
        if listed > 0:
            density = log(FOLLOWING_SHARE * same(Q, W, 0, FIRST_LISTED) + (1 - FOLLOWING_SHARE) * exp(density))
        found += density - W.c_log[0]
    return found


@compiled
def _rough_run_ns(Q, N, K, C, W, length, candidate):  # type: ignore[no-untyped-def]
    found = 0.0
    for i in range(length):
        op, row = W.r_op[i], candidate * LONGEST_RUN + i
        found += own_ns(Q, op, W.r_grid[row])
        for edge in range(N.edge_ptr[op], N.edge_ptr[op + 1]):
            neighbour = N.neighbour[edge]
            other = W.r_place[neighbour]
            if other < 0 and W.grid[neighbour] >= 0:
                at = C.dev_ptr[neighbour]
                found += edge_ns(Q, N, K, W, op, edge, W.r_grid[row], W.r_dev, row * len(W.order), W.grid[neighbour], C.dev, at)
            elif other >= 0 and N.reads[edge]:  # an edge inside once, by who reads
                theirs = candidate * LONGEST_RUN + other
                at = theirs * len(W.order)
                found += edge_ns(Q, N, K, W, op, edge, W.r_grid[row], W.r_dev, row * len(W.order), W.r_grid[theirs], W.r_dev, at)
    return found
