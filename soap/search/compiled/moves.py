"""The moves of the compiled chain, and why each of them keeps detailed balance.

The target and the reference measure are those of ``search.metropolis`` and ``search.space``. ``log_ratio`` is the logarithm of
weight(S*) q(S | S*) / (weight(S) q(S* | S)), as in ``search.proposals``; the operator (device, segment) is drawn uniformly from what does
not depend on the state.

- ``redraw``: one operator, a configuration in proportion to its weight: log_ratio = 0.
- ``place``: one operator, same grid, another structured placement, uniformly: symmetric.
- ``swap``: one operator, two devices change places: an involution, so log_ratio is that of the weights alone.
- ``informed``: one operator. Its configuration S and m others, drawn from a distribution d that does not depend on S, make a set, of which
  one is chosen in proportion to w = exp(-focus * rough cost beside the neighbours). Whoever goes from S* back to S draws S where
  S* was drawn, and has the same set (Tjelmeland, *Using all Metropolis-Hastings proposals to estimate mean values*, 2004); so
  log_ratio = log weight(S*) / weight(S) + log d(S) w(S) / (d(S*) w(S*)). Choosing S itself costs no simulation.
- ``group``: all layers that equal the drawn operator and are configured alike get another structured configuration, chosen like that from
  uniform draws, by rough costs without neighbours (which are the same for all of the group). No effect if another layer has the
  chosen configuration already: the way back would move it too.
- ``run`` (``compiled.runs``): which connected operators is drawn without a look at their configurations. Given that, it is ``informed`` for
  all of them together: d(S) is the product of the probabilities along the run, each given the operator that it grew from, w(S) is of the
  rough cost of all of them; log_ratio is the same. d(S) > 0 everywhere in the space.
- ``segment``: if a segment is configured as one of its alternatives, it takes another one, uniformly: symmetric but for the weights.
- ``sync`` (``compiled.syncs``): one parameter, another way of synchronizing it, uniformly: symmetric.

A state outside of the space (weight 0) is never proposed; the way out of it is free (log_ratio = 0).
"""

from __future__ import annotations

from soap.search.compiled.candidates import (
    below,
    choose,
    draw_any,
    draw_candidate,
    draw_structured,
    log_density,
    log_weight,
    put_place,
    same,
    take_current,
)
from soap.search.compiled.edits import NO_EFFECT, add
from soap.search.compiled.memory import CANDIDATES, GROUP, INFORMED, PLACE, REDRAW, RUN, SEGMENT, SYNC, ChainTables
from soap.search.compiled.runs import propose_run
from soap.search.compiled.suggestions import list_candidates
from soap.search.compiled.syncs import propose_sync
from soap.search.compiled.tables import NO_WEIGHT, GridTables, GroupTables, NeighbourTables
from soap.search.compiled.weighing import own_ns, rough_cost_ns
from soap.simulator.compiled.change import OPERATORS, PARAMETERS, Edit
from soap.simulator.compiled.jit import compiled
from soap.simulator.compiled.state import State
from soap.simulator.compiled.tables import ClusterTables

LISTED_SHARE = 0.5
"""Part of an informed move's candidates that are suggested by neighbours and references."""


@compiled
def propose(
    Q: GridTables, N: NeighbourTables, M: GroupTables, K: ClusterTables, C: State, W: ChainTables, E: Edit, move: int, focus: float
) -> float:
    """Draw a proposal into the edit; its log_ratio, or ``NO_EFFECT``. ``focus``: per ns of rough cost."""
    E.count[OPERATORS] = E.count[PARAMETERS] = 0
    if move == RUN:
        return propose_run(Q, N, K, C, W, E, focus)
    if move == SEGMENT:
        return _segment(Q, N, M, C, W, E)
    if move == SYNC:
        return propose_sync(Q, C, W, E)
    op = Q.movable[below(W, len(Q.movable))]
    take_current(Q, C, W, op)
    if move == INFORMED:
        return _informed(Q, N, K, C, W, E, op, focus)
    if move == GROUP:
        return _group(Q, M, C, W, E, op, focus)
    if move == REDRAW:
        draw_any(Q, W, op, 1)
        return _single(Q, W, E, op, 0.0)
    if W.c_log[0] == NO_WEIGHT:
        return NO_EFFECT
    if move == PLACE:
        if not W.structured[op]:
            return NO_EFFECT
        put_place(Q, W, 1, W.grid[op], below(W, Q.place_count[Q.places[W.grid[op]]]))
        return _single(Q, W, E, op, 0.0)
    return _swap(Q, W, E, op)


@compiled
def _single(Q, W, E, op, log_ratio):  # type: ignore[no-untyped-def]
    """Candidate 1 for one operator."""
    if same(Q, W, 0, 1):
        return NO_EFFECT
    add(Q, W, E, op, W.c_grid[1], W.c_dev, len(W.order))
    return 0.0 if W.c_log[0] == NO_WEIGHT else log_ratio


