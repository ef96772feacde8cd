"""A Metropolis walk over given configurations, in one compiled loop: propose, simulate, accept or undo.

Proposals are uniform over (operator, configuration), so they are symmetric. The uniform number u that decides is drawn before the
simulation: with current cost c it turns min(1, exp(-beta * (new - c))) into the bound "new <= c - ln(u) / beta", at which the simulation
may stop early. The decision is the same either way.
"""

from __future__ import annotations

from math import log
from typing import NamedTuple

from soap.simulator.compiled.arrays import copy
from soap.simulator.compiled.change import KEEP, OPERATORS, PARAMETERS, PREFETCH, Edit
from soap.simulator.compiled.evaluate import adopt, evaluate, take_back
from soap.simulator.compiled.events import NO_BOUND, STOPPED
from soap.simulator.compiled.graph_arrays import Ints, Longs
from soap.simulator.compiled.hashing import draw
from soap.simulator.compiled.jit import compiled, entry
from soap.simulator.compiled.trial import HEAPED, SKIPPED, TAKEN, Trial
from soap.simulator.compiled.world import World

STEP, RANDOM, SWAPPED, COST, ACCEPTED, BEST, PLAYED, QUEUED, WITHOUT_PLAY, UNCHANGED, LOG = range(11)
"""Places in ``Choices.walk``: steps done; the generator's state; whether the two trials have changed places; current cost; accepted
proposals; best cost; tasks played; tasks that went through a heap; proposals refused before anything was played; proposals of the current
configuration; how many steps are logged (cost after each, in ``Choices.log``)."""


class Choices(NamedTuple):
    """The operators that may change (``operator``), and their configurations (from ``ptr`` on: ``variant``, ``dev_ptr`` and ``dev``; one
    replica). ``walk``: counters; ``log``: costs."""

    walk: Longs
    log: Longs
    operator: Ints
    ptr: Ints
    variant: Ints
    dev_ptr: Ints
    dev: Ints


@entry
def walk_on(W: World, A: Trial, B: Trial, E: Edit, choices: Choices, steps: int, beta: float, bounded: bool) -> None:
    """Continue until ``steps`` steps are done. If a table or room is missing, it raises; ``take_back`` then restores the state before the
    step."""
    C = W.state
    walk = choices.walk
    while walk[STEP] < steps:
        before = walk[RANDOM]
        op = choices.operator[draw(walk, RANDOM) % len(choices.operator)]
        choice = choices.ptr[op] + draw(walk, RANDOM) % (choices.ptr[op + 1] - choices.ptr[op])
        after = draw(walk, RANDOM) >> 10
        threshold = walk[COST] - log((after + 1) / 9007199254740992.0) / beta
        drawn = walk[RANDOM]
        walk[RANDOM] = before
        bound = int(threshold) if threshold < NO_BOUND else NO_BOUND
        devices = choices.dev[choices.dev_ptr[choice] : choices.dev_ptr[choice + 1]]
        P, T = (B, A) if walk[SWAPPED] else (A, B)
        if _is_current(C, op, choices.variant[choice], devices):
            walk[UNCHANGED] += 1
        else:
            T.size[TAKEN] = T.size[SKIPPED] = T.size[HEAPED] = 0
            _set(E, op, choices.variant[choice], devices)
            cost = evaluate(W, P, T, E, bound if bounded else NO_BOUND)
            walk[PLAYED] += T.size[TAKEN] - T.size[SKIPPED]
            walk[QUEUED] += T.size[HEAPED]
            walk[WITHOUT_PLAY] += T.size[TAKEN] == 0
            if cost != STOPPED and cost <= bound:
                adopt(W, P, T)
                walk[SWAPPED] = 1 - walk[SWAPPED]
                walk[COST] = cost
                walk[ACCEPTED] += 1
                walk[BEST] = min(walk[BEST], cost)
            else:
                take_back(W)
        walk[RANDOM] = drawn
        if walk[STEP] < walk[LOG]:
            choices.log[walk[STEP]] = walk[COST]
        walk[STEP] += 1


@compiled
def _set(E, op, variant, devices):  # type: ignore[no-untyped-def]
    """Make ``E`` an edit of one operator."""
    E.count[OPERATORS], E.count[PARAMETERS], E.count[PREFETCH] = 1, 0, KEEP
    E.operator[0], E.variant[0], E.replicas[0], E.dev_ptr[1], E.marked[0] = op, variant, 1, len(devices), KEEP
    copy(E.dev, 0, devices, 0, len(devices))


@compiled
def _is_current(C, op, variant, devices):  # type: ignore[no-untyped-def]
    if C.variant[op] != variant or C.replicas[op] != 1:
        return False
    same = True
    for tile in range(len(devices)):
        same &= C.dev[C.dev_ptr[op] + tile] == devices[tile]
    return same
