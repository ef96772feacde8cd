"""The moves of the compiled chain, and why each of them keeps detailed balance.

S is the current state, S* the proposed one. The target and the reference measure are those of ``search.metropolis`` and ``search.space``.
``log_ratio`` is the logarithm of weight(S*) q(S | S*) / (weight(S) q(S* | S)). Each move draws its operator (device, segment, parameter)
uniformly from a set that does not depend on the state.

- ``redraw``: one operator gets a configuration drawn in proportion to its weight: log_ratio = 0.
- ``place``: one operator keeps its grid and gets another structured placement, drawn uniformly: symmetric.
- ``swap``: one operator exchanges two devices. The move is its own inverse, so log_ratio holds the weights alone.
- ``informed``: one operator. Its configuration S and m others, drawn from a distribution d that does not depend on S, form a set. One of
  them is chosen in proportion to w = exp(-focus * rough cost beside the neighbours). The way back, from S* to S, draws S in the place of S*
  and so forms the same set (Tjelmeland, *Using all Metropolis-Hastings proposals to estimate mean values*, 2004). Hence
  log_ratio = log weight(S*) / weight(S) + log d(S) w(S) / (d(S*) w(S*)). Choosing S itself costs no simulation.
- ``group``: all layers that equal the drawn operator, and are configured like it, get another structured configuration. It is chosen in the
  same way from uniform draws, by rough costs without neighbours (which are the same for the whole group). No effect if another layer of the
  group has the chosen configuration already: the way back would move that layer too.
- ``run`` (``compiled.runs``): the run of connected operators is drawn without regard to their configurations. Then the move is ``informed``
  for all of them together: d(S) is the product of the probabilities along the run, each given the operator that it was reached from; w(S)
  uses the rough cost of the whole run; log_ratio has the same form. d(S) > 0 everywhere in the space.
- ``segment``: a segment that is configured as one of its alternatives takes another one, drawn uniformly: symmetric but for the weights.
- ``sync``: one parameter gets another method of synchronization, drawn uniformly: symmetric.
- ``recompute``: a set of operators that are alike stays, is recomputed, or but for its products, or offloads:
  another of what it may be, symmetric.
- ``prefetch``: one group of values more, or less, is gathered ahead: symmetric.

A state outside of the space (weight 0) is never proposed. A move out of it counts as symmetric (log_ratio = 0).
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
from soap.search.compiled.memory import CANDIDATES, GROUP, INFORMED, PLACE, PREFETCHING, RECOMPUTE, REDRAW, RUN, SEGMENT, SYNC
from soap.search.compiled.runs import propose_run
from soap.search.compiled.space_arrays import NO_WEIGHT, SearchTables
from soap.search.compiled.suggestions import list_candidates
from soap.search.compiled.weighing import own_ns, rough_cost_ns
from soap.search.space import MOST_PREFETCHED
from soap.simulator.compiled.change import KEEP, OPERATORS, PARAMETERS, PREFETCH, Edit
from soap.simulator.compiled.jit import compiled
from soap.simulator.compiled.pass_order import own_devices
from soap.simulator.compiled.state import State
from soap.simulator.compiled.syncs.codes import GATHERED, first_with
from soap.simulator.compiled.world import World
from soap.strategy.recomputation import LEVELS, LIGHT, RECOMPUTED


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


@compiled
def propose_prefetch(W: World, Z: SearchTables, E: Edit) -> float:
    """Let one group of values more, or less, be gathered while an earlier one is used, as likely: symmetric. No effect where nothing is
    gathered, below 0 and above ``MOST_PREFETCHED``."""
    step = 2 * below(Z.chain, 2) - 1
    first, after = first_with(W.state, GATHERED), W.state.prefetch[0] + step
    if first < 0 or after < 0 or (step > 0 and after > MOST_PREFETCHED):
        return NO_EFFECT
    E.count[PREFETCH], E.parameter[0] = after, first
    return 0.0


LISTED_SHARE = 0.5
"""Share of an informed move's candidates that are drawn from the suggestions of neighbours and reference strategies."""


@compiled
def propose(W: World, Z: SearchTables, E: Edit, move: int, focus: float) -> float:
    """Draw a proposal into the edit. Returns its log_ratio, or ``NO_EFFECT``. ``focus``: how strongly rough costs weigh, per ns."""
    C = W.state
    Q, X = Z.grids, Z.chain
    E.count[OPERATORS] = E.count[PARAMETERS] = 0
    E.count[PREFETCH] = KEEP
    if move == RUN:
        return propose_run(W, Z, E, focus)
    if move == SEGMENT:
        return _segment(Z, E)
    if move == SYNC:
        return propose_sync(Z, C, E)
    if move == RECOMPUTE:
        return propose_recompute(W, Z, E)
    if move == PREFETCHING:
        return propose_prefetch(W, Z, E)
    op = Q.movable[below(X, len(Q.movable))]
    take_current(Z, op)
    if move == INFORMED:
        return _informed(W, Z, E, op, focus)
    if move == GROUP:
        return _group(Z, E, op, focus)
    if move == REDRAW:
        draw_any(Q, X, op, 1)
        return _single(Q, X, E, op, 0.0)
    if X.c_log[0] == NO_WEIGHT:
        return NO_EFFECT
    if move == PLACE:
        if not X.structured[op]:
            return NO_EFFECT
        put_place(Q, X, 1, X.grid[op], below(X, Q.place_count[Q.places[X.grid[op]]]))
        return _single(Q, X, E, op, 0.0)
    return _swap(Q, X, E, op)


