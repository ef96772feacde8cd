"""A Metropolis-Hastings chain over strategies, in one compiled loop (compiled).

The number that decides is drawn before the simulation: with the current cost c it turns the acceptance probability
min(1, exp(log_ratio + beta * (c - c*) / c_start)) into the bound c* <= c + (log_ratio - ln u) * c_start / beta, with which the
simulation may give up early. The decision is the same either way. ``search.metropolis`` is the same kernel in plain Python.
"""

from __future__ import annotations

from math import log

from soap.search.compiled.candidates import log_weight, uniform
from soap.search.compiled.edits import NO_EFFECT
from soap.search.compiled.memory import (
    ASKED,
    BEFORE,
    BEST,
    COST,
    LOGGED,
    MOVES,
    NOTHING,
    PENDING,
    PLAYED,
    RANDOM,
    REFUSED,
    START,
    STEP,
    SWAPPED,
    ChainTables,
)
from soap.search.compiled.moves import propose
from soap.search.compiled.tables import NO_WEIGHT, GridTables, GroupTables, NeighbourTables
from soap.simulator.compiled.arrays import copy
from soap.simulator.compiled.change import OPERATORS, Edit, Undo
from soap.simulator.compiled.evaluate import adopt, evaluate, take_back
from soap.simulator.compiled.events import NO_BOUND, STOPPED
from soap.simulator.compiled.history import History
from soap.simulator.compiled.jit import compiled, entry
from soap.simulator.compiled.memory import bound_memory
from soap.simulator.compiled.memory_tables import FITS, UNKNOWN, MemoryTables
from soap.simulator.compiled.scratch import Scratch
from soap.simulator.compiled.state import Groups, ShardTables, State
from soap.simulator.compiled.tables import ClusterTables, GraphTables
from soap.simulator.compiled.trial import HEAPED, SKIPPED, TAKEN, Trial
from soap.simulator.compiled.variants import VariantTables

DONE, MUST_ASK = 0, 1
"""What ``advance`` returns: all steps are done, or Python is to say whether the proposal fits into memory."""

MOST_IDLE = 1000
"""Moves without effect in a row after which there is nothing left to do."""


@entry
def advance(
    G: GraphTables,
    V: VariantTables,
    K: ClusterTables,
    R: Groups,
    D: ShardTables,
    C: State,
    S: Scratch,
    U: Undo,
    A: Trial,
    B: Trial,
    H: History,
    E: Edit,
    Q: GridTables,
    N: NeighbourTables,
    M: GroupTables,
    W: ChainTables,
    X: MemoryTables,
    steps: int,
    beta: float,
    focus: float,
    memory: bool,
    dtypes: int,
) -> int:
    """Go on until ``steps`` proposals are logged (moves without effect are none), or ``MOST_IDLE`` moves in a row had no effect.

    What is lacking raises, with all as it was before the step (after ``take_back``). ``memory``: of what would be accepted, Python must
    be asked for what the bounds of ``X`` leave open."""
    at = W.at
    idle = 0
    while at[LOGGED] < steps and idle < MOST_IDLE:
        at[RANDOM] = at[BEFORE]  # if something was lacking, it has gone on
        P, T = (B, A) if at[SWAPPED] else (A, B)
        move = _draw_move(W)
        decision = log(uniform(W))
        log_ratio = propose(Q, N, M, K, C, W, E, move, focus)
        if log_ratio == NO_EFFECT:
            W.idle[move] += 1
            idle += 1
            at[STEP] += 1
            at[BEFORE] = at[RANDOM]
            continue
        cost = _evaluate(G, V, K, R, D, C, S, U, P, T, H, E, W, dtypes, at[COST] + (log_ratio - decision) * at[START] / beta)
        accepted = cost != STOPPED
        if accepted and memory and at[PENDING] == NOTHING:
            verdict = bound_memory(G, V, K, C, S, X)
            if verdict == UNKNOWN:
                take_back(G, R, C, U)
                at[PENDING] = ASKED
                return MUST_ASK
            accepted = verdict == FITS
        accepted = accepted and at[PENDING] != REFUSED
        at[PENDING] = NOTHING
        idle = 0
        _log(W, E, move, cost, accepted)
        if accepted:
            adopt(G, C, U, P, T, H)
            at[SWAPPED] = 1 - at[SWAPPED]
            at[COST] = cost
            _note(Q, W, E)
            if cost < at[BEST]:
                W.gained[move] += at[BEST] - cost
                at[BEST] = cost
                _keep_best(C, W)
        else:
            take_back(G, R, C, U)
        at[BEFORE] = at[RANDOM]
    return DONE


