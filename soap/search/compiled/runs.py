"""The move that reconfigures a run of connected operators at once, each aligned with the one before (compiled).

A run grows from one operator along random edges, without regard to configurations. In half of all draws the first operator is a *source*:
it keeps its configuration and spreads it along the run. Each candidate configures the whole run, in the order in which it grew. A first
operator that is no source is drawn by weight. Every other operator mostly takes what the operator that it was reached from suggests
(``suggestions``), preferably with the shared dimensions split alike. The probability of a candidate, and of the current configurations, is
known and does not depend on the current ones. One candidate is chosen in proportion to exp(-focus * rough cost), which includes transfers
inside the run and to its surroundings.
"""

from __future__ import annotations

from math import exp, log

from soap.search.compiled.candidates import FIRST_LISTED, below, choose, draw_candidate, log_density, log_weight, same, uniform
from soap.search.compiled.edits import NO_EFFECT, add
from soap.search.compiled.memory import CANDIDATES, LONGEST_RUN
from soap.search.compiled.space_arrays import SearchTables
from soap.search.compiled.suggestions import list_aligned
from soap.search.compiled.weighing import edge_ns, own_ns
from soap.simulator.compiled.arrays import copy
from soap.simulator.compiled.change import Edit
from soap.simulator.compiled.jit import compiled
from soap.simulator.compiled.world import World

FOLLOWING_SHARE = 0.7
"""Probability that an operator of a run takes the first suggestion of the operator that it was reached from: split shared dimensions
alike."""
LISTED_SHARE = 0.7
"""If not: probability that it takes any of the suggestions. Otherwise it is configured by weight."""

MOST_DRAWS = LONGEST_RUN * LONGEST_RUN
"""The most edges that are tried for a run: some lead back into it."""


@compiled
def propose_run(W: World, Z: SearchTables, E: Edit, focus: float) -> float:
    """See ``moves.propose``."""
    Q, X = Z.grids, Z.chain
    length = _grow(Z)
    source = below(X, 2)
    inside = _take_run(Z, length)
    if inside:
        for candidate in range(1, CANDIDATES + 1):
            _draw_run(Z, length, candidate, source)
        for candidate in range(CANDIDATES + 1):
            X.c_weight[candidate] = -focus * _rough_run_ns(W, Z, length, candidate)
    for i in range(length):
        X.r_place[X.r_op[i]] = -1
    if not inside:
        return NO_EFFECT
    chosen = choose(X, True)
    effect = False
    for i in range(length):
        _bring(Q, X, 0, i, 0)
        _bring(Q, X, chosen, i, 1)
        if not same(Q, X, 0, 1):
            add(Q, X, E, X.r_op[i], X.c_grid[1], X.c_dev, len(X.order))
            effect = True
    if not effect:
        return NO_EFFECT
    log_ratio = X.c_weight[0] - X.c_weight[chosen]
    return log_ratio + _log_run(Z, length, 0, source) - _log_run(Z, length, chosen, source)


@compiled
def _grow(Z):  # type: ignore[no-untyped-def]
    """Draw a run into ``r_op``, ``r_from``, ``r_edge`` and ``r_place``. Returns its length."""
    Q, N, X = Z.grids, Z.neighbours, Z.chain
    wanted, length = 2 + below(X, LONGEST_RUN - 1), 1
    X.r_op[0] = Q.movable[below(X, len(Q.movable))]
    X.r_place[X.r_op[0]] = 0
    for _ in range(MOST_DRAWS):
        place = below(X, length)
        op = X.r_op[place]
        edges = N.edge_ptr[op + 1] - N.edge_ptr[op]
        if length < wanted and edges > 0:
            neighbour = N.neighbour[N.edge_ptr[op] + below(X, edges)]
            if X.r_place[neighbour] < 0 and Q.structured[Q.space[neighbour]] > 1:
                back = N.edge_ptr[neighbour]
                while N.neighbour[back] != op:
                    back += 1
                X.r_op[length], X.r_from[length], X.r_edge[length], X.r_place[neighbour] = neighbour, place, back, length
                length += 1
    return length