@compiled
def _single(Q, X, E, op, log_ratio):  # type: ignore[no-untyped-def]
    """Propose candidate 1 for one operator."""
    if same(Q, X, 0, 1):
        return NO_EFFECT
    add(Q, X, E, op, X.c_grid[1], X.c_dev, len(X.order))
    return 0.0 if X.c_log[0] == NO_WEIGHT else log_ratio


@compiled
def _swap(Q, X, E, op):  # type: ignore[no-untyped-def]
    space, devices = Q.space[op], len(X.order)
    first, count = Q.device_ptr[space], Q.device_ptr[space + 1] - Q.device_ptr[space]
    if count < 2:
        return NO_EFFECT
    i = below(X, count)
    a, b = Q.device[first + i], Q.device[first + (i + 1 + below(X, count - 1)) % count]
    grid = X.c_grid[0]
    for tile in range(Q.tiles[grid]):
        device = X.c_dev[tile]
        X.c_dev[devices + tile] = b if device == a else a if device == b else device
    X.c_grid[1], X.c_log[1] = grid, log_weight(Q, X, op, grid, devices)
    if X.c_log[1] == NO_WEIGHT:
        return NO_EFFECT
    return _single(Q, X, E, op, X.c_log[1] - X.c_log[0])


@compiled
def _informed(W, Z, E, op, focus):  # type: ignore[no-untyped-def]
    Q, X = Z.grids, Z.chain
    inside = X.c_log[0] != NO_WEIGHT
    listed = list_candidates(Z, op)
    for slot in range(1, CANDIDATES + 1):
        draw_candidate(Q, X, op, listed, slot, LISTED_SHARE)
        X.c_weight[slot] = -focus * rough_cost_ns(W, Z, op, slot)
    if inside:
        X.c_weight[0] = -focus * rough_cost_ns(W, Z, op, 0)
    chosen = choose(X, inside)
    if inside and same(Q, X, 0, chosen):
        return NO_EFFECT
    add(Q, X, E, op, X.c_grid[chosen], X.c_dev, chosen * len(X.order))
    if not inside:
        return 0.0
    log_ratio = X.c_log[chosen] - X.c_log[0] + X.c_weight[0] - X.c_weight[chosen]
    return log_ratio + log_density(Q, X, op, listed, 0, LISTED_SHARE) - log_density(Q, X, op, listed, chosen, LISTED_SHARE)


@compiled
def _group(Z, E, op, focus):  # type: ignore[no-untyped-def]
    Q, M, X = Z.grids, Z.groups, Z.chain
    group = M.group[op]
    if group < 0 or X.c_log[0] == NO_WEIGHT or not X.structured[op]:
        return NO_EFFECT
    members = 0
    for i in range(M.member_ptr[group], M.member_ptr[group + 1]):
        members += _has(Z, M.member[i], 0)
    X.c_weight[0] = -focus * members * own_ns(Q, op, X.c_grid[0])
    for slot in range(1, CANDIDATES + 1):
        draw_structured(Q, X, op, slot)
        X.c_weight[slot] = -focus * members * own_ns(Q, op, X.c_grid[slot])
    chosen = choose(X, True)
    if same(Q, X, 0, chosen):
        return NO_EFFECT
    for i in range(M.member_ptr[group], M.member_ptr[group + 1]):
        if _has(Z, M.member[i], chosen):
            return NO_EFFECT
    for i in range(M.member_ptr[group], M.member_ptr[group + 1]):
        if _has(Z, M.member[i], 0):
            add(Q, X, E, M.member[i], X.c_grid[chosen], X.c_dev, chosen * len(X.order))
    return X.c_weight[0] - X.c_weight[chosen]


@compiled
def _has(Z, op, slot):  # type: ignore[no-untyped-def]
    """Whether an operator has the configuration of a candidate."""
    Q, X = Z.grids, Z.chain
    grid = X.c_grid[slot]
    equal = X.grid[op] == grid
    if equal:
        for tile in range(Q.tiles[grid]):
            equal &= X.held[op * len(X.order) + tile] == X.c_dev[slot * len(X.order) + tile]
    return equal


@compiled
def _segment(Z, E):  # type: ignore[no-untyped-def]
    Q, N, M, X = Z.grids, Z.neighbours, Z.groups, Z.chain
    if len(M.segment_ptr) < 2:
        return NO_EFFECT
    segment = below(X, len(M.segment_ptr) - 1)
    first, length = M.segment_ptr[segment], M.segment_ptr[segment + 1] - M.segment_ptr[segment]
    count = (M.choice_ptr[segment + 1] - M.choice_ptr[segment]) // length
    current = -1
    for number in range(count):
        if _is_alternative(Z, first, length, M.choice_ptr[segment] + number * length):
            current = number
    chosen = below(X, count)
    if current < 0 or chosen == current:
        return NO_EFFECT
    log_ratio = 0.0
    for i in range(length):
        op = M.segment[first + i]
        old, new = M.choice[M.choice_ptr[segment] + current * length + i], M.choice[M.choice_ptr[segment] + chosen * length + i]
        if old != new:
            add(Q, X, E, op, N.grid[new], N.dev, N.dev_ptr[new])
            log_ratio += N.log_weight[new] - N.log_weight[old]
    return log_ratio


@compiled
def _is_alternative(Z, first, length, choice):  # type: ignore[no-untyped-def]
    Q, N, M, X = Z.grids, Z.neighbours, Z.groups, Z.chain
    equal, i = True, 0
    while equal and i < length:
        op, reference = M.segment[first + i], M.choice[choice + i]
        equal = X.grid[op] == N.grid[reference]
        if equal:
            for tile in range(Q.tiles[N.grid[reference]]):
                equal &= X.held[op * len(X.order) + tile] == N.dev[N.dev_ptr[reference] + tile]
        i += 1
    return equal
