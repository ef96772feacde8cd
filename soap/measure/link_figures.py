"""Figures of a cluster's links, and of what communication costs processors, from the measurements between its ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import permutations
from typing import NamedTuple

from soap.cluster.overheads import NO_CPU_OVERHEAD, NO_LATENCY_FACTOR, ColdPenalty, CollectiveLatencyFactor, CpuOverhead, Port, Share
from soap.cluster.topology import Topology
from soap.errors import ProfileError
from soap.measure.link_probes import COLD_PENALTIES, AlphaBeta, Lines, LinkTiming, Operation, Probe, cpu_fits, devices_by_host, fits
from soap.simulator.communication.prices import Communication

LARGE_BYTES = 2**30
"""Bytes beside which latencies do not matter."""
LEAST_LATENCY_SECONDS = 1e-9


def modelled_seconds(communication: Communication, probe: Probe) -> float:
    """Simulated seconds of a probe on the topology's links; 0 for a probe of the cold penalty, which no link has."""
    size, devices = probe.size_bytes, probe.devices
    match probe.operation:
        case Operation.MESSAGE | Operation.STEP_MESSAGE:
            return communication.transfer_ns(size, *devices) / 1e9
        case Operation.ALL_REDUCE | Operation.STEP_SUM:
            return communication.allreduce(size, devices)[0] / 1e9
        case Operation.STEP_COLD_PENALTY | Operation.STEP_WAIT:
            return 0.0
    return communication.exchange_ns([(a, b, size) for a in devices for b in devices if a != b]) / 1e9


def with_measured_links(topology: Topology, timings: Sequence[LinkTiming], source: str = "") -> Topology:
    """The same cluster with links that have the measured latency and bandwidth. ``source``: where these are from, in one line.

    On a route between two devices of one host, each link has the bandwidth that two of them have both ways at once
    (``_seconds_per_byte``) and an equal part of the message's latency. Links that only routes between hosts use have the bandwidth of
    two devices on two hosts, and an equal part of what remains of that message's latency. Latencies are those within steps, if these
    were measured. Figures that were not measured stay. Devices that are processors get ports, costs of collectives, and are slower
    behind a wait.
    """
    found, busy = fits(timings), cpu_fits(timings)
    within = _within_steps(timings, found, busy)
    message = within.get(Operation.MESSAGE, _NOT_LONGER)
    ports: dict[int, Port] = {}
    inside: dict[int, tuple[float, float]] = {}
    across: dict[int, tuple[float, float]] = {}
    for figures, same_host in ((inside, True), (across, False)):
        for (operation, devices), line in found.items():
            if operation is not Operation.MESSAGE or (topology.devices[devices[0]].host == topology.devices[devices[1]].host) != same_host:
                continue
            per_byte = _seconds_per_byte(timings, devices, line)
            if per_byte <= 0:
                raise ProfileError(f"messages between devices {devices} do not take longer when they are larger; measure again")
            route = topology.route(devices[0], devices[1])
            known = [link for link in route if link in inside]
            left = line.alpha_seconds + message.seconds - sum(inside[link][1] for link in known)
            each = max(left / max(1, len(route) - len(known)), LEAST_LATENCY_SECONDS)
            for link in _alike(topology, [link for link in route if link not in known], same_host):
                figures[link] = 1 / per_byte, each
                ports[link] = _port(topology, link, busy[operation, devices], per_byte, message.busy_seconds)
    measured = {**across, **inside}
    links = list(topology.links)
    for link, (bandwidth, latency) in measured.items():
        links[link] = replace(links[link], bandwidth_bytes_per_second=bandwidth, latency_seconds=latency)
    described = topology.described or topology.links
    made = replace(topology, links=tuple(links), described=described, links_source=source, ports=())
    made = replace(made, latency_factor=NO_LATENCY_FACTOR, cpu_overhead=NO_CPU_OVERHEAD)  # of an earlier measurement, if there was one
    made = replace(made, latency_factor=_latency_factor(made, found, within), cold_penalty=_cold_penalty(timings))
    if any(device.type.kind != "cpu" for device in topology.devices):
        return made  # on GPUs the processor that sends is not the device that computes
    return replace(made, ports=tuple(ports[i] for i in sorted(ports)), cpu_overhead=_cpu_overhead(made, busy, within))


