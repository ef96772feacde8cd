"""How long gradients are held: worked out of arrays as it is tile by tile, to the byte."""

from __future__ import annotations

import numpy as np
from hypothesis import event, given

from soap.cluster.topology import Topology
from soap.model.graph import OperatorGraph
from soap.simulator.memory.derived import derived
from soap.simulator.memory.gradients import CountedSums, hold_gradients
from soap.simulator.memory.plan_arrays import region_number
from soap.simulator.memory.sent import left_by
from soap.strategy.config import Strategy
from tests.simulator.memory_rows import arrays_and_spans, new_ledger, rows_of
from tests.simulator.reference_memory.as_run import as_run
from tests.simulator.reference_memory.gradient_residency import GradientResidency, Sum
from tests.simulator.reference_memory.ledger import Ledger
from tests.simulator.reference_memory.residency import _Values
from tests.simulator.reference_memory.task_spans import TaskSpans
from tests.simulator.test_residency import played
from tests.strategies import cases


def counted_sums(counted: dict[Sum, int]) -> CountedSums:
    """Sums by their segments, parameters and regions, as arrays."""
    rows = [(segment, region_number(name, box), size) for (segment, name, box), size in counted.items()]
    return CountedSums(*np.array(rows, np.int64).reshape(-1, 3).T)


@given(cases(servers=True, ports=True))
def test_gradients_are_held_as_tile_by_tile(case: tuple[OperatorGraph, Topology, Strategy]) -> None:
    graph, topology, chosen = case
    tasks, schedule = played(graph, chosen, topology)
    plan, spans = tasks.plan, TaskSpans(tasks, as_run(tasks, schedule))
    synchronized = _Values(spans, Ledger(plan, spans.end_ns))
    synchronized.synchronized()
    expected = Ledger(plan, spans.end_ns)
    GradientResidency(spans, expected, synchronized.behind).gradients()
    arrays, times = arrays_and_spans(spans)
    found = new_ledger(plan, times)
    hold_gradients(plan, arrays, times, derived(arrays, times), found, counted_sums(synchronized.behind), left_by(plan, arrays, times))
    for kind, there in (("between devices", spans.returned), ("counted at their ends", synchronized.behind), ("in rows", graph.sparse)):
        event(f"some {kind}" if there else f"none {kind}")
    assert rows_of(found) == rows_of(expected)
