"""The compiled simulator on a folded strategy: as lowering and reference, which ``tests/simulator/test_folding`` holds to the whole."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from soap.plan.compression.training import PLAIN, PlannedTraining
from soap.simulator.engine import Engine
from soap.simulator.folded_prices import FoldedCosts
from soap.simulator.folding import fold
from soap.simulator.lowering import lower
from soap.simulator.reference import simulate
from tests.extent import MANY
from tests.simulator.compiled.agreement import compiled_tasks, task_key
from tests.simulator.copied import Case, copied
from tests.simulator.examples import LaunchedCosts

pytestmark = pytest.mark.slow  # the first use compiles for a minute


@settings(MANY, suppress_health_check=list(HealthCheck))
@given(copied(), st.sampled_from((PLAIN, PlannedTraining(clips=True))))
def test_every_task(case: Case, training: PlannedTraining) -> None:
    graph, topology, strategy = case
    folding = fold(graph, topology, strategy, training)
    assume(not isinstance(folding, str))
    assert not isinstance(folding, str)
    assume(not folding.has_parts)
    costs = LaunchedCosts(topology)
    tasks = lower(folding.plan, folding.topology, costs, folding.communication)
    schedule = simulate(tasks)
    engine = Engine(folding.copies.graph, folding.topology, FoldedCosts(graph, costs), folding.communication, training=training)
    engine.load(folding.copies.strategy)
    assert engine.simulate() == schedule.makespan_ns
    expected = {
        task_key(*task.id): (task.duration_ns, start, frozenset(task.resources), end)
        for task, start, end in zip(tasks.tasks, schedule.start_ns.tolist(), schedule.end_ns.tolist(), strict=True)
    }
    assert {key: own[:4] for key, own in compiled_tasks(engine).items()} == expected
