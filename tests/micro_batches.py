"""Strategies with micro-batches, made of strategies without."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from soap.model.batch import MicroBatches
from soap.model.graph import FactorKind, OperatorGraph
from soap.schedules.named import parse
from soap.strategy.classical import random_config
from soap.strategy.config import OpConfig, Strategy, settled
from soap.strategy.recomputation import STAYS, repeatable
from soap.strategy.stages import chunks_of, stages_of_chunks


def in_micro_batches(graph: OperatorGraph, strategy: Strategy, count: int, rng: random.Random, device_count: int) -> Strategy:
    """The strategy in ``count`` micro-batches. Where that leaves an operator fewer samples than parts, it is configured anew."""
    cut = MicroBatches(graph, count)
    operators = {}
    for position, op in enumerate(graph.operators):
        config = strategy.operators[op.name]
        for _ in range(20):
            if _fits(cut, position, config):
                break
            config = random_config(op, device_count, rng)
        if not _fits(cut, position, config):
            config = OpConfig((1,) * len(op.factors), (rng.randrange(device_count),))
        operators[op.name] = replace(config, recompute=config.recompute if cut.may_repeat(position) else STAYS)
    return replace(strategy, operators=operators, microbatches=count)


def repeatable_parts(graph: OperatorGraph, count: int) -> list[str]:
    """Names of the operators that may be recomputed in ``count`` micro-batches."""
    cut = MicroBatches(graph, count)
    return [name for name in sorted(repeatable(graph)) if cut.may_repeat(graph.index[name])]


def _fits(cut: MicroBatches, position: int, config: OpConfig) -> bool:
    factor = cut.factors[position]
    return factor is None or config.degrees[factor] <= cut.least_size(position, factor)


def by_hand(graph: OperatorGraph, borders: Sequence[str], devices: Sequence[Sequence[int]], schedule: str | None = None) -> Strategy:
    """Chunks that begin with these operators, beside the first one, on these devices, stage by stage; inside a stage data parallelism."""
    named = {name: chunk for chunk, name in enumerate(borders, 1)}
    stage_of = stages_of_chunks(len(borders) + 1, schedule)
    operators = {}
    for op, chunk in zip(graph.operators, chunks_of(graph, named), strict=True):
        own = tuple(devices[stage_of[chunk]])
        sample = next((i for i, factor in enumerate(op.factors) if factor.kind is FactorKind.SAMPLE), None)
        if sample is None:
            operators[op.name] = OpConfig((1,) * len(op.factors), own[:1])
        else:
            operators[op.name] = OpConfig(tuple(len(own) if i == sample else 1 for i in range(len(op.factors))), own)
    return Strategy(operators, stages=named, schedule=schedule)


def drawn_pipeline(graph: OperatorGraph, schedule: str, count: int, rng: random.Random, device_count: int) -> Strategy:
    """Two to four stages with borders, devices and splits inside stages at random, in ``count`` micro-batches by this schedule."""
    each, cut = parse(schedule).chunks, MicroBatches(graph, count)
    stages = rng.randint(2, device_count)
    borders = sorted(rng.sample(range(1, len(graph.operators)), stages * each - 1))
    named = {graph.operators[place].name: chunk for chunk, place in enumerate(borders, 1)}
    order = rng.sample(range(device_count), device_count)
    ends = [0, *sorted(rng.sample(range(1, device_count), stages - 1)), device_count]
    groups = [order[start:stop] for start, stop in pairwise(ends)]
    stage_of = stages_of_chunks(stages * each, schedule)
    operators = {}
    for position, (op, chunk) in enumerate(zip(graph.operators, chunks_of(graph, named), strict=True)):
        own = groups[stage_of[chunk]]
        drawn = (random_config(op, len(own), rng) for _ in range(20))
        config = next((found for found in drawn if _fits(cut, position, found)), OpConfig((1,) * len(op.factors), (0,)))
        operators[op.name] = config.placed(config.degrees, tuple(own[device] for device in config.devices), config.replicas)
    return settled(graph, Strategy(operators, microbatches=count, stages=named, schedule=schedule), device_count)
