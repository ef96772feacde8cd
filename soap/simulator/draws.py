"""Draws: predictions under several sets of costs that may be true, beside the one set that is most likely.

A cost is known up to *errors*. An error is one unknown factor; whatever names it errs alike in a draw. That a device's rate is wrong is one
error of all its tiles; how far one shape of one operator is off is an error of its own. In draw k an error with the spread s and the mean
m is the factor exp(m + s * z), and the factor of a cost is the product of those of its errors.

The z of an error are a stratified sample of the standard normal distribution: of each of ``count`` equally likely intervals the middle one
by probability, in an order that follows from the error's name and the seed alone, scaled to variance 1. So every error has the same factors
over all draws, only in another order, and a search cannot find a plan whose costs were drawn low in all of them. (McKay, Beckman & Conover,
"A comparison of three methods for selecting values of input variables", 1979: Latin hypercube sampling.)

Equal names have equal factors whatever the strategy, so strategies are compared under equal costs (common random numbers).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum
from functools import lru_cache
from statistics import NormalDist
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from soap.cluster.topology import DeviceType, Topology
from soap.model.graph import OperatorGraph
from soap.plan.syncs.seam import SELECT
from soap.plan.tiling import Tile
from soap.simulator.task_list import UPDATE
from soap.simulator.tasks import GRADIENTS, Task, TaskGraph, TaskKind, Times, times_of

Floats = NDArray[np.float64]
Longs = NDArray[np.int64]



class Error(NamedTuple):
    """An unknown factor of costs. ``name``: equal names are one error. ``spread``, ``mean``: standard deviation and mean of the factor's
    logarithm; the mean is 0 of what errs to both sides alike."""

    name: tuple[str, ...]
    spread: float
    mean: float = 0.0


class Communicated(NamedTuple):
    """What decides about the errors of a communication. ``between_hosts``: whether it holds a link that leads from one host to others.
    ``collective``: whether it is a sum, an exchange or a broadcast, and no message."""

    between_hosts: bool
    collective: bool


COMMUNICATED = tuple(Communicated(far, collective) for far in (False, True) for collective in (False, True))
"""All there are; ``Communicated(a, b)`` is number 2a + b."""


class Spreads(Protocol):
    """Which errors costs have."""

    def of_tile(self, graph: OperatorGraph, tile: Tile, device: DeviceType, *, backward: bool) -> tuple[Error, ...]:
        """Of the time of one pass over a tile."""

    def of_launch(self, device: DeviceType) -> tuple[Error, ...]:
        """Of the time to launch a tile on such a device."""

    def of_update(self, device: DeviceType) -> tuple[Error, ...]:
        """Of the time of a device's update."""

    def of_server(self) -> tuple[Error, ...]:
        """Of the time of a parameter server's work."""

    def of_compression(self, device: DeviceType, *, selects: bool) -> tuple[Error, ...]:
        """Of the time that a device takes to select what it sends of a gradient, or to make a sum of what came."""

    def of_communication(self, kind: Communicated) -> tuple[Error, ...]:
        """Of the time that a communication takes, its latency included."""

    def of_overhead(self) -> tuple[Error, ...]:
        """Of the time for which a communication keeps devices busy."""

    @property
    def hash(self) -> str:
        """16 hex digits that change whenever an answer could change."""


class Risk(StrEnum):
    """How the times of a strategy under all draws become one cost. MEAN: their mean. TAIL: halfway between their mean and the mean of the
    worst quarter. Q80: the time that at most a fifth of the draws exceeds. WORST: the longest.

    The more a cost looks at few draws, the more a search finds plans that are lucky in just these (docs/results/draws.md)."""

    MEAN = "mean"
    TAIL = "tail"
    Q80 = "q80"
    WORST = "worst"


class Draws:
    """``count`` draws of all costs, and how times under them become one cost. Equal arguments give equal draws."""

    def __init__(self, spreads: Spreads, count: int, seed: int | str = 0, risk: Risk = Risk.MEAN) -> None:
        self.spreads, self.count, self.seed, self.risk = spreads, count, seed, risk
        self._scores: dict[tuple[str, ...], Floats] = {}

    def factors(self, errors: Sequence[Error]) -> Floats:
        """[draw]: by how much a cost with these errors is longer than predicted."""
        exponent = np.zeros(self.count)
        for error in errors:
            exponent += error.mean + error.spread * self._score(error.name)
        factors: Floats = np.exp(exponent)
        return factors

    def _score(self, name: tuple[str, ...]) -> Floats:
        found = self._scores.get(name)
        if found is None:
            order = list(range(self.count))
            random.Random(f"{self.seed} {name}").shuffle(order)
            found = self._scores[name] = _strata(self.count)[order]
        return found


