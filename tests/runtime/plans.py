"""Strategies in shorthand, and random orders, for the runtime's tests."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from soap.model.graph import OperatorGraph
from soap.model.regions import volume
from soap.plan.plan import Plan, ReadRegion, ShardSync
from soap.simulator.lowering import build_plan
from soap.strategy.config import OpConfig, Strategy
from tests.strategies import CPU, cluster

Split = tuple[Mapping[str, int], Sequence[int], int]
"""Degrees by factor name, devices, replicas."""


def split(devices: Sequence[int], replicas: int = 1, **degrees: int) -> Split:
    return degrees, devices, replicas


def plan_of(graph: OperatorGraph, default: Split, device_count: int = 3, **others: Split) -> Plan:
    """A plan in which each operator is split as its name's prefix says, or else by the default as far as it has the factors."""
    configs = {}
    for op in graph.operators:
        chosen = next((value for name, value in others.items() if op.name.startswith(name)), default)
        degrees = tuple(chosen[0].get(factor.name, 1) for factor in op.factors)
        count = chosen[2]
        for degree in degrees:
            count *= degree
        devices = tuple(chosen[1][i % len(chosen[1])] for i in range(count))
        configs[op.name] = OpConfig(degrees, devices, chosen[2])
    return build_plan(graph, Strategy(configs), cluster([device_count], CPU))


def summed(plan: Plan, shards: Sequence[int]) -> ShardSync:
    """Gradients of shards of the same devices, summed in one buffer."""
    first, own = plan.shards[shards[0]], [(number, plan.shards[number]) for number in shards]
    regions = tuple(ReadRegion(shard.parameter, shard.box, (number,), shard.uses) for number, shard in own)
    return ShardSync("all_reduce", first.parameter, first.index, regions, first.devices, first.devices)


def random_order(plan: Plan, rng: random.Random) -> list[int]:
    """Any topological order of the tiles."""
    before: list[set[int]] = [set() for _ in plan.tiles]
    sources = [{tile for piece in fetch.pieces for tile in _makers(plan, piece.holding)} for fetch in plan.fetches]
    for exchange in plan.exchanges:  # all of it takes place at once
        together = {tile for f, k in exchange.parts for tile in _makers(plan, plan.fetches[f].pieces[k].holding)}
        for number, _ in exchange.parts:
            sources[number] |= together
    for number, fetch in enumerate(plan.fetches):
        for tile, _ in fetch.consumers:
            before[tile].update(sources[number])
    order: list[int] = []
    left = set(range(len(plan.tiles)))
    while left:
        order.append(rng.choice(sorted(tile for tile in left if not before[tile] & left)))
        left.discard(order[-1])
    return order


def _makers(plan: Plan, holding: int) -> tuple[int, ...]:
    held = plan.holdings[holding]
    return (held.tile,) if held.reduction is None else plan.reductions[held.reduction].tiles


def moved_bytes(plan: Plan) -> int:
    """What the fetches of a plan move forward, all ranks together, in float64."""
    return sum(
        8 * volume(piece.box) for f in plan.fetches for piece in f.pieces if plan.holdings[piece.holding].device != f.device
    )