@compiled
def _evaluate(G, V, K, R, D, C, S, U, P, T, H, E, W, dtypes, threshold):  # type: ignore[no-untyped-def]
    """Cost of the proposal, or STOPPED if it is over the threshold."""
    if threshold <= 0:
        return STOPPED
    bound = int(threshold) if threshold < NO_BOUND else NO_BOUND
    T.size[TAKEN] = T.size[SKIPPED] = T.size[HEAPED] = 0
    cost = evaluate(G, V, K, R, D, C, S, U, P, T, H, E, dtypes, bound)
    W.at[PLAYED] += T.size[TAKEN] - T.size[SKIPPED]
    return STOPPED if cost > bound else cost


@compiled
def _draw_move(W):  # type: ignore[no-untyped-def]
    total = 0.0
    for move in range(len(MOVES)):
        total += W.weight[move]
    left, chosen = uniform(W) * total, 0
    for move in range(len(MOVES)):
        if W.weight[move] > 0 and left > 0:
            chosen = move
            left -= W.weight[move]
    return chosen


@compiled
def _log(W, E, move, cost, accepted):  # type: ignore[no-untyped-def]
    n = W.at[LOGGED]
    W.log_move[n], W.log_count[n] = move, E.count[OPERATORS]
    W.log_operator[n] = E.operator[0] if E.count[OPERATORS] > 0 else -1 - E.parameter[0]
    W.log_cost[n], W.log_accepted[n] = cost, accepted
    W.proposed[move] += 1
    W.accepted[move] += accepted
    W.at[LOGGED] = n + 1
    W.at[STEP] += 1


@compiled
def _note(Q, W, E):  # type: ignore[no-untyped-def]
    """Where the operators of an accepted edit are now."""
    for i in range(E.count[OPERATORS]):
        op = E.operator[i]
        copy(W.c_dev, 0, E.dev, E.dev_ptr[i], E.dev_ptr[i + 1])
        W.grid[op] = W.edited[i]
        W.structured[op] = log_weight(Q, W, op, W.edited[i], 0) == 0.0


@compiled
def _keep_best(C, W):  # type: ignore[no-untyped-def]
    at = 0
    for op in range(len(W.grid) - 1):
        W.best_variant[op], W.best_replicas[op], W.best_dev_ptr[op] = C.variant[op], C.replicas[op], at
        copy(W.best_dev, at, C.dev, C.dev_ptr[op], C.dev_ptr[op] + C.tiles[op])
        at += C.tiles[op]
    W.best_dev_ptr[len(W.grid) - 1] = at
    copy(W.best_sync, 0, C.sync, 0, len(W.best_sync) - 1)


@entry
def begin_chain(Q: GridTables, C: State, W: ChainTables, cost: int) -> None:
    """The strategy that the engine holds is where the chain stands; its grids are in ``grid``."""
    for op in range(len(W.grid) - 1):
        W.structured[op] = 0
        if W.grid[op] >= 0:
            copy(W.c_dev, 0, C.dev, C.dev_ptr[op], C.dev_ptr[op] + C.tiles[op])
            weight = log_weight(Q, W, op, W.grid[op], 0)
            W.structured[op] = weight == 0.0
            if weight == NO_WEIGHT:
                W.grid[op] = -1
    W.at[COST] = cost
    if W.at[BEST] == 0 or cost < W.at[BEST]:
        W.at[BEST] = cost
        _keep_best(C, W)
