"""Whatever stands next to a plan is priced by the plan's own options: clipping, costs, links."""

from __future__ import annotations

import pytest

from soap import api
from soap.plan.compression.training import PlannedTraining

MODEL, CLUSTER = "zoo:gpt:tiny", "h100-4"


@pytest.mark.slow
def test_other_clusters_and_ways_that_fit_have_the_same_training() -> None:
    clipping, plain = (
        api.simulator_for(MODEL, CLUSTER, costs="estimate", training=PlannedTraining(clips=clips)) for clips in (True, False)
    )
    usual = api.classical("data_parallel", clipping.graph, clipping.topology)
    assert clipping.makespan_ns(usual) > plain.makespan_ns(usual)
    for simulator in (clipping, plain):
        own_ns = simulator.makespan_ns(usual)
        (there,) = api.elsewhere(simulator, usual, [CLUSTER], costs="estimate")
        assert there.time_ns == there.usual_ns == own_ns
        fit = api.fits(simulator.graph, CLUSTER, usual, costs="estimate", training=simulator.training)
        assert fit.fits and fit.asked.time_ns == own_ns


def test_a_job_of_all_devices_is_priced_as_it_is_alone() -> None:
    job = api.Job(MODEL, "data_parallel")
    alone = api.job_simulation(job, api.load_cluster(CLUSTER), costs="estimate")
    assert alone.makespan_ns == api.simulate(MODEL, CLUSTER, "data_parallel", costs="estimate").makespan_ns
