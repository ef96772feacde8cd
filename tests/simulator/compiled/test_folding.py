"""The compiled simulator on a folded strategy: as lowering and reference, which ``tests/simulator/test_folding`` holds to the whole."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from soap.plan.compression.training import PLAIN, PlannedTraining
from soap.simulator.drawn_engine import DrawnEngine
from soap.simulator.drawn_times import reference_times_ns
from soap.simulator.draws import Draws
from soap.simulator.folded import FoldedSimulation
from soap.simulator.folded_bound import alike, folded_engine, messages
from soap.simulator.folding import CopiesBuilders, Folding, fold
from soap.simulator.lowering import lower
from soap.simulator.reference import simulate
from soap.strategy.recomputation import RECOMPUTED, STAYS, refusal
from tests.extent import MANY
from tests.simulator.compiled.agreement import Played, compiled_tasks, task_key
from tests.simulator.copied import Case, copied, with_parts
from tests.simulator.examples import ExampleSpreads, LaunchedCosts

pytestmark = pytest.mark.slow  # the first use compiles for a minute


def played(folding: Folding) -> FoldedSimulation:
    """The two copies by lowering and reference."""
    tasks = lower(folding.plan, folding.topology, LaunchedCosts(folding.whole), folding.communication)
    return FoldedSimulation(folding, tasks, simulate(tasks), 2)


def tasks_of(outcome: FoldedSimulation) -> dict[tuple[int, int], Played]:
    """Its tasks by key."""
    times = zip(outcome.tasks.tasks, outcome.schedule.start_ns.tolist(), outcome.schedule.end_ns.tolist(), strict=True)
    return {
        task_key(*task.id): (task.duration_ns, start, frozenset(task.resources), end, task.bytes) for task, start, end in times
    }


@settings(MANY, suppress_health_check=list(HealthCheck))
@given(copied().flatmap(with_parts), st.sampled_from((PLAIN, PlannedTraining(clips=True))))
def test_every_task(case: Case, training: PlannedTraining) -> None:
    graph, topology, strategy = case
    folding = fold(graph, topology, strategy, training)
    assume(not isinstance(folding, str))
    assert not isinstance(folding, str)
    engine, expected = folded_engine(folding, LaunchedCosts(topology)), played(folding)
    engine.load(folding.copies.strategy)
    assert engine.simulate() == expected.makespan_ns
    assert compiled_tasks(engine) == tasks_of(expected)
    assert messages(folding, engine) == expected.messages


@settings(suppress_health_check=list(HealthCheck))
@given(copied().flatmap(lambda case: st.tuples(with_parts(case), with_parts(case))), st.randoms(use_true_random=False))
def test_proposals_to_strategies_that_are_folded_alike(cases: tuple[Case, Case], draw: random.Random) -> None:
    (graph, topology, one), (_, _, other) = cases
    builders, marks = CopiesBuilders(graph, topology), (STAYS, RECOMPUTED)
    changed = {op.name: replace(one.operators[op.name], recompute=draw.choice(marks)) for op in graph.operators if not refusal(graph, op)}
    if one.microbatches > 1:
        changed = {}
    foldings = [
        fold(graph, topology, own, builders=builders)
        for own in (one, replace(other, operators={**one.operators, **changed}))
    ]
    held, proposed = foldings
    assume(not isinstance(held, str) and not isinstance(proposed, str) and alike(held, proposed))
    assert not isinstance(held, str) and not isinstance(proposed, str)
    engine, expected, now = folded_engine(held, LaunchedCosts(topology)), played(proposed), proposed.copies.strategy
    engine.load(held.copies.strategy)
    engine.simulate()
    syncs = {tensor.name: now.sync(tensor.name) for tensor in graph.parameters}
    assert engine.propose_changes(now.operators, syncs, prefetch=now.prefetch) == expected.makespan_ns
    engine.accept()
    assert compiled_tasks(engine) == tasks_of(expected)


@settings(suppress_health_check=list(HealthCheck))
@given(copied().flatmap(with_parts))
def test_draws(case: Case) -> None:
    graph, topology, strategy = case
    folding, draws = fold(graph, topology, strategy), Draws(ExampleSpreads(), 3)
    assume(not isinstance(folding, str))
    assert not isinstance(folding, str)
    engine, expected = folded_engine(folding, LaunchedCosts(topology), draws), played(folding)
    assert isinstance(engine, DrawnEngine)
    engine.load(folding.copies.strategy)
    engine.simulate()
    assert engine.usual_ns == expected.makespan_ns
    assert tuple(engine.times_ns().tolist()) == reference_times_ns(expected, draws)
