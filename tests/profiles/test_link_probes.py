from __future__ import annotations

from dataclasses import replace

import pytest

from soap.errors import ProfileError
from soap.measure.link_probes import (
    COLD_PENALTIES,
    COLD_PENALTY_BYTES,
    IN_STEPS,
    LinkTiming,
    Operation,
    Probe,
    cpu_fits,
    is_enough,
    probes_for,
)
from tests.profiles.test_link_figures import timed
from tests.strategies import CPU, cluster


def test_processor_time_is_fitted_like_time() -> None:
    probes = [Probe(Operation.ALL_REDUCE, (0, 1), size) for size in (1000, 2000, 4000)]
    timings = [LinkTiming(probe, (1.0,), 1e-5 + 1e-9 * probe.size_bytes) for probe in probes]
    (line,) = cpu_fits(timings).values()
    assert (line.alpha_seconds, line.beta_seconds_per_byte) == pytest.approx((1e-5, 1e-9))
    (idle,) = cpu_fits([LinkTiming(probe, (1.0,), 0.0) for probe in probes]).values()
    assert idle.seconds(10**6) < 2e-9  # a clock too coarse to see it


WRONG = [(Operation.MESSAGE, (0, 1, 2)), (Operation.EXCHANGE, (0,)), (Operation.ALL_REDUCE, (0,))]


@pytest.mark.parametrize(("operation", "devices"), WRONG)
def test_a_probe_has_as_many_devices_as_its_operation(operation: Operation, devices: tuple[int, ...]) -> None:
    with pytest.raises(ProfileError, match="devices"):
        Probe(operation, devices, 8)


def test_every_kind_of_pair_and_group_is_probed() -> None:
    probes = probes_for(cluster([4, 4]), sizes_bytes=(8, 16))
    of = {operation: [p.devices for p in probes if p.operation is operation and p.size_bytes == 8] for operation in Operation}
    assert of[Operation.MESSAGE] == of[Operation.EXCHANGE] == [(0, 1), (0, 4)]
    assert of[Operation.ALL_REDUCE] == of[Operation.ALL_TO_ALL] == [(0, 1), (0, 1, 2, 3), (0, 4), tuple(range(8))]
    assert len(probes) == 2 * (2 * 2 + 2 * 4)
    assert probes_for(cluster([1])) == []


@pytest.mark.parametrize(("hosts", "exchanges"), [([1, 1], 0), ([2, 2], 2)])
def test_steps_of_processors_are_probed(hosts: list[int], exchanges: int) -> None:
    """Two devices that give each other something send messages."""
    own = [probe for probe in probes_for(cluster(hosts, CPU)) if probe.operation in IN_STEPS]
    everyone = tuple(range(sum(hosts)))
    of_all = 1 + exchanges + len(COLD_PENALTIES) * len(COLD_PENALTY_BYTES)
    assert [probe.devices for probe in own] == [(0, hosts[0]), (0, hosts[0]), *([everyone] * of_all)]
    assert [probe.operation for probe in own].count(Operation.STEP_EXCHANGE) == exchanges


def test_timings_at_different_scales_are_not_enough() -> None:
    topology = cluster([2])
    timings = timed(topology)
    assert is_enough(topology, timings)
    assert is_enough(topology, [replace(one, scale=0.25) for one in timings])
    assert not is_enough(topology, [replace(timings[0], scale=0.25), *timings[1:]])


def test_the_median_counts() -> None:
    timing = LinkTiming(Probe(Operation.MESSAGE, (0, 1), 8), (9.0, 1.0, 1.1, 8.0, 7.0), 0.0)
    assert timing.typical_seconds == 7.0
    with pytest.raises(ProfileError, match="expected some above 0; measure again"):
        LinkTiming(timing.probe, (), 0.0)
