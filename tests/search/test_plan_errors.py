"""What a plan takes beside the costs of its parts: plans err alike in what they configure alike."""

from __future__ import annotations

import numpy as np
import pytest

from soap.api import timed
from soap.api.deciding import plan_errors
from soap.profiles.roofline import RooflineCosts
from soap.profiles.spreads import known_spreads
from soap.search.starts import BASELINE
from soap.simulator.draws import Draws
from soap.simulator.simulate import Simulator
from soap.strategy.classical import CLASSICAL
from soap.strategy.sync import parameter_server
from tests.graph_builder import mlp
from tests.simulator.examples import ExampleSpreads
from tests.strategies import CPU, cluster

GRAPH, TOPOLOGY = mlp(64, (128,) * 12, 8), cluster([2, 2], CPU)
SIMULATOR = Simulator(GRAPH, TOPOLOGY, RooflineCosts(TOPOLOGY))
USUAL, ALONE = (CLASSICAL[name](GRAPH, TOPOLOGY) for name in (BASELINE, "single_device"))
FIRST = GRAPH.operators[0].name
NEAR = ALONE.with_operator(FIRST, ALONE.operators[FIRST].placed(ALONE.operators[FIRST].degrees, (1,)))
SPREAD = known_spreads()["plan"]["described"]["cpu"]["all"]
WHOLE = len(GRAPH.operators) + len(GRAPH.parameters)


def logs(strategy: object, draws: int = 512) -> np.ndarray:
    found: np.ndarray = np.log(Draws(ExampleSpreads(), draws).factors(plan_errors(SIMULATOR, strategy, USUAL)))  # type: ignore[arg-type]
    return found


def test_a_plan_errs_by_how_much_of_it_is_unlike() -> None:
    servers = USUAL.with_changes(parameters={one.name: parameter_server(1) for one in GRAPH.parameters})
    assert plan_errors(SIMULATOR, USUAL, USUAL) == ()
    assert len(plan_errors(SIMULATOR, ALONE, USUAL)) == len(GRAPH.operators)
    assert len(plan_errors(SIMULATOR, servers, USUAL)) == len(GRAPH.parameters)
    for strategy, unlike in ((ALONE, len(GRAPH.operators)), (servers, len(GRAPH.parameters))):
        assert logs(strategy).std() == pytest.approx(SPREAD * np.sqrt(unlike / WHOLE), rel=0.15)


def test_nearly_equal_plans_err_nearly_alike() -> None:
    """They differ in one operator, by which each has an error of its own."""
    apart = logs(NEAR) - logs(ALONE)
    assert apart.std() == pytest.approx(SPREAD * np.sqrt(2 / WHOLE), rel=0.15)
    assert np.corrcoef(logs(NEAR), logs(ALONE))[0, 1] > 0.9


def test_what_is_simple_is_what_is_like_the_plan_that_must_be_beaten() -> None:
    plans = {"alone": ALONE, "near": NEAR, BASELINE: USUAL}
    for reference, unlike in ((None, [len(GRAPH.operators)] * 2 + [0]), (ALONE, [0, 1, len(GRAPH.operators)])):
        found = timed(SIMULATOR, plans, USUAL, 2, reference=reference, compiled=False)
        assert [plan.unlike for plan in found] == unlike
    times = [[plan.times_ns for plan in timed(SIMULATOR, plans, USUAL, 2, reference=one, compiled=False)] for one in (None, ALONE)]
    assert times[0] == times[1]
