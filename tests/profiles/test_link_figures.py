from __future__ import annotations

import pickle
from dataclasses import replace

import pytest
from hypothesis import given

from soap.cluster.overheads import NO_COLD_PENALTY, NO_CPU_OVERHEAD, ColdPenalty, Share
from soap.cluster.presets import preset
from soap.cluster.topology import Topology
from soap.errors import ProfileError
from soap.measure.link_probes import (
    COLD_PENALTIES,
    COLD_PENALTY_BYTES,
    STEP_BYTES,
    STEP_SIZES_BYTES,
    LinkTiming,
    Operation,
    Probe,
    fits,
    modelled_seconds,
    probes_for,
    with_measured_links,
)
from soap.simulator.communication.prices import Communication
from tests.extent import FEW
from tests.strategies import CPU, cluster, topologies


def timed(topology: Topology) -> list[LinkTiming]:
    """What the simulator says that all probes take, as if it had been measured."""
    communication = Communication(topology)
    return [LinkTiming(probe, (max(1e-9, modelled_seconds(communication, probe)),) * 5, 0.0) for probe in probes_for(topology)]


def test_what_the_simulator_says_of_a_probe() -> None:
    communication = Communication(cluster([2, 2]))  # 1 GB/s inside, 100 MB/s between hosts, 10 us per link
    cases = {
        Probe(Operation.MESSAGE, (0, 1), 1000): 2e-5 + 1e-6,
        Probe(Operation.MESSAGE, (0, 2), 1000): 4e-5 + 1e-5,
        Probe(Operation.EXCHANGE, (0, 1), 1000): 2e-5 + 1e-6,
        Probe(Operation.ALL_TO_ALL, (0, 1, 2, 3), 1000): 3 * 4e-5 + 4 * 1e-5,  # each link between hosts carries four parcels
    }
    for probe, expected in cases.items():
        assert modelled_seconds(communication, probe) == pytest.approx(expected, rel=1e-3)
    ring = communication.allreduce(1000, (0, 1, 2, 3))[0] / 1e9
    assert modelled_seconds(communication, Probe(Operation.ALL_REDUCE, (0, 1, 2, 3), 1000)) == ring


@FEW
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


@pytest.mark.parametrize("topology", [cluster([2, 2]), preset("emulated:2x2@200Mbit/s"), preset("local:2")], ids=lambda one: one.name)
def test_a_cluster_with_measured_links_is_the_same_cluster(topology: Topology) -> None:
    faster = replace(topology, links=tuple(replace(link, bandwidth_bytes_per_second=7e9) for link in topology.links))
    measured = with_measured_links(topology, timed(faster), "here")
    again = with_measured_links(measured, timed(topology), "there")
    assert measured.hash == again.hash == topology.hash == pickle.loads(pickle.dumps(measured)).hash
    assert measured.described == again.described == topology.links != measured.links
    assert (measured.links_source, again.links_source) == ("here", "there")
    assert Communication(measured).hash != Communication(topology).hash


@pytest.mark.parametrize("name", ["local:2", "local:4", "emulated:2x2@200Mbit/s"])
def test_a_later_measurement_replaces_an_earlier_one(name: str) -> None:
    topology = preset(name)
    later = timed(topology)
    slower = {Operation.ALL_REDUCE: 9.0, Operation.ALL_TO_ALL: 7.0, Operation.STEP_SUM: 12.0, Operation.STEP_MESSAGE: 5.0}
    earlier = [
        replace(one, seconds=tuple(2 * slower.get(one.probe.operation, 1.0) * s for s in one.seconds), cpu_seconds=one.seconds[0] / 2)
        for one in later
    ]
    alone, first = with_measured_links(topology, later, "later"), with_measured_links(topology, earlier, "earlier")
    assert first.latency_factor != alone.latency_factor and first.cpu_overhead != alone.cpu_overhead
    assert with_measured_links(first, later, "later") == alone


@pytest.mark.parametrize(("within_ms", "expected"), [(8.0, (6.0, 8.0)), (1.5, (1.0, 3.0))])
def test_small_sums_take_what_they_take_longer_within_a_step(within_ms: float, expected: tuple[float, float]) -> None:
    """By themselves those of two devices take 1 ms and those of four 3: what they take longer within a step is added."""
    topology = cluster([1, 1, 1, 1], CPU)
    taken, communication = {2: 1e-3, 4: 3e-3}, Communication(topology)
    timings = []
    for probe in probes_for(topology):
        seconds = modelled_seconds(communication, probe)
        if probe.operation is Operation.ALL_REDUCE:
            seconds += taken[len(probe.devices)] - modelled_seconds(communication, replace(probe, size_bytes=0))
        elif probe.operation is Operation.STEP_SUM:
            seconds = within_ms / 1e3
        timings.append(LinkTiming(probe, (max(1e-9, seconds),) * 5, 0.0))
    measured = Communication(with_measured_links(topology, timings))
    found = [1e3 * modelled_seconds(measured, Probe(Operation.ALL_REDUCE, devices, STEP_BYTES)) for devices in ((0, 1), (0, 1, 2, 3))]
    assert found == pytest.approx(expected, rel=0.01)