@compiled
def _swap(Q, W, E, op):  # type: ignore[no-untyped-def]
    space, devices = Q.space[op], len(W.order)
    first, count = Q.device_ptr[space], Q.device_ptr[space + 1] - Q.device_ptr[space]
    if count < 2:
        return NO_EFFECT
    i = below(W, count)
    a, b = Q.device[first + i], Q.device[first + (i + 1 + below(W, count - 1)) % count]
    grid = W.c_grid[0]
    for tile in range(Q.tiles[grid]):
        device = W.c_dev[tile]
        W.c_dev[devices + tile] = b if device == a else a if device == b else device
    W.c_grid[1], W.c_log[1] = grid, log_weight(Q, W, op, grid, devices)
    if W.c_log[1] == NO_WEIGHT:
        return NO_EFFECT
    return _single(Q, W, E, op, W.c_log[1] - W.c_log[0])


@compiled
def _informed(Q, N, K, C, W, E, op, focus):  # type: ignore[no-untyped-def]
    inside = W.c_log[0] != NO_WEIGHT
    listed = list_candidates(Q, N, C, W, op)
    for slot in range(1, CANDIDATES + 1):
        draw_candidate(Q, W, op, listed, slot, LISTED_SHARE)
        W.c_weight[slot] = -focus * rough_cost_ns(Q, N, K, C, W, op, slot)
    if inside:
        W.c_weight[0] = -focus * rough_cost_ns(Q, N, K, C, W, op, 0)
    chosen = choose(W, inside)
    if inside and same(Q, W, 0, chosen):
        return NO_EFFECT
    add(Q, W, E, op, W.c_grid[chosen], W.c_dev, chosen * len(W.order))
    if not inside:
        return 0.0
    log_ratio = W.c_log[chosen] - W.c_log[0] + W.c_weight[0] - W.c_weight[chosen]
    return log_ratio + log_density(Q, W, op, listed, 0, LISTED_SHARE) - log_density(Q, W, op, listed, chosen, LISTED_SHARE)


@compiled
def _group(Q, M, C, W, E, op, focus):  # type: ignore[no-untyped-def]
    group = M.group[op]
    if group < 0 or W.c_log[0] == NO_WEIGHT or not W.structured[op]:
        return NO_EFFECT
    members = 0
    for i in range(M.member_ptr[group], M.member_ptr[group + 1]):
        members += _has(Q, C, W, M.member[i], 0)
    W.c_weight[0] = -focus * members * own_ns(Q, op, W.c_grid[0])
    for slot in range(1, CANDIDATES + 1):
        draw_structured(Q, W, op, slot)
        W.c_weight[slot] = -focus * members * own_ns(Q, op, W.c_grid[slot])
    chosen = choose(W, True)
    if same(Q, W, 0, chosen):
        return NO_EFFECT
    for i in range(M.member_ptr[group], M.member_ptr[group + 1]):
        if _has(Q, C, W, M.member[i], chosen):
            return NO_EFFECT
    for i in range(M.member_ptr[group], M.member_ptr[group + 1]):
        if _has(Q, C, W, M.member[i], 0):
            add(Q, W, E, M.member[i], W.c_grid[chosen], W.c_dev, chosen * len(W.order))
    return W.c_weight[0] - W.c_weight[chosen]


@compiled
def _has(Q, C, W, op, slot):  # type: ignore[no-untyped-def]
    """Whether an operator is configured like a candidate."""
    grid = W.c_grid[slot]
    equal = W.grid[op] == grid
    if equal:
        for tile in range(Q.tiles[grid]):
            equal &= C.dev[C.dev_ptr[op] + tile] == W.c_dev[slot * len(W.order) + tile]
    return equal


@compiled
def _segment(Q, N, M, C, W, E):  # type: ignore[no-untyped-def]
    if len(M.segment_ptr) < 2:
        return NO_EFFECT
    segment = below(W, len(M.segment_ptr) - 1)
    first, length = M.segment_ptr[segment], M.segment_ptr[segment + 1] - M.segment_ptr[segment]
    count = (M.choice_ptr[segment + 1] - M.choice_ptr[segment]) // length
    current = -1
    for number in range(count):
        if _is_alternative(Q, N, M, C, W, first, length, M.choice_ptr[segment] + number * length):
            current = number
    chosen = below(W, count)
    if current < 0 or chosen == current:
        return NO_EFFECT
    log_ratio = 0.0
    for i in range(length):
        op = M.segment[first + i]
        old, new = M.choice[M.choice_ptr[segment] + current * length + i], M.choice[M.choice_ptr[segment] + chosen * length + i]
        if old != new:
            add(Q, W, E, op, N.grid[new], N.dev, N.dev_ptr[new])
            log_ratio += N.log_weight[new] - N.log_weight[old]
    return log_ratio


@compiled
def _is_alternative(Q, N, M, C, W, first, length, choice):  # type: ignore[no-untyped-def]
    equal, i = True, 0
    while equal and i < length:
        op, reference = M.segment[first + i], M.choice[choice + i]
        equal = W.grid[op] == N.grid[reference]
        if equal:
            for tile in range(Q.tiles[N.grid[reference]]):
                equal &= C.dev[C.dev_ptr[op] + tile] == N.dev[N.dev_ptr[reference] + tile]
        i += 1
    return equal
