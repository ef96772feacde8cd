from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings

from soap.errors import ProfileError
from soap.profiles.link_probes import LinkTiming, Operation, Probe, fits, probes_for, with_measured_links
from soap.simulator.communication import Communication
from soap.topology import Topology
from tests.strategies import CPU, cluster, topologies


def timed(topology: Topology) -> list[LinkTiming]:
    """What the simulator says that all probes take, as if it had been measured."""
    communication = Communication(topology)

    def seconds(probe: Probe) -> float:
        size, devices = probe.size_bytes, probe.devices
        match probe.operation:
            case Operation.MESSAGE:
                return communication.transfer_ns(size, *devices) / 1e9
            case Operation.ALL_REDUCE:
                return communication.allreduce(size, devices)[0] / 1e9
        return communication.exchange_ns([(a, b, size) for a in devices for b in devices if a != b]) / 1e9

    return [LinkTiming(probe, (seconds(probe),) * 5, 0.0) for probe in probes_for(topology)]


def test_every_kind_of_pair_and_group_is_probed() -> None:
    probes = probes_for(cluster([4, 4]), sizes_bytes=(8, 16))
    of = {operation: [p.devices for p in probes if p.operation is operation and p.size_bytes == 8] for operation in Operation}
    assert of[Operation.MESSAGE] == of[Operation.EXCHANGE] == [(0, 1), (0, 4)]
    assert of[Operation.ALL_REDUCE] == of[Operation.ALL_TO_ALL] == [(0, 1), (0, 1, 2, 3), (0, 4), tuple(range(8))]
    assert len(probes) == 2 * (2 * 2 + 2 * 4)
    assert probes_for(cluster([1])) == []


@settings(max_examples=30, deadline=None)
@given(topologies(max_devices=6))
def test_links_get_the_figures_that_their_messages_have(topology: Topology) -> None:
    declared = tuple(replace(link, bandwidth_bytes_per_second=3e9, latency_seconds=1e-6) for link in topology.links)
    measured = with_measured_links(replace(topology, links=declared), timed(topology))
    truth, found = Communication(topology), Communication(measured)
    for probe in probes_for(topology):
        if probe.operation is Operation.MESSAGE:
            expected_ns = truth.transfer_ns(probe.size_bytes, *probe.devices)
            assert found.transfer_ns(probe.size_bytes, *probe.devices) == pytest.approx(expected_ns, rel=0.02)


def test_hosts_links_are_told_from_the_network() -> None:
    topology = cluster([2, 2], CPU)
    measured = with_measured_links(topology, timed(topology))
    for link, found in zip(topology.links, measured.links, strict=True):
        assert found.bandwidth_bytes_per_second == pytest.approx(link.bandwidth_bytes_per_second, rel=1e-3)
        assert found.latency_seconds == pytest.approx(link.latency_seconds, rel=1e-2)


def test_what_other_programs_add_is_left_out() -> None:
    timing = LinkTiming(Probe(Operation.MESSAGE, (0, 1), 8), (9.0, 1.0, 1.1, 8.0, 7.0), 0.0)
    assert timing.typical_seconds == 1.0
    with pytest.raises(ProfileError, match="expected some above 0; measure again"):
        LinkTiming(timing.probe, (), 0.0)


def test_messages_that_cost_nothing_per_byte_are_refused() -> None:
    topology = cluster([2])
    timings = [LinkTiming(Probe(op, (0, 1), size), (1e-3,), 0.0) for op in (Operation.MESSAGE, Operation.EXCHANGE) for size in (8, 1024)]
    assert fits(timings)[Operation.MESSAGE, (0, 1)].beta_seconds_per_byte == 0.0
    with pytest.raises(ProfileError, match="take no longer the larger they are; measure again"):
        with_measured_links(topology, timings)
