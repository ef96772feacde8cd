"""Strategies with micro-batches, made of strategies without."""

from __future__ import annotations

import random
from dataclasses import replace

from soap.model.graph import OperatorGraph
from soap.model.micro_batches import MicroBatches
from soap.strategy.classical import random_config
from soap.strategy.config import OpConfig, Strategy


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
        operators[op.name] = config
    return replace(strategy, operators=operators, microbatches=count)


def _fits(cut: MicroBatches, position: int, config: OpConfig) -> bool:
    factor = cut.factors[position]
    return factor is None or config.degrees[factor] <= cut.least_size(position, factor)
