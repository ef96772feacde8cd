"""Delta simulation: the time of a strategy that differs from the current one in some operators or parameters (compiled).

It saves work against a full simulation in three ways: it keeps unchanged blocks (``change``), it does not play again what comes before the
first difference (``history``), and it follows the earlier order without a heap where possible (``events``). With a bound, it stops as soon
as the proposal is certain to exceed the bound: before lowering, if a device has too much work, or while it plays.
"""

from __future__ import annotations

from soap.simulator.compiled.arrays import fill
from soap.simulator.compiled.change import (
    OLD_SLOTS,
    OPERATORS,
    PARAMETERS,
    REPLACED_OPERATORS,
    UNDER_WAY,
    Edit,
    change,
    change_sums,
    find_replaced,
    needs_sums,
    undo,
)
from soap.simulator.compiled.events import (
    NO_BOUND,
    PAUSED,
    STOPPED,
    any_sum_is_ready,
    begin,
    is_late,
    keep_order,
    make_sums_ready,
    play,
)
from soap.simulator.compiled.history import complete, first_difference, first_tile, resume, retrace, take_snapshots
from soap.simulator.compiled.jit import compiled
from soap.simulator.compiled.machine_code import entry
from soap.simulator.compiled.matching import forget_matches, match_slots, match_sums
from soap.simulator.compiled.pass_order import first_reordered
from soap.simulator.compiled.rows import is_sparse_lookup
from soap.simulator.compiled.scratch import EXPECTED
from soap.simulator.compiled.synchronization import backward_ns, expect_updates, is_certain
from soap.simulator.compiled.tile_times import PASSES, WEIGHTS
from soap.simulator.compiled.trial import TAKEN, Trial
from soap.simulator.compiled.variants import CELLS, COSTS, PARTS, ROW_COSTS
from soap.simulator.compiled.world import World


@entry
def evaluate(W: World, P: Trial, T: Trial, E: Edit, at_most: int) -> int:
    """Make a change and simulate it; the makespan in ns, or STOPPED if it would exceed ``at_most``.

    ``P``: the complete simulation of the strategy before the change, with its snapshots in ``history``. ``T``: room for the new simulation.
    The change stays until ``confirm`` keeps it or ``take_back`` undoes it.
    """
    G, R, C, H = W.graph, W.groups, W.state, W.history
    find_replaced(G, C, E)
    _expect_updates(W, E, at_most)
    if at_most < NO_BOUND and overworked(W, E, at_most):
        return STOPPED
    take_snapshots(G, C, R, P, H, first_tile(C, P, E) if E.count[REPLACED_OPERATORS] > 0 else H.first_sum[0])
    change(W, E)
    return _simulate(W, P, T, at_most)


@compiled
def _expect_updates(W, E, at_most):  # type: ignore[no-untyped-def]
    """Fill ``floor``: by device, ns of updates without the parameters of the changed operators, a lower bound of its new updates. 0 if
    there is no bound, or the edit changes synchronizations."""
    C, S = W.state, W.scratch
    fill(S.floor, 0, len(S.floor), 0)
    if at_most == NO_BOUND or E.count[PARAMETERS] > 0:
        return
    for device in range(len(C.busy)):
        S.floor[device] = C.duration[device]
    S.count[EXPECTED] += 1
    for i in range(E.count[OPERATORS]):
        expect_updates(W, E.operator[i])


@compiled
def _simulate(W, P, T, at_most):  # type: ignore[no-untyped-def]
    """Simulate the changed strategy."""
    G, R, C, S, U, H = W.graph, W.groups, W.state, W.scratch, W.undo, W.history
    match_slots(W, P)
    sums = needs_sums(W)
    latest = first_reordered(W, P, U.what[OLD_SLOTS], first_difference(G, C, U, P))
    latest = min(latest, H.first_sum[0] if sums else H.first_update[0])
    if not resume(C, U, P, T, H, latest, not sums):
        begin(G, C, P, T, P.size[TAKEN], not sums)
    if sums:
        for device in range(len(C.busy)):
            T.rest[device] += S.floor[device]
    if is_late(T, at_most):
        return STOPPED
    makespan = play(G, C, R, P, T, at_most, len(T.order), sums)
    if makespan != PAUSED and not (sums and makespan != STOPPED):
        return makespan
    change_sums(W)
    match_sums(W, P)
    if any_sum_is_ready(C):
        begin(G, C, P, T, P.size[TAKEN], True)  # such sums are played first, so begin again
    else:
        make_sums_ready(C, P, T)
        for device in range(len(C.busy)):
            T.rest[device] += C.duration[device] - S.floor[device]
    if is_late(T, at_most):
        return STOPPED
    return play(G, C, R, P, T, at_most, len(T.order), False)


