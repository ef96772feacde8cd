"""The space that is searched: which configurations each operator may take, and with what weight they are drawn.

A configuration is a *grid* (degrees and replicas) and a *placement* (devices). Per operator the space holds

- the structured configurations: every grid with every structured placement (``placements``), each of weight 1, and
- the shuffled ones: the same grids on any other distinct devices in any order. All shuffled placements of a grid share
  the weight ``SHUFFLED`` x (its number of structured ones), so that the factorially many of them do not drown the rest.

This weight is the reference measure of the Metropolis-Hastings chain (see ``soap.search.metropolis``); among structured
configurations it is uniform. A start may lie outside of the space (a device used twice, more tiles than devices); the first
accepted move leaves it for good.

If the user allows an operator only some grids or devices (``soap.search.constraints``), its space has no others. Structured placements are
then the placements above that lie on allowed devices, and the structured placements of the allowed devices, numbered from 0. Shuffled ones
use allowed devices only.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import accumulate, permutations, product
from math import fsum, inf, log, perm, prod
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from soap.model.batch import MicroBatches
from soap.model.graph import Operator, OperatorGraph
from soap.model.likeness import repeated_groups
from soap.plan.scheduling import Orders
from soap.search.alignment import Edge, edges_of
from soap.strategy.config import OpConfig, Strategy, SyncConfig, settled_config
from soap.strategy.marks import FEATURES
from soap.strategy.recomputation import STAYS

if TYPE_CHECKING:
    from soap.search.constraints import Allowed

SHUFFLED = 0.05
"""Weight of all shuffled placements of a grid relative to its structured ones."""
MAX_GRIDS = 2048
"""Grids kept per operator; the order of preference is ``_preference``."""
MAX_SPLIT_AXES = 4
"""At most so many axes (factors and replicas) are split at the same time in one grid."""
MOST_PREFETCHED = 4
"""The largest ``Strategy.prefetch`` that is proposed: links bring one group after the other, so more of them ahead only take memory."""

Grid = tuple[int, ...]
"""(replicas, degree of factor 0, degree of factor 1, …): the shape of ``OpConfig.devices``."""
Devices = tuple[int, ...]


@lru_cache(maxsize=4096)
def _placements(lengths: tuple[int, ...], device_count: int) -> tuple[Devices, ...]:
    """Structured placements of a grid whose axes longer than 1 have these lengths."""
    tiles = prod(lengths)
    stride = device_count // tiles
    orders = list(permutations(range(len(lengths))))
    if len(lengths) > 3:
        orders = [orders[0], orders[-1]]
    found: dict[Devices, None] = {}
    for order in orders:
        ranks = _ranks(lengths, order)
        for first in range(0, stride * tiles, tiles):
            found[tuple(first + rank for rank in ranks)] = None
        for first in range(stride):
            found[tuple(first + stride * rank for rank in ranks)] = None
    return tuple(found)


def _ranks(lengths: tuple[int, ...], order: tuple[int, ...]) -> list[int]:
    """For each tile, row-major, its number if the axes are counted in ``order`` (slowest first)."""
    weights = [0] * len(lengths)
    step = 1
    for axis in reversed(order):
        weights[axis] = step
        step *= lengths[axis]
    return [sum(w * c for w, c in zip(weights, cell, strict=True)) for cell in product(*(range(n) for n in lengths))]


def placements(grid: Grid, device_count: int) -> tuple[Devices, ...]:
    """Structured placements of a grid: aligned blocks and even strides of devices, with the split axes in every order.

    A single tile may be on any device. With more than three split axes only the first and the last order are taken.
    """
    return _placements(tuple(n for n in grid if n > 1), device_count)


@lru_cache(maxsize=4096)
def _placement_set(lengths: tuple[int, ...], device_count: int) -> frozenset[Devices]:
    return frozenset(_placements(lengths, device_count))


def is_structured(grid: Grid, devices: Devices, device_count: int) -> bool:
    """Whether the devices are one of the grid's structured placements."""
    return devices in _placement_set(tuple(n for n in grid if n > 1), device_count)


