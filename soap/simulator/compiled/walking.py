"""The Python side of a walk: its choices and its outcome."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from soap.model.graph import OperatorGraph
from soap.simulator.compiled.variants import Variants
from soap.simulator.compiled.walk import ACCEPTED, BEST, COST, LOG, PLAYED, QUEUED, STEP, UNCHANGED, WITHOUT_PLAY, Choices
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


def make_choices(graph: OperatorGraph, variants: Variants, choices: Mapping[str, Sequence[OpConfig]], log: int) -> Choices:
    """The choices of a walk as arrays. ValueError if a configuration has replicas."""
    walk = np.zeros(16, np.int64)
    walk[LOG] = log
    ptr, numbers, dev_ptr, dev = [0], list[int](), [0], list[int]()
    for position, op in enumerate(graph.operators):
        for config in choices.get(op.name, ()):
            if config.replicas != 1:
                raise ValueError(f"operator {op.name!r}: {config.replicas} replicas; expected 1: a walk takes no replicas")
            numbers.append(variants.number(position, config.degrees))
            dev += config.devices
            dev_ptr.append(len(dev))
        ptr.append(len(numbers))
    movable = [position for position in range(len(graph.operators)) if ptr[position + 1] > ptr[position]]
    ints = lambda values: np.array(values, np.int32)  # noqa: E731
    return Choices(
        walk=walk,
        log=np.zeros(max(1, log), np.int64),
        operator=ints(movable),
        ptr=ints(ptr),
        variant=ints(numbers),
        dev_ptr=ints(dev_ptr),
        dev=ints(dev),
    )