@compiled
def overworked(W: World, E: Edit, at_most: int) -> bool:
    """Whether some device's tiles and update (at least ``floor``) alone would certainly take longer than ``at_most``."""
    G, V, C, S = W.graph, W.variants, W.state, W.scratch
    for device in range(len(C.busy)):
        S.update[device] = C.busy[device] - C.doubtful[device] + S.floor[device]
    for i in range(E.count[REPLACED_OPERATORS]):
        op = E.operator[i]
        count, sure = C.tiles[op], is_certain(G, C, op)
        for tile in range(count):
            device, slot = C.dev[C.dev_ptr[op] + tile], C.tile_slot[op] + tile
            S.update[device] -= C.duration[slot]
            if C.alive[slot + count] and sure:
                S.update[device] -= backward_ns(C, op, tile)
        if i < E.count[OPERATORS]:
            _add_tiles(W, E, op, E.variant[i], E.replicas[i], E.dev, E.dev_ptr[i], V.rows[E.variant[i], PARTS])
        else:
            _add_tiles(W, E, op, C.variant[op], C.replicas[op], C.dev, C.dev_ptr[op], 1)
    worst = 0
    for device in range(len(C.busy)):
        worst = max(worst, S.update[device])
    return worst > at_most


@compiled
def _add_tiles(W, E, op, variant, replicas, devices, first, parts):  # type: ignore[no-untyped-def]
    """Add to ``update`` the least time that an operator's tiles take on the devices from ``devices[first]`` on, without second runs.
    ``parts``: that many times each of a replica's. If the edit changes synchronizations, the tiles may or may not be sparse lookups, so the
    cheaper one counts."""
    G, V, K, C, S = W.graph, W.variants, W.cluster, W.state, W.scratch
    row = V.rows[variant]
    cells, costs, others = row[CELLS], row[COSTS], row[ROW_COSTS]
    if E.count[PARAMETERS] == 0:
        costs = others if is_sparse_lookup(G, C, op) else costs
        others = costs
    certain = replicas == 1 and G.solid[op]  # every tile has a backward pass
    own = cells // parts
    for tile in range(cells * replicas):
        device = devices[first + tile // cells * own + tile % own]
        forward = PASSES * K.device_type[device] * cells + tile % cells
        S.update[device] += min(V.costs[costs + forward], V.costs[others + forward])
        if certain:
            S.update[device] += min(V.costs[costs + forward + cells], V.costs[others + forward + cells])
            weights = forward + WEIGHTS * cells  # nothing, if the backward pass is not in two
            S.update[device] += min(V.costs[costs + weights], V.costs[others + weights])


@entry
def take_back(W: World) -> None:
    """Undo what ``evaluate`` has changed, if anything."""
    C, U = W.state, W.undo
    if U.what[UNDER_WAY]:
        forget_matches(C, U)
        undo(W)


@entry
def confirm(W: World, P: Trial, T: Trial) -> None:
    """Keep what ``evaluate`` has changed. Its simulation ``T`` replaces ``P``; call ``keep_order`` and ``retrace`` next."""
    C, U = W.state, W.undo
    forget_matches(C, U)
    U.what[UNDER_WAY] = 0
    complete(P, T)


@compiled
def adopt(W: World, P: Trial, T: Trial) -> None:
    """``confirm``, and make ``T`` the simulation that the next delta simulation starts from."""
    confirm(W, P, T)
    keep_order(T)
    retrace(W.graph, W.state, T, W.history)
