"""What plans hold of parameters is worked out once for all that is alike; ``test_sweep`` has the bytes."""

from __future__ import annotations

from dataclasses import replace

from soap.plan.plan import Plan, ShardSync
from soap.simulator.lowering import PlanBuilder
from soap.simulator.memory.held_parameters import Held, held_for_syncs
from soap.strategy.classical import data_parallel
from soap.strategy.sync import SHARDED
from tests.simulator.examples import chain, pairwise_cluster


def test_what_is_kept_alike_is_worked_out_once() -> None:
    """Though its tiles and shards have other numbers: the first layer runs on one device instead of two."""
    graph, topology = chain(4, 2, 3, 4), pairwise_cluster(1, 1)
    builder, chosen = PlanBuilder(graph, topology), data_parallel(graph, topology)
    for tensor in graph.parameters:
        chosen = chosen.with_parameter(tensor.name, SHARDED)
    first, again = builder.build(chosen), builder.build(chosen)
    assert all(a is b for a, b in zip(first.syncs, again.syncs, strict=True))
    other = replace(chosen.operators["l1"], degrees=(1, 1, 1), devices=(0,))
    second = builder.build(replace(chosen, operators={**chosen.operators, "l1": other}))
    kept = {own.parameter: own for own in second.kept}
    alike = [own.parameter for own in first.kept if kept[own.parameter] is own]
    assert alike == [tensor.name for tensor in graph.parameters if not tensor.name.startswith("l1")]
    was, now = (held_for(plan, alike[0]) for plan in (first, second))
    assert was[0] != now[0] and was[1] is now[1]


def held_for(plan: Plan, parameter: str) -> tuple[ShardSync, Held]:
    """The synchronization of a parameter, and what is held for it."""
    (found,) = (own for own in zip(plan.syncs, held_for_syncs(plan), strict=True) if own[0].parameter == parameter)
    return found