@compiled
def _take_run(Z, length):  # type: ignore[no-untyped-def]
    """Make the current configurations candidate 0. Returns whether all of them are inside of the space."""
    Q, X = Z.grids, Z.chain
    for i in range(length):
        op = X.r_op[i]
        if X.grid[op] < 0:
            return False
        X.r_grid[i] = X.grid[op]
        first = op * len(X.order)
        copy(X.r_dev, i * len(X.order), X.held, first, first + Q.tiles[X.grid[op]])
    return True


@compiled
def _draw_run(Z, length, candidate, source):  # type: ignore[no-untyped-def]
    """Draw a candidate: configure the run. ``source``: 1 if the first operator keeps its configuration, else 0."""
    Q, X = Z.grids, Z.chain
    for i in range(length):
        if i < source:
            _bring(Q, X, 0, i, 1)
        else:
            listed = _list(Z, candidate, i)
            if listed > 0 and uniform(X) <= FOLLOWING_SHARE:
                _take_listed(Q, X, 1)
            else:
                draw_candidate(Q, X, X.r_op[i], listed, 1, LISTED_SHARE)
        row = candidate * LONGEST_RUN + i
        X.r_grid[row] = X.c_grid[1]
        copy(X.r_dev, row * len(X.order), X.c_dev, len(X.order), len(X.order) + Q.tiles[X.c_grid[1]])


@compiled
def _take_listed(Q, X, slot):  # type: ignore[no-untyped-def]
    """Copy the first suggestion into a slot."""
    X.c_grid[slot], first = X.c_grid[FIRST_LISTED], FIRST_LISTED * len(X.order)
    copy(X.c_dev, slot * len(X.order), X.c_dev, first, first + Q.tiles[X.c_grid[FIRST_LISTED]])


@compiled
def _list(Z, candidate, i):  # type: ignore[no-untyped-def]
    """List what a candidate suggests to the operator at place ``i``. Returns how many suggestions there are."""
    X = Z.chain
    if i == 0:
        return 0
    row = candidate * LONGEST_RUN + X.r_from[i]
    return list_aligned(Z, X.r_op[i], X.r_edge[i], X.r_grid[row], X.r_dev, row * len(X.order), 0)


@compiled
def _bring(Q, X, candidate, i, slot):  # type: ignore[no-untyped-def]
    """Copy a candidate's configuration of the operator at place ``i`` into a slot."""
    row, first = candidate * LONGEST_RUN + i, slot * len(X.order)
    X.c_grid[slot] = X.r_grid[row]
    copy(X.c_dev, first, X.r_dev, row * len(X.order), row * len(X.order) + Q.tiles[X.r_grid[row]])
    X.c_log[slot] = log_weight(Q, X, X.r_op[i], X.r_grid[row], first)


@compiled
def _log_run(Z, length, candidate, source):  # type: ignore[no-untyped-def]
    """Logarithm of: probability of drawing a candidate, divided by its weight."""
    Q, X = Z.grids, Z.chain
    found = 0.0
    for i in range(source, length):
        listed = _list(Z, candidate, i)
        _bring(Q, X, candidate, i, 0)
        density = log_density(Q, X, X.r_op[i], listed, 0, LISTED_SHARE)
        if listed > 0:
            density = log(FOLLOWING_SHARE * same(Q, X, 0, FIRST_LISTED) + (1 - FOLLOWING_SHARE) * exp(density))
        found += density - X.c_log[0]
    return found


@compiled
def _rough_run_ns(W, Z, length, candidate):  # type: ignore[no-untyped-def]
    K = W.cluster
    Q, N, X = Z.grids, Z.neighbours, Z.chain
    found = 0.0
    for i in range(length):
        op, row = X.r_op[i], candidate * LONGEST_RUN + i
        found += own_ns(Q, op, X.r_grid[row])
        for edge in range(N.edge_ptr[op], N.edge_ptr[op + 1]):
            neighbour = N.neighbour[edge]
            other = X.r_place[neighbour]
            if other < 0 and X.grid[neighbour] >= 0:
                at = neighbour * len(X.order)
                found += edge_ns(Z, K, op, edge, X.r_grid[row], X.r_dev, row * len(X.order), X.grid[neighbour], X.held, at)
            elif other >= 0 and N.reads[edge]:  # count an edge inside the run once, at its reader
                theirs = candidate * LONGEST_RUN + other
                at = theirs * len(X.order)
                found += edge_ns(Z, K, op, edge, X.r_grid[row], X.r_dev, row * len(X.order), X.r_grid[theirs], X.r_dev, at)
    return found