def degree_choices(size: int, device_count: int, *, every: bool = False) -> list[int]:
    """Degrees to try for a factor: divisors of the device count, powers of two, the factor's size; or every number."""
    limit = min(size, device_count)
    if every:
        return list(range(1, limit + 1))
    return [d for d in range(1, limit + 1) if device_count % d == 0 or d & (d - 1) == 0 or d == size]


def grids_of(
    op: Operator, device_count: int, *, every: bool = False, whole: Collection[int] = (), sizes: Sequence[int] | None = None
) -> tuple[Grid, ...]:
    """Grids of an operator with at most ``device_count`` tiles, best guesses first, at most ``MAX_GRIDS``. Axes in ``whole`` are not
    split. ``sizes``: of its factors, in the smallest micro-batch."""
    choices = [degree_choices(device_count, device_count, every=every)]
    sizes = [f.size for f in op.factors] if sizes is None else sizes
    choices += [degree_choices(size, device_count, every=every) if op.partitionable else [1] for size in sizes]
    choices = [[1] if axis in whole else options for axis, options in enumerate(choices)]
    partial: list[tuple[Grid, int, int]] = [((), 1, 0)]
    for options in choices:
        partial = [
            ((*grid, d), tiles * d, axes + (d > 1))
            for grid, tiles, axes in partial
            for d in options
            if tiles * d <= device_count and axes + (d > 1) <= MAX_SPLIT_AXES
        ]
    return tuple(sorted((grid for grid, _, _ in partial), key=lambda g: _preference(g, device_count)))[:MAX_GRIDS]


def _preference(grid: Grid, device_count: int) -> tuple[bool, int, int, Grid]:
    """Sort key: grids that use devices evenly first, then those with few split axes and many tiles."""
    tiles = prod(grid)
    return (device_count % tiles != 0, sum(n > 1 for n in grid), -tiles, grid)


def grid_of(config: OpConfig) -> Grid:
    """The grid of a configuration."""
    return (config.replicas, *config.degrees)


def make_config(grid: Grid, devices: Devices) -> OpConfig:
    """The configuration of a grid on these devices."""
    return OpConfig(grid[1:], devices, grid[0])


class OperatorSpace:
    """The configurations of one operator, with their weights. Immutable; shared by operators with equal factors."""

    def __init__(
        self, grids: Sequence[Grid], device_count: int, *, shuffled: float = SHUFFLED, devices: Sequence[int] | None = None
    ) -> None:
        self.grids = tuple(grids)
        self.device_count = device_count
        self.devices = tuple(range(device_count)) if devices is None else tuple(devices)
        self._own = frozenset(self.devices)
        self._restricted: dict[Grid, tuple[Devices, ...]] = {}
        if len(self.devices) < device_count:
            self._restricted = {grid: self._placements_on_own(grid) for grid in self.grids}
            self.grids = tuple(grid for grid in self.grids if self._restricted[grid])
        counts = {grid: len(self.placements(grid)) for grid in self.grids}
        self._mass = {g: shuffled * n for g, n in counts.items() if shuffled > 0 and perm(len(self.devices), prod(g)) > n}
        self._cumulative = list(accumulate(counts.values()))
        self.structured_count: int = self._cumulative[-1]
        self.mass = self.structured_count + fsum(self._mass.values())
        """Weight of all configurations."""
        self._known = frozenset(self.grids)

    def _placements_on_own(self, grid: Grid) -> tuple[Devices, ...]:
        """The structured placements on some of the devices only."""
        tiles = prod(grid)
        found = dict.fromkeys(devices for devices in placements(grid, self.device_count) if self._own.issuperset(devices))
        if tiles <= len(self.devices):
            found |= dict.fromkeys(tuple(self.devices[i] for i in numbers) for numbers in placements(grid, len(self.devices)))
        return tuple(found)

    def placements(self, grid: Grid) -> tuple[Devices, ...]:
        """Structured placements of a grid on the devices that the operator may use."""
        if len(self.devices) == self.device_count:
            return placements(grid, self.device_count)
        return self._restricted.get(grid, ())

    def is_structured(self, grid: Grid, devices: Devices) -> bool:
        """Whether the devices are one of ``placements(grid)``."""
        if len(self.devices) == self.device_count:
            return is_structured(grid, devices, self.device_count)
        return devices in self._restricted.get(grid, ())

    def structured(self) -> Iterator[OpConfig]:
        """All structured configurations, in a fixed order."""
        for grid in self.grids:
            for devices in self.placements(grid):
                yield make_config(grid, devices)

    @cached_property
    def numbers(self) -> Mapping[Grid, int]:
        """Grid -> its place in ``grids``."""
        return {grid: number for number, grid in enumerate(self.grids)}

    def log_weight(self, config: OpConfig) -> float:
        """Logarithm of the reference measure: 0 for a structured configuration, -inf outside of the space."""
        grid, devices = grid_of(config), config.devices
        if grid not in self._known:
            return -inf
        if self.is_structured(grid, devices):
            return 0.0
        distinct = len(set(devices)) == len(devices) and self._own.issuperset(devices)
        if not distinct or grid not in self._mass:
            return -inf
        others = perm(len(self.devices), len(devices)) - len(self.placements(grid))
        return log(self._mass[grid]) - log(others)

    def shuffled_mass(self, grid: Grid) -> float:
        """Weight of all shuffled placements of a grid."""
        return self._mass.get(grid, 0.0)

    def draw_structured(self, rng: random.Random) -> OpConfig:
        """One of ``structured()``, uniformly."""
        x = rng.randrange(self.structured_count)
        position = bisect_right(self._cumulative, x)
        grid = self.grids[position]
        return make_config(grid, self.placements(grid)[x - self._cumulative[position]])


