"""A Metropolis-Hastings chain over strategies, in one compiled loop.

The random number u that decides on acceptance is drawn before the simulation. With the current cost c and the proposal's cost c*, it turns
the acceptance probability min(1, exp(log_ratio + beta * (c - c*) / c_start)) into the bound c* <= c + (log_ratio - ln u) * c_start / beta.
The simulation stops as soon as it exceeds the bound; the decision stays the same.

If costs are uncertain, the cost f of a strategy is what its times under several draws come to, which takes several simulations. So a
proposal is accepted in two stages (Christen & Fox, "Markov chain Monte Carlo using an approximation", 2005: delayed acceptance). The first
is the one above with the times c under the most likely costs. The second accepts what has passed with probability
min(1, exp(beta * ((f - f*) - (c - c*)) / c_start)). Together they keep detailed balance for exp(-beta * f / c_start): the first stage's
part is divided out again.

Where memory binds, the chain keeps to the strategies that fit, exactly: Python is asked about each that it would accept, unless even
the sum of all that devices ever hold fits.
"""

from __future__ import annotations

from math import log

from soap.search.compiled.candidates import log_weight, uniform
from soap.search.compiled.edits import NO_EFFECT
from soap.search.compiled.memory import (
    ASKED,
    BEFORE,
    BEST,
    BEST_PREFETCH,
    COST,
    LOGGED,
    MOVES,
    NOTHING,
    PENDING,
    RANDOM,
    REFUSED,
    START,
    STEP,
    SWAPPED,
    USUAL,
)
from soap.search.compiled.moves import propose
from soap.search.compiled.space_arrays import NO_WEIGHT, SearchTables
from soap.simulator.compiled.arrays import copy
from soap.simulator.compiled.change import OPERATORS, Edit
from soap.simulator.compiled.draws import Drawing, play_draws
from soap.simulator.compiled.evaluate import adopt, evaluate, take_back
from soap.simulator.compiled.events import NO_BOUND, STOPPED
from soap.simulator.compiled.jit import compiled
from soap.simulator.compiled.machine_code import entry
from soap.simulator.compiled.memory_sum import UNKNOWN, SumTables, sum_memory
from soap.simulator.compiled.pass_order import own_devices
from soap.simulator.compiled.syncs.clipping import can_clip
from soap.simulator.compiled.trial import HEAPED, SKIPPED, TAKEN, Trial
from soap.simulator.compiled.world import World

DONE, MUST_ASK = 0, 1
"""Returned by ``advance``: all steps are done, or Python must decide whether the proposal fits into memory."""

MOST_IDLE = 1000
"""After so many moves without effect in a row, the chain ends: nothing is left to propose."""


@entry
def advance(
    W: World,
    A: Trial,
    B: Trial,
    E: Edit,
    Z: SearchTables,
    M: SumTables,
    D: Drawing,
    steps: int,
    beta: float,
    focus: float,
    memory: bool,
) -> int:
    """Go on until ``steps`` proposals are logged (moves without effect do not count), or ``MOST_IDLE`` moves in a row had no effect.

    Missing data (a variant, a price) raises; after ``take_back`` everything is as before the step. ``memory``: check whether accepted
    proposals fit into memory. If the sum of ``M`` cannot tell, Python decides (``MUST_ASK``)."""
    C = W.state
    Q, X = Z.grids, Z.chain
    at = X.at
    idle = 0
    while at[LOGGED] < steps and idle < MOST_IDLE:
        at[RANDOM] = at[BEFORE]  # a step that is tried again draws the same numbers
        P, T = (B, A) if at[SWAPPED] else (A, B)
        move = _draw_move(X)
        decision = log(uniform(X))
        log_ratio = propose(W, Z, E, move, focus)
        if log_ratio == NO_EFFECT:
            idle += 1
            at[STEP] += 1
            at[BEFORE] = at[RANDOM]
            continue
        usual = cost = _evaluate(W, P, T, E, X, at[USUAL] + (log_ratio - decision) * at[START] / beta)
        accepted = cost != STOPPED
        accepted = accepted and can_clip(W)
        if accepted and D.tables.count[0] > 0:
            cost = play_draws(W, D)
            accepted = cost <= at[COST] + usual - at[USUAL] - log(uniform(X)) * at[START] / beta
        if accepted and memory and at[PENDING] == NOTHING and sum_memory(W, M) == UNKNOWN:
            take_back(W)
            at[PENDING] = ASKED
            return MUST_ASK
        accepted = accepted and at[PENDING] != REFUSED
        at[PENDING] = NOTHING
        idle = 0
        _log(X, E, move, cost, accepted)
        if accepted:
            adopt(W, P, T)
            at[SWAPPED] = 1 - at[SWAPPED]
            at[COST], at[USUAL] = cost, usual
            _note(Q, X, E)
            if cost < at[BEST]:
                at[BEST] = cost
                _keep_best(C, X)
        else:
            take_back(W)
        at[BEFORE] = at[RANDOM]
    return DONE


