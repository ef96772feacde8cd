"""The plan of a strategy for batches of another size: same degrees, same devices, same parameter shards. Pure data, no torch.

Intervals are balanced anew, and tiles beyond the number of samples are empty. A batch of one sample has no dimension to split: the first
of the tiles that shared that dimension compute it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

from soap.cluster.topology import Topology
from soap.errors import RuntimeFailure, StrategyError
from soap.model.graph import Factor, FactorKind, Operator, OperatorGraph
from soap.model.regions import contains, intersect, volume
from soap.plan.plan import Plan, Shard, ShardSync
from soap.plan.planning import PlanBuilder
from soap.runtime.program.program import Program, compile_program
from soap.strategy.config import OpConfig, Strategy
from soap.strategy.shares import shares_of
from soap.strategy.stages import chunks_of, require_stages, stages_of


def resized_program(program: Program, graph: OperatorGraph, topology: Topology) -> Program:
    """The program for the same model traced at another batch size. It shares shards and synchronizations with ``program``.

    Raises RuntimeFailure if the strategy cannot be carried over.
    """
    plan = resized_plan(program.plan, graph, topology)
    if len(plan.tiles) == len(program.order.forward):
        try:
            return compile_program(plan, program.order)
        except RuntimeFailure:
            pass  # at this size tiles may depend on each other differently: fall back to the graph's order
    return compile_program(plan)


def other_program(program: Program, graph: OperatorGraph, topology: Topology) -> Program:
    """The program of another model of the same parameters, such as the same module in evaluation mode, whose operators are split and placed
    as their namesakes; those without one, as what they read from. It shares shards and synchronizations with ``program``.

    Raises RuntimeFailure if operators then do not find their parameters.
    """
    places = _places_of_others(program.plan.graph, graph)
    return compile_program(_replanned(program.plan, graph, topology, places))


def resized_plan(plan: Plan, graph: OperatorGraph, topology: Topology) -> Plan:
    """The plan at another batch size (see the module's docstring). What does not depend on the batch size stays: who owns which shard, and
    how each parameter is synchronized. Raises RuntimeFailure as ``resized_program``."""
    return _replanned(plan, graph, topology, [plan.graph.index[_namesake(op, plan.graph.operators)] for op in graph.operators])


def _replanned(plan: Plan, graph: OperatorGraph, topology: Topology, places: Sequence[int]) -> Plan:
    """The plan of another graph. ``places``: by operator, the operator whose configuration it takes over."""
    configs = {}
    for op, place in zip(graph.operators, places, strict=True):
        old = plan.graph.operators[place]
        configs[op.name] = _carried_over(old, plan.strategy.operators[old.name], op)
    strategy = _in_stages(plan, graph, places, replace(plan.strategy, operators=configs))
    built = PlanBuilder(graph, topology).build(strategy, empty_tiles=True)
    shards = _with_uses(plan, built)
    return replace(
        plan,
        graph=graph,
        strategy=strategy,
        tiles=built.tiles,
        first_tile=built.first_tile,
        holdings=built.holdings,
        fetches=built.fetches,
        messages=built.messages,
        exchanges=built.exchanges,
        reductions=built.reductions,
        order=built.order,
        shards=shards,
        syncs=tuple(_with_new_uses(sync, shards) for sync in plan.syncs),
        sparse_lookups=frozenset(position for position, place in enumerate(places) if place in plan.sparse_lookups),
    )


def _in_stages(plan: Plan, graph: OperatorGraph, places: Sequence[int], strategy: Strategy) -> Strategy:
    """The strategy with operators in their namesakes' chunks (``places``); without stages if calls are fused across borders."""
    if not strategy.stages:
        return strategy
    chunks = chunks_of(plan.graph, strategy.stages)
    stages = stages_of(graph, [chunks[place] for place in places])
    try:
        require_stages(graph, stages, strategy.schedule, strategy.operators)
    except StrategyError:
        return replace(strategy, stages={}, schedule=None)
    return replace(strategy, stages=stages)


def _places_of_others(graph: OperatorGraph, other: OperatorGraph) -> list[int]:
    """For each operator of the other graph: that of ``graph`` with the same parameters, else its namesake, else that of what it reads."""
    readers = {name: position for name, uses in graph.parameter_users.items() for position, _ in uses[:1]}
    places: list[int] = []
    for op in other.operators:
        makers = [places[other.producers[operand.tensor][0]] for operand in op.inputs if operand.tensor in other.producers]
        read = [readers[operand.tensor] for operand in op.parameters if operand.tensor in readers]
        known = _most_calls(op, graph.operators)
        places.append(next(iter([*read, *([] if known is None else [graph.index[known]]), *makers]), 0))
    return places


def _namesake(op: Operator, others: Sequence[Operator]) -> str:
    """The operator that makes the same calls, or most of them: with a size of 1, calls may be fused differently."""
    name = _most_calls(op, others)
    if name is None:
        raise RuntimeFailure(f"operator {op.name!r} exists for this batch size only; expected at least 2 samples: drop the last batch")
    return name


def _most_calls(op: Operator, others: Sequence[Operator]) -> str | None:
    """The operator that makes most of the same calls; None if there is none."""
    common = Counter({other.name: len({*op.calls} & {*other.calls}) + (other.name == op.name) / 2 for other in others})
    name, shared = common.most_common(1)[0]
    return name if shared else None


def _carried_over(old: Operator, config: OpConfig, new: Operator) -> OpConfig:
    """The configuration on the factors that remain. Of a factor that disappears, the first interval's devices stay."""
    places = _same_factors(old.factors, new.factors)
    degrees = tuple(1 if place is None else config.degrees[place] for place in places)
    devices = []
    for replica, cell in product(range(config.replicas), product(*map(range, degrees))):
        index = [0] * len(old.factors)
        for part, place in zip(cell, places, strict=True):
            if place is not None:
                index[place] = part
        number = replica
        for part, degree in zip(index, config.degrees, strict=True):
            number = number * degree + part
        devices.append(config.devices[number])
    weights = [(1,) if place is None else config.weights[place] for place in places]
    return config.placed(degrees, tuple(devices), config.replicas, shares_of(degrees, weights))


def _same_factors(old: Sequence[Factor], new: Sequence[Factor]) -> list[int | None]:
    """For each new factor the place of the old one: the same name and kind, else the same kind and size. None if there is none."""
    result: list[int | None] = []
    for factor in new:
        found = [i for i, f in enumerate(old) if f.name == factor.name and f.kind is factor.kind and _fits(f, factor) and i not in result]
        found = found or [i for i, f in enumerate(old) if (f.kind, f.size) == (factor.kind, factor.size) and i not in result]
        result.append(found[0] if found else None)
    return result


def _fits(old: Factor, new: Factor) -> bool:
    return old.kind is not FactorKind.PARAMETER or old.size == new.size


def _with_new_uses(sync: ShardSync, shards: Sequence[Shard]) -> ShardSync:
    """A synchronization with the uses of ``shards``. Each part of a region lists all uses of the region."""
    return replace(sync, regions=tuple(replace(region, uses=shards[region.shards[0]].uses) for region in sync.regions))


def _with_uses(old: Plan, plan: Plan) -> tuple[Shard, ...]:
    """The old shards with the new plan's uses. RuntimeFailure if a tile needs a region that its device neither owns nor is sent."""
    shards = old.shards
    readers = {number: sync.readers for sync in old.syncs for number in sync.shards}
    of_parameter: dict[str, list[int]] = {}
    for number, shard in enumerate(shards):
        of_parameter.setdefault(shard.parameter, []).append(number)
    uses: dict[int, list[tuple[int, int]]] = {}
    for tile_number, tile in enumerate(plan.tiles):
        op = plan.operator(tile)
        for place, (operand, box) in enumerate(zip(op.parameters, tile.parameters, strict=True)):
            held = [
                number
                for number in of_parameter.get(operand.tensor, ())
                if tile.device in readers.get(number, shards[number].devices) and intersect(shards[number].box, box) is not None
            ]
            whole = all(contains(box, shards[number].box) for number in held)
            if not whole or sum(volume(shards[number].box) for number in held) != volume(box):
                raise RuntimeFailure(
                    f"operator {op.name!r} is split in another way for this batch size, and its device {tile.device} does not keep what it "
                    f"needs of {operand.tensor!r}; drop the last batch, or make it larger"
                )
            for number in held:
                uses.setdefault(number, []).append((tile_number, place))
    return tuple(replace(shard, uses=tuple(uses.get(number, ()))) for number, shard in enumerate(shards))
