"""A Metropolis walk over given configurations, in one compiled loop: propose, simulate, accept or undo.

Proposals are uniform over (operator, configuration), so they are symmetric. The uniform number u that decides is drawn before the
simulation: with current cost c it turns min(1, exp(-beta * (new - c))) into the bound "new <= c - ln(u) / beta", at which the simulation
may stop early. The decision is the same either way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log as ln
from typing import NamedTuple

import numpy as np

from soap.simulator.compiled.arrays import copy
from soap.simulator.compiled.change import KEEP, OPERATORS, PARAMETERS, PREFETCH, Edit
from soap.simulator.compiled.draws import NO_DRAWING
from soap.simulator.compiled.evaluate import adopt, evaluate, take_back
from soap.simulator.compiled.events import NO_BOUND, STOPPED
from soap.simulator.compiled.graph_arrays import Ints, Longs
from soap.simulator.compiled.handles import handle
from soap.simulator.compiled.hashing import draw
from soap.simulator.compiled.jit import compiled
from soap.simulator.compiled.machine_code import Library
from soap.simulator.compiled.trial import HEAPED, SKIPPED, TAKEN, Trial
from soap.simulator.compiled.world import World
from soap.simulator.engine import Engine
from soap.strategy.config import OpConfig

STEP, RANDOM, SWAPPED, COST, ACCEPTED, BEST, PLAYED, QUEUED, WITHOUT_PLAY, UNCHANGED, LOG = range(11)
"""Places in ``Choices.walk``: steps done; the generator's state; whether the two trials have changed places; current cost; accepted
proposals; best cost; tasks played; tasks that went through a heap; proposals refused before anything was played; proposals of the current
configuration; how many steps are logged (cost after each, in ``Choices.log``)."""


WALK = Library("benchmarks.metropolis_walk")


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


@WALK.entry
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
        threshold = walk[COST] - ln((after + 1) / 9007199254740992.0) / beta
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


class Walk:
    """The outcome of a walk. ``proposals``: steps that proposed another configuration than the current one. ``played_tasks``: tasks that
    were simulated for them."""

    def __init__(self, choices: Choices) -> None:
        walk = choices.walk
        self.steps, self.accepted, self.unchanged = int(walk[STEP]), int(walk[ACCEPTED]), int(walk[UNCHANGED])
        self.proposals = self.steps - self.unchanged
        self.cost_ns, self.best_ns = int(walk[COST]), int(walk[BEST])
        self.played_tasks, self.queued_tasks, self.refused_at_once = int(walk[PLAYED]), int(walk[QUEUED]), int(walk[WITHOUT_PLAY])
        self.costs_ns = choices.log[: min(self.steps, int(walk[LOG]))].copy()


def walk(
    engine: Engine,
    choices: Mapping[str, Sequence[OpConfig]],
    steps: int,
    beta_per_ns: float,
    seed: int = 0,
    *,
    bounded: bool = True,
    log: int = 0,
) -> Walk:
    """A Metropolis walk from the strategy that an engine holds, simulated. The engine then holds the strategy where the walk ends.

    ``choices``: operator -> the configurations that it may take, without replicas. ``bounded``: stop a simulation as soon as its outcome
    cannot be accepted; the walk is the same. ``log``: for how many steps to record the cost. ValueError for an engine whose costs are
    uncertain: its cost is not a makespan, which is what steps are compared by.
    """
    if engine.drawing is not NO_DRAWING:
        raise ValueError("an engine with draws of the costs; expected one without: a walk compares makespans")
    found = _choices(engine, choices, log)
    found.walk[RANDOM], found.walk[COST], found.walk[BEST] = seed, engine.makespan_ns, engine.makespan_ns
    walking = handle(found)
    engine.make_edit_room(int(np.diff(found.dev_ptr).max(initial=0)))

    def go_on() -> None:
        walk_on(*engine.handles(), walking, steps, beta_per_ns, bounded)

    def settle() -> None:
        engine.settle(swapped=bool(found.walk[SWAPPED]), makespan_ns=int(found.walk[COST]))
        found.walk[SWAPPED] = 0

    engine.attempt(go_on, settle)
    settle()
    return Walk(found)


def _choices(engine: Engine, choices: Mapping[str, Sequence[OpConfig]], log: int) -> Choices:
    """The choices of a walk as arrays. ValueError if a configuration has replicas."""
    graph = engine.graph
    counters = np.zeros(16, np.int64)
    counters[LOG] = log
    ptr, numbers, dev_ptr, dev = [0], list[int](), [0], list[int]()
    for position, op in enumerate(graph.operators):
        for config in choices.get(op.name, ()):
            if config.replicas != 1:
                raise ValueError(f"operator {op.name!r}: {config.replicas} replicas; expected 1: a walk takes no replicas")
            numbers.append(engine.variant(position, config.degrees, config.shares))
            dev += config.devices
            dev_ptr.append(len(dev))
        ptr.append(len(numbers))
    movable = [position for position in range(len(graph.operators)) if ptr[position + 1] > ptr[position]]
    ints = lambda values: np.array(values, np.int32)  # noqa: E731
    return Choices(
        walk=counters,
        log=np.zeros(max(1, log), np.int64),
        operator=ints(movable),
        ptr=ints(ptr),
        variant=ints(numbers),
        dev_ptr=ints(dev_ptr),
        dev=ints(dev),
    )