def test_a_links_bandwidth_is_what_the_largest_sizes_have_of_it() -> None:
    """100 MB/s to all-to-alls, of which what the links hold back makes a start of 1 ms; a loop of exchanges has 80 MB/s of it."""
    topology = cluster([1, 1], CPU)
    taken = {Operation.EXCHANGE: lambda size: 1e-3 + size / 80e6, Operation.ALL_TO_ALL: lambda size: max(1e-3, size / 100e6 - 1e-3)}
    timings = [
        replace(one, seconds=(taken[one.probe.operation](one.probe.size_bytes),)) if one.probe.operation in taken else one
        for one in timed(topology)
    ]
    both = with_measured_links(topology, timings)
    loop_only = with_measured_links(topology, [one for one in timings if one.probe.operation is not Operation.ALL_TO_ALL])
    assert [link.bandwidth_bytes_per_second for link in both.links] == pytest.approx([100e6] * len(topology.links))
    assert [link.bandwidth_bytes_per_second for link in loop_only.links] == pytest.approx([80e6] * len(topology.links))


def test_messages_that_cost_nothing_per_byte_are_refused() -> None:
    topology = cluster([2])
    timings = [LinkTiming(Probe(op, (0, 1), size), (1e-3,), 0.0) for op in (Operation.MESSAGE, Operation.EXCHANGE) for size in (8, 1024)]
    assert fits(timings)[Operation.MESSAGE, (0, 1)].beta_seconds_per_byte == 0.0
    with pytest.raises(ProfileError, match="do not take longer when they are larger; measure again"):
        with_measured_links(topology, timings)


