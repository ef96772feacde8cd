"""Memory of parameters over arrays is that which is written down piece by piece."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given

from soap.cluster.topology import Topology
from soap.model.graph import OperatorGraph
from soap.plan.plan import Plan, ShardSync
from soap.simulator.lowering import PlanBuilder, build_plan, lower
from soap.simulator.memory.derived import derived
from soap.simulator.memory.held_parameters import Held, HeldParameters, held_for_syncs
from soap.simulator.memory.plan_arrays import region_number
from soap.simulator.reference import simulate
from soap.strategy.classical import data_parallel
from soap.strategy.config import Strategy
from soap.strategy.sync import SHARDED
from tests.extent import FEW
from tests.simulator.examples import PointCosts, chain, pairwise_cluster
from tests.simulator.memory_rows import Rows, arrays_and_spans, new_ledger, rows_of
from tests.simulator.reference_memory.as_run import as_run
from tests.simulator.reference_memory.ledger import Ledger
from tests.simulator.reference_memory.residency import _Values
from tests.simulator.reference_memory.task_spans import TaskSpans
from tests.strategies import cases


def taken(rows: Rows) -> Rows:
    """Those that are not nothing: what is freed and taken at once may add up to that."""
    return Rows({row: size for row, size in rows.items() if size})


@FEW
@given(cases(servers=True, ports=True))
def test_as_piece_by_piece(case: tuple[OperatorGraph, Topology, Strategy]) -> None:
    graph, topology, chosen = case
    tasks = lower(build_plan(graph, chosen, topology), topology, PointCosts())
    own = TaskSpans(tasks, as_run(tasks, simulate(tasks)))
    arrays, spans = arrays_and_spans(own)
    one, many = Ledger(tasks.plan, own.end_ns), new_ledger(tasks.plan, spans)
    values, held = _Values(own, one), HeldParameters(tasks.plan, spans, derived(arrays, spans), many)
    values.always(2)
    values.synchronized()
    values.updated(2)
    held.always(2)
    behind = held.synchronized()
    held.updated(2)
    assert taken(rows_of(one)) == taken(rows_of(many))
    found = {(segment, region): size for segment, region, size in zip(*(column.tolist() for column in behind), strict=True)}
    assert found == {(segment, region_number(name, box)): size for (segment, name, box), size in values.behind.items()}


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