@compiled
def _evaluate(W, P, T, E, X, threshold):  # type: ignore[no-untyped-def]
    """Cost of the proposal in ns, or STOPPED if it exceeds the threshold."""
    if threshold <= 0:
        return STOPPED
    bound = int(threshold) if threshold < NO_BOUND else NO_BOUND
    T.size[TAKEN] = T.size[SKIPPED] = T.size[HEAPED] = 0
    cost = evaluate(W, P, T, E, bound)
    return STOPPED if cost > bound else cost


@compiled
def _draw_move(X):  # type: ignore[no-untyped-def]
    total = 0.0
    for move in range(len(MOVES)):
        total += X.weight[move]
    left, chosen = uniform(X) * total, 0
    for move in range(len(MOVES)):
        if X.weight[move] > 0 and left > 0:
            chosen = move
            left -= X.weight[move]
    return chosen


@compiled
def _log(X, E, move, cost, accepted):  # type: ignore[no-untyped-def]
    n = X.at[LOGGED]
    X.log_move[n], X.log_count[n] = move, E.count[OPERATORS]
    X.log_operator[n] = E.operator[0] if E.count[OPERATORS] > 0 else -1 - E.parameter[0]
    X.log_cost[n], X.log_accepted[n] = cost, accepted
    X.proposed[move] += 1
    X.accepted[move] += accepted
    X.at[LOGGED] = n + 1
    X.at[STEP] += 1


@compiled
def _note(Q, X, E):  # type: ignore[no-untyped-def]
    """Note the new grids of the operators of an accepted edit."""
    for i in range(E.count[OPERATORS]):
        op = E.operator[i]
        if X.edited[i] < 0:  # it stays outside of the space
            continue
        copy(X.held, op * len(X.order), E.dev, E.dev_ptr[i], E.dev_ptr[i + 1])
        copy(X.c_dev, 0, E.dev, E.dev_ptr[i], E.dev_ptr[i + 1])
        X.grid[op] = X.edited[i]
        X.structured[op] = log_weight(Q, X, op, X.edited[i], 0) == 0.0


@compiled
def _keep_best(C, X):  # type: ignore[no-untyped-def]
    at = 0
    for op in range(len(X.grid) - 1):
        X.best_variant[op], X.best_replicas[op], X.best_dev_ptr[op] = C.variant[op], C.replicas[op], at
        X.best_marked[op] = C.marked[op]
        copy(X.best_dev, at, C.dev, C.dev_ptr[op], C.dev_ptr[op] + C.tiles[op])
        at += C.tiles[op]
    X.best_dev_ptr[len(X.grid) - 1] = at
    copy(X.best_sync, 0, C.sync, 0, len(X.best_sync) - 1)
    X.at[BEST_PREFETCH] = C.prefetch[0]


@entry
def begin_chain(W: World, Z: SearchTables, cost: int, usual: int) -> None:
    """Start, or go on, from the strategy that the engine holds, of this cost in ns, and this makespan under the most likely costs. Its
    grids are in ``grid`` already."""
    C = W.state
    Q, X = Z.grids, Z.chain
    for op in range(len(X.grid) - 1):
        X.structured[op] = 0
        if X.grid[op] >= 0:
            first = op * len(X.order)
            copy(X.c_dev, 0, X.held, first, first + own_devices(W, op, X.held, first))
            weight = log_weight(Q, X, op, X.grid[op], 0)
            X.structured[op] = weight == 0.0
            if weight == NO_WEIGHT:
                X.grid[op] = -1
    X.at[COST], X.at[USUAL] = cost, usual
    if X.at[BEST] == 0 or cost < X.at[BEST]:
        X.at[BEST] = cost
        _keep_best(C, X)
