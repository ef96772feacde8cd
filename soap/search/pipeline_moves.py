"""Moves between pipelines: a stage's border, the number of micro-batches, the schedule, and the devices of stages.

Each changes one of them and leaves everything else as it is: an operator that comes to another stage of as many devices is split there as
before. In stages of other sizes it is data parallel.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations

from soap.model.batch import MAX_MICROBATCHES, MicroBatches, sample_factor
from soap.model.graph import OperatorGraph
from soap.schedules.named import SCHEDULES, NamedSchedule, parse
from soap.search.metropolis import Proposal
from soap.strategy.config import OpConfig, Strategy
from soap.strategy.grids import shared
from soap.strategy.stages import SETTLED, chunks_of, devices_of_stages, stages_of, stages_of_chunks

BORDER, MICROBATCHES, SCHEDULE, DEVICES = PIPELINE_MOVES = ("border", "microbatches", "schedule", "stage devices")
STEPS = (1, 2, 4, 8, 16, 32, 64)
"""By how many operators a border moves."""
MOST_SWAPPED = 8
"""With more stages only neighbours exchange their devices."""


def pipeline_moves(graph: OperatorGraph, strategy: Strategy) -> Iterator[Proposal]:
    """All moves from a strategy with micro-batches, those first that change least. Some may be illegal."""
    pipeline = _Pipeline(graph, strategy)
    yield from pipeline.borders()
    yield from pipeline.counts()
    yield from pipeline.schedules()
    yield from pipeline.devices()


class _Pipeline:
    """A strategy taken apart. ``_chunks``: by operator; ``_stages``: by chunk; ``_devices``: by stage, ascending."""

    def __init__(self, graph: OperatorGraph, strategy: Strategy) -> None:
        self._graph, self._strategy, self._cut = graph, strategy, MicroBatches(graph, strategy.microbatches)
        self._chunks = chunks_of(graph, strategy.stages)
        self._stages = stages_of_chunks(max(self._chunks) + 1, strategy.schedule)
        self._devices = [tuple(sorted(own)) for own in devices_of_stages(graph, strategy)]

    def borders(self) -> Iterator[Proposal]:
        """Operators on one side of a border between chunks come to the other side."""
        places = [p for p in range(1, len(self._chunks)) if self._chunks[p] != self._chunks[p - 1]]
        bounds = [0, *places, len(self._chunks)]
        for before, place, behind in zip(bounds, bounds[1:], bounds[2:], strict=False):
            for step in STEPS:
                if place - step > before:
                    yield self._moved(range(place - step, place), self._chunks[place])
                if place + step < behind:
                    yield self._moved(range(place, place + step), self._chunks[place - 1])

    def _moved(self, positions: Sequence[int], chunk: int) -> Proposal:
        chunks = list(self._chunks)
        for position in positions:
            chunks[position] = chunk
        return self._with_chunks(BORDER, chunks, self._devices)

    def _with_chunks(self, move: str, chunks: Sequence[int], devices: Sequence[tuple[int, ...]]) -> Proposal:
        """The strategy with these chunks, and stages on these devices."""
        configs: dict[str, OpConfig] = {}
        for position, (old, new) in enumerate(zip(self._chunks, chunks, strict=True)):
            op, here, there = self._graph.operators[position], self._devices[self._stages[old]], devices[self._stages[new]]
            if here != there and op.kind not in SETTLED:
                configs[op.name] = _placed(self._cut, position, self._strategy.operators[op.name], here, there)
        strategy = replace(self._strategy.with_changes(configs), stages=stages_of(self._graph, chunks))
        return Proposal(strategy, move, tuple(configs) or (self._graph.operators[0].name,))

    def counts(self) -> Iterator[Proposal]:
        """Twice as many micro-batches, or half as many."""
        count = self._strategy.microbatches
        for other in (2 * count, count // 2):
            if 1 < other <= MAX_MICROBATCHES:
                yield self._whole(MICROBATCHES, {"microbatches": other})

    def schedules(self) -> Iterator[Proposal]:
        """The other schedules of as many chunks on each stage."""
        named = None if self._strategy.schedule is None else parse(self._strategy.schedule)
        chunks, placement = (1, "loop") if named is None else (named.chunks, named.placement)
        for schedule in SCHEDULES:
            if schedule.fewest_chunks <= chunks <= schedule.most_chunks and placement in schedule.placements:
                other = NamedSchedule(schedule, chunks, placement)
                if other != named:
                    yield self._whole(SCHEDULE, {"schedule": str(other)})

    def _whole(self, move: str, change: Mapping[str, int | str]) -> Proposal:
        return Proposal(replace(self._strategy, **change), move, (self._graph.operators[0].name,))  # type: ignore[arg-type]

    def devices(self) -> Iterator[Proposal]:
        """Two stages exchange their devices, or one gives a device to the next."""
        count = len(self._devices)
        pairs = combinations(range(count), 2) if count <= MOST_SWAPPED else ((i, i + 1) for i in range(count - 1))
        for a, b in pairs:
            devices = list(self._devices)
            devices[a], devices[b] = devices[b], devices[a]
            yield self._with_chunks(DEVICES, self._chunks, devices)
        for a, b in ((i, i + d) for i in range(count) for d in (-1, 1) if 0 <= i + d < count):
            if len(self._devices[a]) > 1:
                devices = list(self._devices)
                given = devices[a][-1] if b > a else devices[a][0]
                devices[a] = tuple(device for device in devices[a] if device != given)
                devices[b] = tuple(sorted((*devices[b], given)))
                yield self._with_chunks(DEVICES, self._chunks, devices)


def _placed(cut: MicroBatches, position: int, config: OpConfig, here: tuple[int, ...], there: tuple[int, ...]) -> OpConfig:
    """An operator's configuration on another stage's devices."""
    op = cut.graph.operators[position]
    if len(here) == len(there):
        to = dict(zip(here, there, strict=True))
        return config.placed(config.degrees, tuple([to[device] for device in config.devices]), config.replicas, config.shares)
    factor = sample_factor(op)
    if factor is None:
        return config.placed((1,) * len(op.factors), there[:1])
    return config.placed_like(shared(op, there, cut.least_size(position, factor)))
