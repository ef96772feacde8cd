"""The Python side of a walk: its start, its choices and its outcome."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from soap.simulator.compiled.draws import NO_DRAWING
from soap.simulator.compiled.handles import handle
from soap.simulator.compiled.walk import (
    ACCEPTED,
    BEST,
    COST,
    LOG,
    PLAYED,
    QUEUED,
    RANDOM,
    STEP,
    SWAPPED,
    UNCHANGED,
    WITHOUT_PLAY,
    Choices,
    walk_on,
)
from soap.simulator.engine import Engine
from soap.strategy.config import OpConfig


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
