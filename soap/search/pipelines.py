"""Pipelines of a graph on a cluster, the most promising first: device groups, stages, micro-batches and schedules.

For every division of the devices into groups, every width of tensor parallelism inside them, every schedule and number of micro-batches,
``soap.search.stages`` cuts the operators into stages by rough costs, and ``soap.schedules.play`` says when their passes take place. That
gives an order in which the simulator is asked (``soap.search.pipelining``). Nothing is simulated here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import ceil, inf
from typing import TYPE_CHECKING

import numpy as np

from soap.cluster.topology import Topology
from soap.errors import ScheduleError
from soap.model.batch import MAX_MICROBATCHES, MicroBatches
from soap.schedules.checking import check
from soap.schedules.dependencies import Dependencies
from soap.schedules.named import SCHEDULES, NamedSchedule
from soap.schedules.play import Durations, in_flight, least_ns, peaks, play
from soap.schedules.table import WORK, Kind, Table
from soap.search.constraints import Allowed
from soap.search.stage_costs import StageCosts, StagePrices
from soap.search.stage_groups import StageGroups, stage_groups
from soap.search.stages import Integers, Partition, partition
from soap.strategy.grids import tensor_parallel_width

if TYPE_CHECKING:
    from soap.simulator.shared import Shared

MOST_STAGES = 64
PER_STAGE = 8
"""Up to so many micro-batches for each stage: with S of them 1F1B idles less than (S - 1) / (8 S) of the time, so that more gain little."""
CHUNKS = (1, 2, 4)
"""On each stage, for schedules that allow several."""
KEPT_TABLES = 64
"""Of schedules; shapes that differ in tensor parallelism alone have the same ones."""
MOST_KEPT = 64
"""When so many pipelines are known, only those are worked out that may be faster than the last of them: more than are ever simulated."""


@dataclass(frozen=True, slots=True)
class Pipeline:
    """``stages``: the devices of each. ``chunks``: by operator, its chunk. ``placement``: by chunk, its stage. ``tensor``: how many devices
    split weight matrices together. ``expected_ns``: of a step, by rough costs. ``lacking_bytes``: on the device that lacks most memory, by
    a rough bound; 0 if none does."""

    stages: tuple[tuple[int, ...], ...]
    chunks: tuple[int, ...]
    placement: tuple[int, ...]
    tensor: int
    microbatches: int
    schedule: NamedSchedule
    expected_ns: int
    lacking_bytes: int

    @property
    def blocks(self) -> list[int]:
        """By operator, its stage."""
        return [self.placement[chunk] for chunk in self.chunks]

    @property
    def score(self) -> tuple[int, int]:
        """The order of preference: what fits, then what is fast."""
        return (self.lacking_bytes, self.expected_ns)


def pipelines(
    shared: Shared, optimizer_states: int, *, allowed: Sequence[Allowed | None] = (), at_most_ns: float = inf
) -> list[Pipeline]:
    """The best pipeline of every shape, the most promising first; none on one device, or without samples. Of more than ``MOST_KEPT`` that
    fit without some of those that are slower than so many others, or lack memory. ``allowed``: by operator, what the user leaves to it, of
    which only stages count here. ``at_most_ns``: without shapes that would take longer if all devices had an equal share of the work."""
    graph, topology, samples = shared.graph, shared.topology, MicroBatches(shared.graph, 1).samples
    if topology.device_count == 1 or samples is None:
        return []
    prices, cut = StagePrices(shared, optimizer_states), lru_cache(None)(lambda count: MicroBatches(graph, count))
    shapes: list[tuple[float, int, _Shape, StageCosts]] = []
    for groups in stage_groups(topology, min(MOST_STAGES, len(graph.operators))):
        widths = [len(group) for group in groups.devices]
        for tensor in _tensor_widths(prices, topology, widths):
            for count in _microbatches(samples, max(widths) // tensor, len(widths)):
                shape = _Shape(groups, tensor, cut(count), allowed)
                own = prices.costs(groups, tensor, shape.cut)
                shapes.append((_equal_shares_ns(own, shape, max(CHUNKS)), len(shapes), shape, own))
    found = _Known()
    for equal_ns, _, shape, own in sorted(shapes, key=lambda one: one[:2]):
        if equal_ns <= min(at_most_ns, found.worth_ns):
            found.pipelines += _scheduled(shape, own, found)
    return sorted(found.pipelines, key=lambda own: own.score)


class _Tables:
    """Tables of schedules by stages and micro-batches, and what their actions wait for."""

    def __init__(self) -> None:
        self.table = lru_cache(KEPT_TABLES)(NamedSchedule.table)
        self.dependencies = lru_cache(KEPT_TABLES)(self._dependencies)

    def _dependencies(self, named: NamedSchedule, stages: int, count: int) -> Dependencies:
        return check(self.table(named, stages, count))


@dataclass
class _Known:
    """The pipelines that are worked out."""

    pipelines: list[Pipeline] = field(default_factory=list)
    tables: _Tables = field(default_factory=_Tables)

    @property
    def enough(self) -> bool:
        """Whether ``MOST_KEPT`` fit; then what lacks memory is of no use."""
        return self.worth_ns < inf

    @property
    def worth_ns(self) -> float:
        """A pipeline that takes longer is slower than ``MOST_KEPT`` that fit."""
        times_ns = sorted(own.expected_ns for own in self.pipelines if not own.lacking_bytes)
        return times_ns[MOST_KEPT - 1] if len(times_ns) >= MOST_KEPT else inf


def _equal_shares_ns(costs: StageCosts, shape: _Shape, chunks: int) -> float:
    """A step in which all stages end together, and that the pipeline fills as quickly as can be with so many chunks on each stage."""
    whole_ns, kinds = (costs.forward_ns + costs.backward_ns).sum(axis=1), shape.groups.kinds
    shares_ns = 1 / sum(1 / max(1, int(whole_ns[kind])) for kind in kinds)
    return shares_ns * (1 + (len(kinds) - 1) / (shape.cut.count * chunks))


def _tensor_widths(prices: StagePrices, topology: Topology, widths: Sequence[int]) -> list[int]:
    """Of groups for tensor parallelism inside stages: divisors of the devices of a host, if there are several, and of every stage."""
    host = tensor_parallel_width(topology)
    host = 1 if host == len(topology.workers) and len({topology.devices[device].host for device in topology.workers}) > 1 else host
    usable = [n for n in range(2, host + 1) if host % n == 0 and all(width % n == 0 for width in widths) and prices.splits(n)]
    return [1, *usable]


def _microbatches(samples: int, width: int, stages: int) -> Iterator[int]:
    """Powers of two of which every device gets a sample. ``width``: devices that divide the samples."""
    count = 2
    while count * width <= samples and count <= min(PER_STAGE * stages, MAX_MICROBATCHES):
        yield count
        count *= 2


@dataclass(frozen=True, slots=True)
class _Shape:
    groups: StageGroups
    tensor: int
    cut: MicroBatches
    allowed: Sequence[Allowed | None]

    def banned(self, firsts: Sequence[int]) -> Integers | None:
        """[stages, layers]: where a layer has an operator that may not be in a stage; None if all may be anywhere."""
        if not any(own is not None and (own.stage is not None or own.other_stages) for own in self.allowed):
            return None
        own = [[one is not None and not one.allows_stage(stage) for one in self.allowed] for stage in range(len(self.groups.devices))]
        return np.add.reduceat(np.array(own, np.int64), list(firsts), axis=1)


def _scheduled(shape: _Shape, costs: StageCosts, found: _Known) -> Iterator[Pipeline]:
    """The shape by each schedule that may be among the best of those found."""
    groups = shape.groups
    for schedule in SCHEDULES:
        if shape.cut.barriers and not schedule.meets_barriers:
            continue
        for chunks in (own for own in CHUNKS if schedule.fewest_chunks <= own <= schedule.most_chunks):
            if _equal_shares_ns(costs, shape, chunks) > found.worth_ns:
                continue
            named = NamedSchedule(schedule, chunks, schedule.placements[0])
            try:
                table = found.tables.table(named, len(groups.devices), shape.cut.count)
            except ScheduleError:  # too many actions
                continue
            cut = cut_into_stages(costs, groups, table, chunks, shape.banned(costs.firsts), fitting=found.enough)
            judged = None if cut is None else _judged(shape, costs, named, table, cut, found)
            if judged is not None:
                yield judged


def cut_into_stages(
    costs: StageCosts, groups: StageGroups, table: Table, chunks: int, banned: Integers | None = None, *, fitting: bool = False
) -> Partition | None:
    """The layers as chunks of a table's stages; what fits into memory, if anything does, or if it must (``fitting``). None if there is
    nothing: too few layers, or no stages that they may be in.

    With several rounds the groups take the order that suits one round best."""
    flights = in_flight(table)
    boundless = () if fitting else (replace(costs.chain, limit_bytes=np.full_like(costs.chain.limit_bytes, 2**60)),)
    for chain in (costs.chain, *boundless):
        found, kinds = None, groups.kinds
        if chunks == 1 or groups.any_order:
            each = [-(-own // chunks) for own in flights]
            found = partition(chain, kinds, each, any_order=groups.any_order, banned=banned if chunks == 1 else None)
            kinds = kinds if found is None else found.kinds
        if chunks > 1:
            share = replace(chain, limit_bytes=chain.limit_bytes // chunks)
            order = list(table.placement)
            homes, each = tuple(kinds[stage] for stage in order), [-(-flights[stage] // chunks) for stage in order]
            found = partition(share, homes, each, banned=None if banned is None else banned[order])
        if found is not None:
            return found
    return None


def _judged(
    shape: _Shape, costs: StageCosts, named: NamedSchedule, table: Table, cut: Partition, found: _Known
) -> Pipeline | None:
    """A pipeline with what it is expected to take and to lack; None if enough of those found are preferred to it."""
    count, stages, chain = shape.cut.count, len(table.stages), costs.chain
    bounds = (*cut.firsts, chain.layer_count)
    spans = list(zip(cut.kinds, bounds, bounds[1:], strict=False))

    def by_chunk(values: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> list[int]:
        return [int(values[kind, first:last].sum()) for kind, first, last in spans]

    borders = [int(chain.message_ns[a, b, cut - 1]) // (2 * count) for a, b, cut in zip(cut.kinds, cut.kinds[1:], bounds[1:], strict=False)]
    forward, backward = ([own // count for own in by_chunk(values)] for values in (costs.forward_ns, costs.backward_ns))
    actions: dict[Kind, Sequence[int]] = {"F": forward}
    for kind, work in WORK.items():  # both kinds of gradients take as long, roughly
        actions.setdefault(kind, [ceil(own * (("inputs" in work.shares) + work.gives_weights) / 2) for own in backward])
    durations = Durations(actions_ns=actions, forward_ns=borders, backward_ns=borders)
    if max(least_ns(table, durations)) > found.worth_ns:
        return None
    upkeep, kept = [0] * stages, [0] * stages
    for chunk, (own_ns, own_bytes) in enumerate(zip(by_chunk(costs.upkeep_ns), by_chunk(chain.kept_bytes), strict=True)):
        upkeep[table.placement[chunk]] += own_ns
        kept[table.placement[chunk]] += own_bytes
    most = peaks(table, by_chunk(chain.activation_bytes), by_chunk(chain.activation_bytes))
    limits = [int(chain.limit_bytes[kind]) for kind in cut.kinds[:stages]]
    lacking = max(0, *(a + b - limit for a, b, limit in zip(kept, most, limits, strict=True)))
    if lacking and found.enough:
        return None
    played = play(table, durations, known=found.tables.dependencies(named, stages, count))
    expected_ns = max(ends[-1] + own for ends, own in zip(played.ends_ns, upkeep, strict=True))
    starts = [costs.firsts[first] for first in cut.firsts]
    chunks = np.searchsorted(starts, np.arange(len(shape.cut.graph.operators)), side="right") - 1
    devices = shape.groups.in_order(cut.kinds[:stages])
    return Pipeline(devices, tuple(chunks.tolist()), table.placement, shape.tensor, count, named, expected_ns, lacking)
