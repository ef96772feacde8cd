"""The compiled simulator on a folded strategy: as lowering and reference, which ``tests/simulator/test_folding`` holds to the whole."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from soap.cluster.topology import Topology
from soap.plan.compression.training import PLAIN, PlannedTraining
from soap.simulator.folded_bound import folded_engine
from soap.simulator.folding import Folding, fold
from soap.simulator.lowering import lower
from soap.simulator.reference import simulate
from tests.extent import MANY
from tests.simulator.compiled.agreement import Played, compiled_tasks, task_key
from tests.simulator.copied import Case, copied, with_parts
from tests.simulator.examples import LaunchedCosts

pytestmark = pytest.mark.slow  # the first use compiles for a minute


def reference_tasks(folding: Folding, topology: Topology) -> tuple[int, dict[tuple[int, int], Played]]:
    """The time of the two copies, and their tasks by key."""
    tasks = lower(folding.plan, folding.topology, LaunchedCosts(topology), folding.communication)
    schedule = simulate(tasks)
    return schedule.makespan_ns, {
        task_key(*task.id): (task.duration_ns, start, frozenset(task.resources), end, task.bytes)
        for task, start, end in zip(tasks.tasks, schedule.start_ns.tolist(), schedule.end_ns.tolist(), strict=True)
    }


@settings(MANY, suppress_health_check=list(HealthCheck))
@given(copied().flatmap(with_parts), st.sampled_from((PLAIN, PlannedTraining(clips=True))))
def test_every_task(case: Case, training: PlannedTraining) -> None:
    graph, topology, strategy = case
    folding = fold(graph, topology, strategy, training, nearly=True)
    assume(not isinstance(folding, str))
    assert not isinstance(folding, str)
    engine = folded_engine(folding, LaunchedCosts(topology))
    makespan_ns, expected = reference_tasks(folding, topology)
    assert engine.simulate() == makespan_ns
    assert compiled_tasks(engine) == expected
