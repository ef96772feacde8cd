"""Virtual workers, simulated: by hand, by closed forms, and by the clocks, which refuse what may not begin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from soap.cluster.topology import Topology
from soap.elastic.clocks import waves_needed
from soap.elastic.faults import ElasticError
from soap.elastic.simulation.steady import NO_DELAYS, Delays, Period
from soap.mixed.partitioning import Allocation, Placement, Stage, WorkerPlan, placed
from soap.mixed.steady import MixedSteady, Training, simulate
from tests.elastic.drawn import most_missing
from tests.elastic.stars import star
from tests.extent import USUAL
from tests.strategies import GPU

BATCH = 4
FORWARD, BACKWARD = 10_000, 20_000
FREE, MOST = 200, 96
"""A bound of more waves than there are in so many minibatches: nobody waits or pulls."""


def worker(devices: Sequence[int], in_flight: int, *, slower: int = 1, sent: int = 1, parameters: int = 0) -> WorkerPlan:
    """Equal stages on these devices. A byte takes 1 ns if links are so quick."""
    stages = []
    for number, device in enumerate(devices):
        last = number == len(devices) - 1
        border = (0, 0) if last else (sent, sent)
        stages.append(Stage(device, number, slower * FORWARD, slower * BACKWARD, border, parameters, 0))
    return WorkerPlan(tuple(stages), in_flight, slower * (FORWARD + BACKWARD))


def gpus(count: int, bytes_per_second: float = 1e15) -> Topology:
    """Each on a host of its own, whose core is the server's."""
    return star([GPU] * count, bytes_per_second)


def steady(
    topology: Topology,
    plans: Sequence[WorkerPlan],
    bound: int | None = 0,
    *,
    delays: Delays = NO_DELAYS,
    local: bool = False,
    most: int = 768,
) -> MixedSteady:
    return simulate(topology, plans, shares(topology, plans, local=local), BATCH, bound, delays=delays, most_minibatches=most)


def shares(topology: Topology, plans: Sequence[WorkerPlan], *, local: bool = False) -> Placement:
    devices = tuple(tuple(stage.device for stage in plan.stages) for plan in plans)
    return placed(topology, Allocation("test", devices, local=local), plans)


def test_one_minibatch_at_a_time_goes_there_and_back() -> None:
    """Three stages, two messages of 1 ns each way."""
    found = steady(gpus(3), [worker(range(3), 1)], FREE, most=MOST)
    assert found.period == Period(1, 3 * (FORWARD + BACKWARD) + 4)
    assert found.idle[0] == pytest.approx(2 / 3, abs=1e-3)
    assert (found.waiting_ns, {*found.staleness}, found.pulls) == ((0,), {0}, 0)


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_enough_minibatches_in_flight_fill_all_stages(stages: int) -> None:
    """Twice as many as stages hide the messages, too: a minibatch for each time that a stage takes."""
    found = steady(gpus(stages), [worker(range(stages), 2 * stages)], FREE, most=MOST)
    assert found.period is not None and found.period.duration_ns == found.period.leases * (FORWARD + BACKWARD)
    assert max(found.idle.values()) == 0
    fewer = steady(gpus(stages), [worker(range(stages), stages)], FREE, most=MOST)
    assert fewer.samples_per_second <= found.samples_per_second
    rates = [steady(gpus(stages), [worker(range(stages), n)], FREE, most=MOST).samples_per_second for n in range(1, 2 * stages + 1)]
    assert all(a <= b for a, b in pairwise(rates))


def test_the_slowest_stage_is_the_limit() -> None:
    plan = worker(range(3), 6)
    slow = replace(plan.stages[1], forward_ns=3 * FORWARD)
    found = steady(gpus(3), [replace(plan, stages=(plan.stages[0], slow, plan.stages[2]))], None)
    assert found.samples_per_second == pytest.approx(BATCH * 1e9 / (3 * FORWARD + BACKWARD), rel=1e-9)


@pytest.mark.parametrize("bound", [0, 1, 4])
def test_a_bound_makes_the_quick_one_as_slow_as_the_slow_one(bound: int) -> None:
    """At any D in the end; without one each goes at its own rate."""
    topology = gpus(4)
    plans = [worker((0, 1), 4), worker((2, 3), 4, slower=3)]
    found = steady(topology, plans, bound)
    assert found.samples_per_second == pytest.approx(2 * BATCH * 1e9 / (3 * (FORWARD + BACKWARD)), rel=1e-2)
    assert found.waiting_ns[0] > 100_000 > 5_000 > found.waiting_ns[1], "at D = 0 the slow one waits until its own push has counted"
    assert max(found.staleness) == most_missing(bound, 4)
    free = steady(topology, plans, None)
    assert free.samples_per_second == pytest.approx(BATCH * 1e9 * (1 + 1 / 3) / (FORWARD + BACKWARD), rel=1e-2)