def _seconds_per_byte(timings: Sequence[LinkTiming], devices: tuple[int, ...], message: AlphaBeta) -> float:
    """Seconds per byte of two devices that send to each other at once: by how much longer the largest size takes than the one before,
    of exchanges or of all-to-alls, whichever uses the link better. Small sizes say little, because data that the links hold back is
    sent faster than it arrives. If neither was measured, a message's."""
    taken: dict[Operation, dict[int, float]] = {Operation.EXCHANGE: {}, Operation.ALL_TO_ALL: {}}
    for timing in timings:
        if timing.probe.operation in taken and timing.probe.devices == devices:
            taken[timing.probe.operation][timing.probe.size_bytes] = timing.typical_seconds
    slopes = []
    for own in taken.values():
        if len(own) > 1:
            before, largest = sorted(own)[-2:]
            slopes.append((own[largest] - own[before]) / (largest - before))
    return min(slopes, default=message.beta_seconds_per_byte)


_BY_ITSELF = {
    Operation.STEP_MESSAGE: Operation.MESSAGE,
    Operation.STEP_SUM: Operation.ALL_REDUCE,
    Operation.STEP_EXCHANGE: Operation.ALL_TO_ALL,
}


class _Longer(NamedTuple):
    """How many seconds longer an operation takes within a step than by itself, and for how much longer it keeps a device busy there."""

    seconds: float = 0.0
    busy_seconds: float = 0.0


_NOT_LONGER = _Longer()
_WithinSteps = Mapping[Operation, _Longer]
"""The difference from an operation by itself. Of a message the time that it keeps its ends busier is taken off: the sender's time
belongs to its port, not to the message."""


def _within_steps(timings: Sequence[LinkTiming], found: Lines, busy: Lines) -> _WithinSteps:
    """Differences from the measurements; zero if there are none, and never negative. Of several sizes the smallest says how much longer
    an operation takes, since its bytes take no time; the one with the most work for a device says for how much longer it keeps the
    device busy."""
    more: dict[Operation, _Longer] = {}
    for timing in sorted(timings, key=lambda timing: timing.probe.size_bytes):
        operation, size = _BY_ITSELF.get(timing.probe.operation), timing.probe.size_bytes
        if operation is None or (operation, timing.probe.devices) not in found:
            continue
        longer = timing.typical_seconds - found[operation, timing.probe.devices].seconds(size)
        busier = max(0.0, timing.cpu_seconds - busy[operation, timing.probe.devices].seconds(size))
        if operation is Operation.MESSAGE:
            longer -= busier
        smaller = more.setdefault(operation, _Longer(max(0.0, longer), busier))
        more[operation] = smaller._replace(busy_seconds=max(smaller.busy_seconds, busier))
    return more


def _latency_factor(topology: Topology, found: Lines, within: _WithinSteps) -> CollectiveLatencyFactor:
    """Factors from the measured latencies of collectives over what the links' latencies make of them: for each number of devices, those
    over most hosts. A whole exchange has at least a message's latency, as bounds assume."""
    communication = Communication(topology)
    factors: dict[Operation, dict[int, float]] = {Operation.ALL_REDUCE: {}, Operation.ALL_TO_ALL: {}}
    for (operation, devices), line in _collectives(topology, found):
        modelled = modelled_seconds(communication, Probe(operation, devices, 0))
        factor = (line.alpha_seconds + within.get(operation, _NOT_LONGER).seconds) / modelled
        least = 1 / (len(devices) - 1) if operation is Operation.ALL_TO_ALL else 0.0
        factors[operation][len(devices)] = max(factor, least)
    return CollectiveLatencyFactor(*(tuple(sorted(own.items())) for own in factors.values()))


