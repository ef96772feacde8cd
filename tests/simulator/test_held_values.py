"""How long values are held, and what is sent of them: worked out of arrays as it is tile by tile, to the byte."""

from __future__ import annotations

from hypothesis import event, given

from soap.cluster.topology import Topology
from soap.model.graph import OperatorGraph
from soap.simulator.memory.derived import derived
from soap.simulator.memory.plan_arrays import MESSAGE, PlanArrays
from soap.simulator.memory.played import played_of
from soap.simulator.memory.sent import left_by, send_values
from soap.simulator.memory.spans import NEVER, Spans
from soap.simulator.memory.values import hold_values
from soap.strategy.config import Strategy
from tests.simulator.memory_rows import arrays_and_spans, new_ledger, rows_of
from tests.simulator.reference_memory.as_run import as_run
from tests.simulator.reference_memory.leaving import Leaving
from tests.simulator.reference_memory.ledger import Ledger
from tests.simulator.reference_memory.residency import _Values
from tests.simulator.reference_memory.task_spans import TaskSpans
from tests.simulator.test_residency import played
from tests.strategies import cases


@given(cases(servers=True, ports=True))
def test_values_are_held_as_tile_by_tile(case: tuple[OperatorGraph, Topology, Strategy]) -> None:
    graph, topology, chosen = case
    tasks, schedule = played(graph, chosen, topology)
    plan, run = tasks.plan, as_run(tasks, schedule)
    own = TaskSpans(tasks, run)
    expected = Ledger(plan, own.end_ns)
    values = _Values(own, expected)
    values.values()
    values.assembled()
    values.fetched()
    values.summed(tasks, run.schedule)
    Leaving(own, expected, values.gone).sent()
    arrays, spans = arrays_and_spans(own)
    times, found = derived(arrays, spans), new_ledger(plan, spans)
    gone = hold_values(plan, arrays, spans, times, found, played_of(tasks, run.schedule))
    left = left_by(plan, arrays, spans)
    send_values(plan, arrays, spans, times, found, gone, left)
    assert rows_of(found) == rows_of(expected)
    assert left.tolist() == [known_to_have_left(own, arrays, spans, carrier) for carrier in range(len(left))]
    for kind, there in (("run again", own.second), ("offload", own.away), ("told late", any(one != NEVER for one in left))):
        event(f"some {kind}" if there else f"none {kind}")


def known_to_have_left(own: TaskSpans, arrays: PlanArrays, spans: Spans, carrier: int) -> int:
    """``left_by``, asked of one message."""
    if arrays.carriers.pattern[carrier] != MESSAGE:
        return NEVER
    message = own.plan.messages[arrays.carriers.number[carrier]]
    return own.left_by(message, gradient=bool(spans.returned_start[carrier] != NEVER), otherwise=NEVER)
