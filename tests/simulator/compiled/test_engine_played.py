"""Which of an engine's slots is which task of a plan: as ``lowering`` and ``reference`` have it, task by task."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from soap.cluster.topology import Topology
from soap.model.graph import OperatorGraph
from soap.plan.compression.training import PLAIN, PlannedTraining
from soap.plan.plan import Plan
from soap.plan.planning import PlanBuilder
from soap.profiles.roofline import RooflineCosts
from soap.simulator.communication.prices import Communication
from soap.simulator.costs import CostModel
from soap.simulator.engine import Engine
from soap.simulator.folded_bound import folded_engine
from soap.simulator.folding import fold
from soap.simulator.lowering import lower
from soap.simulator.memory.engine_played import engine_played
from soap.simulator.memory.plan_arrays import plan_arrays
from soap.simulator.memory.played import NONE, Played, played_of
from soap.simulator.reference import simulate
from soap.simulator.shared import Shared
from soap.strategy.config import Strategy
from tests.extent import FEW, MANY
from tests.simulator.compiled.walks import Walk, walks
from tests.simulator.copied import Case, copied, with_parts
from tests.simulator.examples import LaunchedCosts
from tests.strategies import cases

pytestmark = pytest.mark.slow  # the first use compiles for a minute

BY_TASK = ("kind", "tile", "start", "end")
TIMES = ("duration", "launch", "latency", "overhead")
OF_TASKS = ("forward", "backward", "weights", "again", "brought", "returned", "summed", "summed_back")


def in_order(played: Played) -> dict[str, object]:
    """All fields by the tasks' places among all by id. What tasks wait for and hold are sets."""
    more = played.replayable()
    order, rank = np.argsort(more.rank), np.append(more.rank, NONE)
    assert np.array_equal(np.sort(more.rank), np.arange(len(order)))
    waiting, others = played.waits_of(np.arange(len(order)))
    waits = [frozenset(own.tolist()) for own in np.split(rank[others], np.searchsorted(waiting, np.arange(1, len(order))))]
    held = [frozenset(more.held[a:b].tolist()) for a, b in zip(more.held_ptr, more.held_ptr[1:], strict=False)]
    found: dict[str, object] = {name: getattr(played, name)[order].tolist() for name in BY_TASK}
    found |= {name: getattr(more, name)[order].tolist() for name in TIMES}
    found |= {name: rank[getattr(played, name)].tolist() for name in OF_TASKS}
    found |= {f"row {name}": rank[own].tolist() for name, own in played.rows.items()}
    named = {name: (int(rank[first]), int(rank[last])) for name, (first, last) in played.named.items()}
    return found | {"waits": [waits[i] for i in order], "held": [held[i] for i in order], "named": named}


def check(engine: Engine, plan: Plan, topology: Topology, costs: CostModel, communication: Communication | None = None) -> None:
    tasks, arrays = lower(plan, topology, costs, communication), plan_arrays(plan)
    found, expected = in_order(engine_played(engine, plan, arrays)), in_order(played_of(tasks, simulate(tasks)))
    assert {name for name, own in found.items() if own != expected[name]} == set()
    assert found.keys() == expected.keys()


@settings(MANY, suppress_health_check=list(HealthCheck))
@given(cases(servers=True, ports=True))
def test_what_is_held(case: tuple[OperatorGraph, Topology, Strategy]) -> None:
    graph, topology, strategy = case
    costs = RooflineCosts(topology, 2)
    engine = Engine(Shared(graph, topology, costs))
    engine.load(strategy)
    engine.simulate()
    check(engine, PlanBuilder(graph, topology).build(strategy), topology, costs)


@settings(FEW, suppress_health_check=list(HealthCheck))
@given(walks(), st.sampled_from((PLAIN, PlannedTraining(clips=True))))
def test_what_is_proposed(walk: Walk, training: PlannedTraining) -> None:
    """And what is held once a proposal is accepted or rejected."""
    graph, topology, strategy, edits = walk
    costs, builder = LaunchedCosts(topology), PlanBuilder(graph, topology, training)
    engine = Engine(Shared(graph, topology, costs, training))
    engine.load(strategy)
    engine.simulate()
    for edit in edits:
        edited = edit.of(strategy)
        edit.propose(engine)
        check(engine, builder.build(edited), topology, costs)
        if edit.accepted:
            engine.accept()
            strategy = edited
        else:
            engine.reject()
        check(engine, builder.build(strategy), topology, costs)


@settings(MANY, suppress_health_check=list(HealthCheck))
@given(copied().flatmap(with_parts), st.sampled_from((PLAIN, PlannedTraining(clips=True))))
def test_two_copies(case: Case, training: PlannedTraining) -> None:
    graph, topology, strategy = case
    folding = fold(graph, topology, strategy, training)
    assume(not isinstance(folding, str))
    assert not isinstance(folding, str)
    costs = LaunchedCosts(topology)
    engine = folded_engine(folding, costs)
    engine.load(folding.copies.strategy)
    engine.simulate()
    check(engine, folding.plan, folding.topology, costs, folding.communication)