def test_ports_overheads_and_latency_factors_follow_from_what_was_measured() -> None:
    """Messages keep a device busy for 20 us and half of the time that their bytes take, collectives for 20 us and as much for a byte;
    all-reduces have three times a ring's latency."""
    topology = cluster([1, 1, 1, 1], CPU)  # 1 GB/s at the device, 100 MB/s between hosts, 10 us per link
    communication = Communication(topology)
    timings = []
    for probe in probes_for(topology):
        seconds = modelled_seconds(communication, probe)
        if probe.operation in (Operation.ALL_REDUCE, Operation.STEP_SUM):
            seconds += 2 * modelled_seconds(communication, replace(probe, size_bytes=0))
        cold = probe.operation in COLD_PENALTIES
        timings.append(LinkTiming(probe, (max(1e-9, seconds),) * 5, 0.0 if cold else 2e-5 + 0.5 * probe.size_bytes / 1e8))
    measured = with_measured_links(topology, timings)
    devices = {port.link: port.device for port in measured.ports}
    assert devices == {link.index: link.index // 2 if link.index < 8 else None for link in topology.links}  # a device's links come first
    for port in measured.ports:
        assert (port.fixed_ns, port.permille) == (pytest.approx(20_000, abs=2), pytest.approx(500, abs=1))
    ring, direct = {2: 500, 4: 333}, {2: 500, 4: 167}  # of the time of three halves, or three times, as many bytes on a link
    for shares, permille in ((measured.cpu_overhead.all_reduce, ring), (measured.cpu_overhead.exchange, direct)):
        assert dict(shares) == {n: Share(pytest.approx(20_000, abs=2), pytest.approx(permille[n], rel=0.02)) for n in (2, 4)}
    assert dict(measured.latency_factor.all_reduce) == {2: pytest.approx(3.0, rel=1e-3), 4: pytest.approx(3.0, rel=1e-3)}
    assert dict(measured.latency_factor.exchange) == {2: pytest.approx(1.0, rel=1e-3), 4: pytest.approx(1.0, rel=1e-3)}
    found = Communication(measured)
    for timing in timings:
        assert modelled_seconds(found, timing.probe) == pytest.approx(timing.typical_seconds, rel=0.01, abs=1e-8)


def test_what_sends_for_gpus_does_not_keep_them_busy() -> None:
    topology = cluster([1, 1])
    measured = with_measured_links(topology, timed(topology))
    assert (measured.ports, measured.cpu_overhead) == ((), NO_CPU_OVERHEAD)


def test_a_wait_costs_a_part_of_what_follows_up_to_what_was_measured() -> None:
    """A tile of 2 ms takes 0.6 ms longer behind a sum, one of 6 ms takes 1.4, and one of 9 ms no less than that; behind a message half."""
    topology = cluster([1, 1], CPU)
    assert with_measured_links(topology, timed(topology)).cold_penalty == NO_COLD_PENALTY
    taken = dict(zip(COLD_PENALTY_BYTES, ((2e-3, 0.6e-3), (6e-3, 1.4e-3), (9e-3, 1.3e-3)), strict=True))
    timings = []
    for timing in timed(topology):
        if timing.probe.operation in COLD_PENALTIES:
            itself, longer = taken[timing.probe.size_bytes]
            share = 0.5 if timing.probe.operation is Operation.STEP_WAIT else 1.0
            timing = replace(timing, seconds=(share * longer,), cpu_seconds=itself)
        timings.append(timing)
    penalty = with_measured_links(topology, timings).cold_penalty
    points = ((2_000_000, 600_000), (6_000_000, 1_400_000), (9_000_000, 1_400_000))
    assert penalty == ColdPenalty(points, tuple((itself, longer // 2) for itself, longer in points))
    assert [penalty.longer_ns(ms * 10**6) for ms in (0, 1, 4, 7, 20)] == [0, 300_000, 1_000_000, 1_400_000, 1_400_000]
    assert [penalty.longer_ns(ms * 10**6, behind_message=True) for ms in (1, 4, 20)] == [150_000, 500_000, 700_000]
    assert ColdPenalty(points).longer_ns(2_000_000, behind_message=True) == 600_000  # where that was not measured
    assert Communication(replace(topology, cold_penalty=penalty)).hash != Communication(topology).hash


def test_what_is_longer_within_steps_is_longer_in_predictions() -> None:
    """A message by 1 ms, of which its ends are busy for 0.4 ms more each; a sum by 2 ms; an exchange by 3, its devices busy for 2 of it."""
    topology = cluster([1, 1, 1, 1], CPU)
    timings = timed(topology)
    within = {
        Operation.STEP_MESSAGE: lambda one: replace(one, seconds=(one.seconds[0] + 1e-3,), cpu_seconds=4e-4),
        Operation.STEP_SUM: lambda one: replace(one, seconds=(one.seconds[0] + 2e-3,)),
        Operation.STEP_EXCHANGE: lambda one: replace(one, seconds=(one.seconds[0] + 3e-3,), cpu_seconds=2e-3),
    }
    measured = with_measured_links(topology, [within.get(one.probe.operation, lambda one: one)(one) for one in timings])
    before, after = Communication(topology), Communication(measured)

    def longer(operation: Operation, devices: tuple[int, ...]) -> float:
        probe = Probe(operation, devices, 1024)
        return modelled_seconds(after, probe) - modelled_seconds(before, probe)

    assert longer(Operation.MESSAGE, (1, 2)) == pytest.approx(0.6e-3, rel=1e-2)
    assert longer(Operation.ALL_REDUCE, (0, 1, 2, 3)) == pytest.approx(2e-3, rel=1e-2)
    assert longer(Operation.ALL_TO_ALL, (0, 1, 2, 3)) == pytest.approx(3e-3, rel=1e-2)
    assert [port.fixed_ns for port in measured.ports] == pytest.approx([400_000] * len(measured.ports), abs=2)
    assert [share.fixed_ns for _, share in measured.cpu_overhead.all_reduce] == pytest.approx([0, 0], abs=2)
    assert [share.fixed_ns for _, share in measured.cpu_overhead.exchange] == pytest.approx([2_000_000] * 2, abs=2)


@pytest.mark.parametrize(("small_ns", "large_ns", "fixed_ns"), [(2_000_000, 2_500_000, 2_344_640), (2_000_000, 1_000_000, 2_000_000)])
def test_devices_are_as_busy_within_steps_as_with_the_size_that_makes_most_work(small_ns: int, large_ns: int, fixed_ns: int) -> None:
    """By themselves 1 us and, for each byte that a device sends each other one, 2.37 ns: 155,360 ns for 64 KiB and the rest."""
    topology = cluster([1, 1, 1, 1], CPU)
    per_byte = (2_500_000 - 2_344_640) / STEP_SIZES_BYTES[-1]
    timings = []
    for one in timed(topology):
        size = one.probe.size_bytes
        if one.probe.operation is Operation.ALL_TO_ALL:
            one = replace(one, cpu_seconds=1e-6 + 1e-9 * per_byte * size)
        elif one.probe.operation is Operation.STEP_EXCHANGE:
            one = replace(one, cpu_seconds=1e-9 * (large_ns if size > STEP_BYTES else small_ns))
        timings.append(one)
    share = with_measured_links(topology, timings).cpu_overhead.of_exchange(4)
    assert share.fixed_ns == pytest.approx(fixed_ns, rel=1e-3)
