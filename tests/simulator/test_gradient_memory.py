"""How long gradients are held: worked out of arrays as it is tile by tile, to the byte."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from soap.cluster.topology import Topology
from soap.model.graph import Footprint, OperatorGraph
from soap.simulator.memory.derived import derived
from soap.simulator.memory.gradients import CountedSums, hold_gradients
from soap.simulator.memory.plan_arrays import region_number
from soap.simulator.memory.sent import left_by
from soap.simulator.tasks import Schedule, TaskGraph, TaskKind
from soap.strategy.config import Strategy
from tests.simulator.memory_rows import arrays_and_spans, new_ledger, rows_of
from tests.simulator.reference_memory.as_run import as_run
from tests.simulator.reference_memory.gradient_residency import GradientResidency, Sum
from tests.simulator.reference_memory.ledger import Ledger
from tests.simulator.reference_memory.residency import _Values
from tests.simulator.reference_memory.task_spans import TaskSpans
from tests.simulator.test_micro_batches import ENTERED, pipeline, simulated
from tests.simulator.test_residency import played
from tests.strategies import cases


def counted_sums(counted: dict[Sum, int]) -> CountedSums:
    """Sums by their segments, parameters and regions, as arrays."""
    rows = [(segment, region_number(name, box), size) for (segment, name, box), size in counted.items()]
    return CountedSums(*np.array(rows, np.int64).reshape(-1, 3).T)


def assert_held_as_tile_by_tile(tasks: TaskGraph, schedule: Schedule) -> None:
    """Compare all rows of both ledgers."""
    plan, spans = tasks.plan, TaskSpans(tasks, as_run(tasks, schedule))
    synchronized = _Values(spans, Ledger(plan, spans.end_ns))
    synchronized.synchronized()
    expected = Ledger(plan, spans.end_ns)
    GradientResidency(spans, expected, synchronized.behind).gradients()
    arrays, times = arrays_and_spans(spans)
    found, counted = new_ledger(plan, times), counted_sums(synchronized.behind)
    hold_gradients(plan, arrays, times, derived(arrays, times), found, counted, left_by(plan, arrays, times))
    assert rows_of(found) == rows_of(expected)


@st.composite
def with_footprints(draw: st.DrawFn) -> tuple[OperatorGraph, Topology, Strategy]:
    """A case in which it is known of some operators what autograd keeps for them, takes as it is, and gives few numbers to."""
    graph, topology, chosen = draw(cases(servers=True, ports=True))
    found: dict[str, tuple[Footprint, ...]] = {}
    for op in graph.operators:
        places = st.sets(st.integers(0, len(op.inputs) + len(op.parameters) + len(op.outputs) - 1)).map(frozenset)
        keeps, in_rows, spread = draw(places), draw(places), draw(places)
        if draw(st.booleans()):
            found[op.name] = (Footprint(32, 16, draw(st.integers(-16, 16)), keeps, in_rows=in_rows, spread=spread),)
    return replace(graph, footprints=found), topology, chosen


@given(with_footprints())
def test_gradients_are_held_as_tile_by_tile(case: tuple[OperatorGraph, Topology, Strategy]) -> None:
    graph, topology, chosen = case
    assert_held_as_tile_by_tile(*played(graph, chosen, topology))


def test_gradients_of_halves_of_backward_passes_are_held_as_tile_by_tile() -> None:
    found = simulated(pipeline("zb-h1", 6, graph=ENTERED), graph=ENTERED)
    assert any(task.kind is TaskKind.WEIGHTS for task in found.tasks.tasks)
    assert_held_as_tile_by_tile(found.tasks, found.schedule)
