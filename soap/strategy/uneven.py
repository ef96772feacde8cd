"""Samples divided among devices of different speed: ``uneven``, which is put on top of another strategy.

Weights are numbers of samples, so that all operators whose samples are split over the same devices are cut at the same samples, and a
factor that has several elements for each sample is, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from soap.cluster.topology import Topology
from soap.model.batch import sample_factor, samples_of
from soap.model.graph import Operator, OperatorGraph
from soap.model.regions import proportional
from soap.strategy.config import OpConfig, Strategy
from soap.strategy.shares import MOST_WEIGHT, shares_of


def by_speed(graph: OperatorGraph, topology: Topology, strategy: Strategy) -> Strategy:
    """The strategy whose samples are in proportion to the devices' peak rates; where several devices compute a part, the slowest counts."""
    samples = samples_of(graph)
    if samples is None or len({device.type for device in topology.devices}) == 1:
        return strategy
    changed = {}
    for op in graph.operators:
        config = strategy.operators[op.name]
        rates = [min(_rate(topology, device) for device in own) for own in devices_of_parts(op, config)]
        if len(set(rates)) > 1 and len(rates) <= samples:
            changed[op.name] = with_sample_weights(op, config, dealt(samples, rates))
    return strategy.with_changes(changed) if changed else strategy


def dealt(samples: int, rates: Sequence[float]) -> tuple[int, ...]:
    """How many samples each part gets, at least one."""
    precise = [max(1, round(rate / max(rates) * MOST_WEIGHT)) for rate in rates]
    counts = [stop - start for start, stop in proportional(samples, precise)]
    while 0 in counts:
        counts[counts.index(max(counts))] -= 1
        counts[counts.index(0)] += 1
    return tuple(counts)


def devices_of_parts(op: Operator, config: OpConfig) -> list[set[int]]:
    """For each part of the operator's samples, the devices that compute some of it; [] if they are not split."""
    factor = sample_factor(op)
    if factor is None or config.degrees[factor] == 1:
        return []
    behind, degree = prod(config.degrees[factor + 1 :]), config.degrees[factor]
    found: list[set[int]] = [set() for _ in range(degree)]
    for place, device in enumerate(config.devices):
        found[place // behind % degree].add(device)
    return found


def with_sample_weights(op: Operator, config: OpConfig, weights: Sequence[int]) -> OpConfig:
    """The configuration with its samples in proportion to these weights, one for each part."""
    factor, known = sample_factor(op), [list(own) for own in config.weights]
    assert factor is not None
    known[factor] = list(weights)
    return replace(config, shares=shares_of(config.degrees, known))


def _rate(topology: Topology, device: int) -> float:
    return topology.devices[device].type.flops("float32")