def _cpu_overhead(topology: Topology, busy: Lines, within: _WithinSteps) -> CpuOverhead:
    """Costs from the measured processor time of collectives: for each number of devices, those over most hosts."""
    communication = Communication(topology)
    shares: dict[Operation, dict[int, Share]] = {Operation.ALL_REDUCE: {}, Operation.ALL_TO_ALL: {}}
    for (operation, devices), line in _collectives(topology, busy):
        nothing, all_of_it = (modelled_seconds(communication, Probe(operation, devices, size)) for size in (0, LARGE_BYTES))
        fixed = line.alpha_seconds + within.get(operation, _NOT_LONGER).busy_seconds
        permille = 1000 * line.beta_seconds_per_byte * LARGE_BYTES / (all_of_it - nothing)
        shares[operation][len(devices)] = Share(round(1e9 * fixed), round(permille))
    return CpuOverhead(*(tuple(sorted(own.items())) for own in shares.values()))


def _collectives(topology: Topology, lines: Lines) -> list[tuple[tuple[Operation, tuple[int, ...]], AlphaBeta]]:
    """Sums and exchanges of all devices with all; those over fewer hosts come first."""
    own = [entry for entry in lines.items() if entry[0][0] in (Operation.ALL_REDUCE, Operation.ALL_TO_ALL)]
    return sorted(own, key=lambda entry: len({topology.devices[device].host for device in entry[0][1]}))


def _cold_penalty(timings: Sequence[LinkTiming]) -> ColdPenalty:
    """The cold penalty: how much longer tiles take after a sum, and after a message, by how long they take without one."""
    behind = {operation: _points([timing for timing in timings if timing.probe.operation is operation]) for operation in COLD_PENALTIES}
    return ColdPenalty(behind[Operation.STEP_COLD_PENALTY], behind[Operation.STEP_WAIT])


def _points(own: Sequence[LinkTiming]) -> tuple[tuple[int, int], ...]:
    """The points of such a penalty. Longer tiles get no smaller one."""
    points: list[tuple[int, int]] = []
    for timing in sorted(own, key=lambda timing: timing.cpu_seconds):
        alone_ns, longer_ns = round(1e9 * timing.cpu_seconds), round(1e9 * timing.typical_seconds)
        before_ns, less_ns = points[-1] if points else (0, 0)
        if alone_ns > before_ns:
            points.append((alone_ns, max(less_ns, longer_ns)))
    return tuple(points)


def _port(topology: Topology, link: int, busy: AlphaBeta, seconds_per_byte: float, busier_seconds: float) -> Port:
    """How busy messages over a link keep the device at its end: its share of the link's seconds per byte, the time for a message
    without bytes, and the extra time within steps."""
    names = {device.name: device.index for device in topology.devices}
    ends = (topology.links[link].source, topology.links[link].target)
    device = next((names[end] for end in ends if end in names), None)
    permille = round(1000 * busy.beta_seconds_per_byte / seconds_per_byte)
    return Port(link, device, max(0, round(1e9 * (busy.alpha_seconds + busier_seconds))), max(0, permille))


def _alike(topology: Topology, links: Sequence[int], same_host: bool) -> list[int]:
    """All links with the same declared figures as one of these, and the same part in routes inside of a host."""
    local = {link for own in devices_by_host(topology) for a, b in permutations(own, 2) for link in topology.route(a, b)}
    kinds = {(topology.links[i].bandwidth_bytes_per_second, topology.links[i].latency_seconds) for i in links}
    return [
        link.index
        for link in topology.links
        if (link.bandwidth_bytes_per_second, link.latency_seconds) in kinds and (link.index in local) == same_host
    ]
