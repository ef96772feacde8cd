"""Strategies whose operators are in the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from soap.model.graph import OperatorGraph
from soap.model.micro_batches import MicroBatches
from soap.strategy.config import OpConfig, Strategy, settled
from soap.strategy.grids import fill, sample_factor, uniform_config
from soap.strategy.stages import chunks_of, devices_of_stages, stages_of_chunks


def in_stages(graph: OperatorGraph, strategy: Strategy, groups: Sequence[Sequence[int]], device_count: int) -> Strategy:
    """The strategy with data parallelism inside each of its stages. ``groups``: by stage, its devices. Parts are at most as many as the
    smallest micro-batch has samples."""
    chunks = chunks_of(graph, strategy.stages)
    stage_of = stages_of_chunks(max(chunks, default=0) + 1, strategy.schedule)
    orders = [groups[stage_of[chunk]] for chunk in chunks]
    cut = MicroBatches(graph, strategy.microbatches)
    chosen: dict[int, OpConfig] = {}
    for position, op in enumerate(graph.operators):
        factor = sample_factor(op)
        if factor is not None and (least := cut.least_size(position, factor)) < len(orders[position]):
            chosen[position] = uniform_config(op, {op.factors[factor].name: least}, orders[position])
    return settled(graph, replace(strategy, operators=fill(graph, orders, chosen).operators), device_count)


def usual_in_stages(graph: OperatorGraph, strategy: Strategy, device_count: int) -> Strategy:
    """The strategy with data parallelism inside each stage, on the devices that it uses already."""
    return in_stages(graph, strategy, [sorted(own) or [0] for own in devices_of_stages(graph, strategy)], device_count)