class Marked(NamedTuple):
    """An operator of a set that may have marks: its mark (``strategy.marks``) if all of the set has one to the full extent, and if all but
    its products is recomputed."""

    position: int
    whole: int
    light: int

    def at(self, extent: int) -> int:
        """Its mark if the set's extent is this one of ``recomputation.LEVELS``."""
        return (STAYS, self.whole, self.light)[extent]


@dataclass(frozen=True, eq=False)
class Space:
    """The space of a graph on so many devices, and the facts about the graph that the proposals need. ``references``: strategies known
    beforehand (the starts), from which informed proposals borrow. ``allowed``: by operator, what the user's constraints leave;
    operators of a group then have equal ones. ``syncs``: by parameter, the ways in which it may be synchronized, if there are several.
    ``by_field``: of marks' fields, sets of operators that may have one together, or not (``with_sets``). ``sizes``: by operator, its
    factors' sizes in the smallest micro-batch, if there are several."""

    graph: OperatorGraph
    device_count: int
    operators: tuple[OperatorSpace, ...]
    edges: tuple[tuple[Edge, ...], ...]
    groups: tuple[tuple[int, ...], ...]
    references: tuple[Strategy, ...] = ()
    allowed: tuple[Allowed | None, ...] = ()
    syncs: Mapping[str, tuple[SyncConfig, ...]] = field(default_factory=dict)
    by_field: Mapping[str, tuple[tuple[Marked, ...], ...]] = field(default_factory=dict)
    sizes: tuple[tuple[int, ...], ...] = ()

    def allows(self, position: int, config: OpConfig) -> bool:
        """Whether an operator may have this configuration: micro-batches are large enough, the user's constraints allow it, and if there is
        only one, this is it."""
        only = settled_config(self.graph.operators[position], self.device_count)
        if only is not None:
            return config.placed_like(only) is config
        if self.sizes and any(degree > size for degree, size in zip(config.degrees, self.sizes[position], strict=True)):
            return False
        allowed = self.allowed[position] if self.allowed else None
        return allowed is None or allowed.allows(config)

    @cached_property
    def marks(self) -> tuple[tuple[Marked, ...], ...]:
        """All sets of operators whose marks may change."""
        return tuple(own for feature in FEATURES for own in self.by_field.get(feature.field, ()))

    def with_sets(self, field: str, sets: Iterable[Sequence[Marked]]) -> Space:
        """The space in which these sets may have marks of a field, as far as the user's constraints leave it open."""
        closed = {i for i, own in enumerate(self.allowed) if own is not None and not own.leaves(field)}
        chosen = (tuple(each for each in own if each.position not in closed) for own in sets)
        return replace(self, by_field={**self.by_field, field: tuple(dict.fromkeys(own for own in chosen if own))})

    @cached_property
    def gathers(self) -> bool:
        """Whether some parameter may be gathered for its uses, so that it matters how many groups are gathered ahead."""
        return any(sync.contract.gathers_values for choices in self.syncs.values() for sync in choices)

    @cached_property
    def orders(self) -> Orders:
        """The orders of passes of its strategies."""
        return Orders(self.graph)

    @cached_property
    def movable(self) -> tuple[int, ...]:
        """Positions of the operators that have a choice."""
        return tuple(i for i, space in enumerate(self.operators) if space.structured_count > 1)

    @cached_property
    def group_of(self) -> tuple[tuple[int, ...], ...]:
        """Per operator, the positions of its repeated-layer group (itself alone if it is not repeated)."""
        found = [(i,) for i in range(len(self.operators))]
        members: list[tuple[int, ...]] = list(found)
        for group in self.groups:
            for i in group:
                members[i] = group
        return tuple(members)