@lru_cache
def _strata(count: int) -> Floats:
    """The values of one error over so many draws, ascending; mean 0 and variance 1 (variance 0 for a single draw)."""
    middle = np.array([NormalDist().inv_cdf((k + 0.5) / count) for k in range(count)])
    middle = (middle - middle[::-1]) / 2  # symmetric to the last bit
    scale = float(np.sqrt(np.mean(middle**2)))
    scaled: Floats = middle / scale if scale > 0 else middle
    return scaled


def drawn_ns(ns: int, factor: float) -> int:
    """A duration with a factor, in whole nanoseconds: at least 1, unless it is 0."""
    return max(1, int(ns * factor)) if ns > 0 else 0


def drawn(ns: Longs, factors: Floats | float) -> Longs:
    """``drawn_ns`` of many."""
    longer: Longs = np.where(ns > 0, np.maximum(1, (ns * factors).astype(np.int64)), 0)
    return longer


def links_between_hosts(topology: Topology) -> NDArray[np.bool_]:
    """[link]: whether no route between two devices of one host crosses it."""
    found = np.ones(len(topology.links), bool)
    by_host: dict[int, list[int]] = {}
    for device in topology.devices:
        by_host.setdefault(device.host, []).append(device.index)
    pairs = [(a, b) for own in by_host.values() for a in own for b in own if a != b]
    if pairs:
        routes = topology.routes([a for a, _ in pairs], [b for _, b in pairs])
        found[routes[routes >= 0]] = False
    return found


class DrawnTasks:
    """The timed tasks of a plan under each draw. The compiled counterpart, of what engines lower, is ``compiled.draws``."""

    def __init__(self, tasks: TaskGraph, draws: Draws, between_hosts: NDArray[np.bool_]) -> None:
        """``between_hosts``: ``links_between_hosts`` of the cluster; of a folded plan, of what its links stand for (``Folding``)."""
        self._tasks, self._times = tasks, times_of(tasks)
        self._between = between_hosts
        self._spreads = draws.spreads
        self._durations = np.array([draws.factors(self._errors(task)) for task in tasks.tasks]).reshape(-1, draws.count)
        self._overhead = draws.factors(draws.spreads.of_overhead())
        launches = {kind: draws.factors(draws.spreads.of_launch(kind)) for kind in {d.type for d in tasks.topology.devices}}
        self._launches = np.array([launches[device.type] for device in tasks.topology.devices])
        self._launched_by = np.array([task.resources[0] if task.launch_ns else 0 for task in tasks.tasks], np.int64)

    def times(self, draw: int) -> Times:
        """The tasks' times under one draw."""
        own, factors = self._times, self._durations[:, draw]
        duration, latency = drawn(own.duration, factors), drawn(own.latency, factors)
        launch = drawn(own.launch, self._launches[self._launched_by, draw])
        return Times(duration, launch, np.minimum(np.maximum(0, duration - 1), latency), drawn(own.overhead, self._overhead[draw]))

    def under(self, draw: int) -> TaskGraph:
        """The tasks as they are under one draw."""
        rows = zip(self._tasks.tasks, *(column.tolist() for column in self.times(draw)), strict=True)
        return replace(
            self._tasks,
            tasks=tuple(
                replace(task, duration_ns=duration, launch_ns=launch, latency_ns=latency, cpu_overhead_ns=overhead)
                for task, duration, launch, latency, overhead in rows
            ),
        )

    def _errors(self, task: Task) -> tuple[Error, ...]:
        topology, plan = self._tasks.topology, self._tasks.plan
        if task.tile is not None:
            tile, device = plan.as_run(plan.tiles[task.tile]), topology.devices[task.resources[0]].type
            return self._spreads.of_tile(plan.graph, tile, device, backward=task.kind in GRADIENTS)
        if task.kind is TaskKind.UPDATE and task.id[0] == UPDATE and task.id[2] == 0:
            return self._spreads.of_update(topology.devices[task.resources[0]].type)
        if task.kind is TaskKind.COMPRESS and task.resources:
            return self._spreads.of_compression(topology.devices[task.resources[0]].type, selects=task.id[2] == SELECT)
        links = [resource - topology.device_count for resource in task.resources]
        held = [link for link in links if 0 <= link < len(self._between)]
        if not held:
            return self._spreads.of_server()
        return self._spreads.of_communication(Communicated(any(self._between[link] for link in held), task.latency_ns == 0))