@pytest.mark.slow
def test_looser_bounds_wait_less_at_random_delays() -> None:
    """And pull less: a pull takes all that servers have. Without a bound nobody waits, and each start takes what servers have."""
    topology, delays = gpus(4), Delays(1.0, seed=3)
    plans = [worker((0, 1), 3, parameters=3000), worker((2, 3), 3, parameters=3000)]
    found = [steady(topology, plans, bound, delays=delays, most=192) for bound in (0, 1, 4, None)]
    assert [a.samples_per_second < b.samples_per_second for a, b in pairwise(found)] == [True] * 3
    assert [sum(a.waiting_ns) > sum(b.waiting_ns) for a, b in pairwise(found)] == [True] * 3
    assert found[0].pulls > found[1].pulls > found[2].pulls
    assert found[0].pulls == pytest.approx(1, abs=0.05) and found[3].pulls > found[2].pulls and sum(found[3].waiting_ns) == 0
    assert steady(topology, plans, 1, delays=delays, most=192) == found[1]


def test_parameters_go_once_there_and_back_for_each_wave() -> None:
    """A wave of three of two stages with 1000 and 3000 bytes: pushed by both workers, pulled with D = 0. Three of four hosts are others'.
    With local servers nothing leaves a host but activations."""
    topology = gpus(4)
    plans = []
    for first in (0, 2):
        plan = worker((first, first + 1), 3, sent=50)
        plans.append(replace(plan, stages=tuple(replace(s, parameter_bytes=1000 + 2000 * i) for i, s in enumerate(plan.stages))))
    found = steady(topology, plans, 0)
    assert found.pushes == 1
    each = 0.75 * 4000 / 3  # to the servers; a quarter stays on the host
    assert found.parameter_bytes == pytest.approx(each * (1 + found.pulls), rel=1e-3)
    assert found.activation_bytes == 2 * 50
    one = [plans[0]]
    local = steady(topology, one, 0, local=True)
    assert (local.parameter_bytes, local.activation_bytes, local.pushes) == (0, 100, 1)
    with pytest.raises(ElasticError, match="parameters are to be on their stage's host, but workers' stages differ"):
        steady(topology, plans, 0, local=True)


def test_slow_links_to_servers_hold_up_a_tight_bound_most() -> None:
    """At D = 0 a worker waits for its own push and its pull; at D = 4 these are beside computation."""
    topology = gpus(4, 1e8)
    plans = [worker((0, 1), 4, parameters=10_000), worker((2, 3), 4, parameters=10_000)]
    tight, loose = steady(topology, plans, 0), steady(topology, plans, 4)
    assert tight.samples_per_second < 0.95 * loose.samples_per_second
    assert sum(tight.waiting_ns) + sum(tight.pulling_ns) > sum(loose.waiting_ns) + sum(loose.pulling_ns)


@USUAL
@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 4), st.sampled_from([0, 1, 3]), st.integers(1, 30), st.integers(0, 2**16))
def test_starts_keep_to_the_bound_and_all_waves_are_pushed(workers: int, stages: int, wave: int, bound: int, count: int, seed: int) -> None:
    """Whoever is slow, and if the last wave is incomplete; a version is never more than what was pushed by then."""
    topology = gpus(workers * stages)
    plans = [worker(range(w * stages, (w + 1) * stages), wave, slower=1 + w, parameters=500) for w in range(workers)]
    training = Training(topology, plans, shares(topology, plans), bound, count, Delays(1.0, seed))
    trace = training.run()
    ended = training.loop.schedule().end_ns
    assert trace.pushes == [-(-count // wave)] * workers
    for own, done in zip(trace.starts, trace.done, strict=True):
        assert [start.minibatch for start in own] == list(range(count))
        for start in own:
            assert start.version >= waves_needed(start.minibatch, wave, bound)
            assert start.minibatch < wave or start.dealt_ns >= start.able_ns == ended[done[start.minibatch - wave]]
            for other in trace.done:  # these waves are finished
                assert start.version == 0 or ended[other[min(start.version * wave, count) - 1]] <= start.dealt_ns
    assert max(trace.missing) <= (most_missing(bound, wave) or 0)


def test_workers_that_differ_in_flight_are_refused() -> None:
    topology = gpus(2)
    plans = [worker((0,), 1), worker((1,), 2)]
    with pytest.raises(ElasticError, match="workers with 1, 2 minibatches in flight, 5 in all; expected one number"):
        Training(topology, plans, shares(topology, plans), 0, 5, NO_DELAYS)