def build_space(
    graph: OperatorGraph,
    device_count: int,
    *,
    references: Sequence[Strategy] = (),
    every_degree: bool = False,
    shuffled: float = SHUFFLED,
    allowed: Mapping[str, Allowed] | None = None,
    syncs: Mapping[str, tuple[SyncConfig, ...]] = MappingProxyType({}),
    cut: MicroBatches | None = None,
) -> Space:
    """The space of a graph on ``device_count`` devices. ``every_degree`` also takes degrees that divide nothing. ``allowed``: what is
    left to some operators, by name (``soap.search.constraints``). ``cut``: the micro-batches of all of its strategies. StrategyError if
    nothing is left."""
    cache: dict[Hashable, OperatorSpace] = {}
    parts = cut or MicroBatches(graph, 1)
    every_size = [tuple(parts.least_size(i, f) for f in range(len(op.factors))) for i, op in enumerate(graph.operators)]
    limits = tuple((allowed or {}).get(op.name) for op in graph.operators)
    spaces = []
    for op, limit, sizes in zip(graph.operators, limits, every_size, strict=True):
        key = (sizes, op.partitionable, limit, settled_config(op, device_count))
        if key not in cache:
            cache[key] = _operator_space(op, device_count, limit, sizes, every=every_degree, shuffled=shuffled)
        spaces.append(cache[key])
    groups = repeated_groups(graph)
    if allowed:
        groups = _groups_alike(groups, spaces)
    limits = limits if allowed else ()
    by_part = () if cut is None else tuple(every_size)
    return Space(graph, device_count, tuple(spaces), edges_of(graph), groups, tuple(references), limits, syncs, sizes=by_part)


def _operator_space(
    op: Operator, device_count: int, limit: Allowed | None, sizes: Sequence[int], *, every: bool, shuffled: float
) -> OperatorSpace:
    only = settled_config(op, device_count)
    if only is not None:
        return OperatorSpace([grid_of(only)], device_count, shuffled=0.0, devices=only.devices)
    if limit is None:
        return OperatorSpace(grids_of(op, device_count, every=every, sizes=sizes), device_count, shuffled=shuffled)
    if limit.grid is not None:
        return OperatorSpace([limit.grid], device_count, shuffled=shuffled, devices=limit.devices)
    counts = dict.fromkeys((device_count, len(limit.devices)))  # degrees that divide the number of remaining devices are worth trying too
    grids = dict.fromkeys(grid for count in counts for grid in grids_of(op, count, every=every, whole=limit.whole, sizes=sizes))
    return OperatorSpace(list(grids), device_count, shuffled=shuffled, devices=limit.devices)


def _groups_alike(groups: Sequence[tuple[int, ...]], spaces: Sequence[OperatorSpace]) -> tuple[tuple[int, ...], ...]:
    """The groups, each divided into operators with the same space."""
    found: dict[tuple[int, int], list[int]] = {}
    for number, group in enumerate(groups):
        for i in group:
            found.setdefault((number, id(spaces[i])), []).append(i)
    return tuple(sorted(tuple(members) for members in found.values() if len(members) > 1))
