"""What to measure of a cluster's links, what came out, and which figures of the links follow from it.

``probes_for`` chooses messages and collectives between every kind of devices; ``soap.runtime.link_timing`` runs them between the real
ranks; ``fits`` makes a line of each kind's times, and ``with_measured_links`` a topology whose links have what the lines say.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import permutations
from statistics import median
from typing import NamedTuple

from soap.errors import ProfileError
from soap.interference import Crowding, Handling, Port, Restart, Share
from soap.profiles.alpha_beta import AlphaBeta, fit
from soap.simulator.communication import Communication
from soap.simulator.delivery import SMALLEST_EXCHANGE
from soap.topology import Topology

SIZES_BYTES = (1024, 16 * 1024, 128 * 1024, 512 * 1024, 2 * 2**20)
GROUP_SIZES = (2, 4, 8, 16, 32, 64)
MOST_TIMES = 10**4
"""That a timing has."""
LARGE_BYTES = 2**30
"""Beside which latencies are nothing."""
LEAST_LATENCY_SECONDS = 1e-9
LEAST_CPU_SECONDS = 1e-9


class Operation(StrEnum):
    """``message``: from the first device to the second. ``exchange``: both ways at once. ``all_to_all``: from each to each.

    ``step_message``, ``step_sum`` and ``step_exchange``: a few bytes from one tile to the next, or summed behind each tile, or from each
    to each, as a training step meets them (``soap.runtime.step_timing``). ``step_restart``: what a tile that reads so many bytes takes
    longer behind a sum.
    """

    MESSAGE = "message"
    EXCHANGE = "exchange"
    ALL_REDUCE = "all_reduce"
    ALL_TO_ALL = "all_to_all"
    STEP_MESSAGE = "step_message"
    STEP_SUM = "step_sum"
    STEP_EXCHANGE = "step_exchange"
    STEP_RESTART = "step_restart"


IN_STEPS = (Operation.STEP_MESSAGE, Operation.STEP_SUM, Operation.STEP_EXCHANGE, Operation.STEP_RESTART)
STEP_BYTES = 4
"""Of what is sent or summed within steps."""
LAYERS, ROWS, WIDTH = 1, 64, 192
SAMPLES, CHANNELS, SIDE, WINDOW = 2, 24, 16, 3
BLOCK_BYTES = 4 * (LAYERS * WIDTH**2 + SAMPLES * CHANNELS * SIDE**2 + (CHANNELS * WINDOW) ** 2)
"""Weights of so many layers (on so many rows), and what a convolution reads: a block of a tile's work."""
RESTART_BYTES = (BLOCK_BYTES, 4 * BLOCK_BYTES, 12 * BLOCK_BYTES)
"""Of what a tile reads that is timed behind sums: about a millisecond on a device with 0.4 cores, four, and twelve."""


@dataclass(frozen=True, slots=True)
class Probe:
    """One operation over these devices with so many bytes: of a message, of each device's buffer that is summed, or read by a tile."""

    operation: Operation
    devices: tuple[int, ...]
    size_bytes: int

    def __post_init__(self) -> None:
        between_two = self.operation in (Operation.MESSAGE, Operation.EXCHANGE, Operation.STEP_MESSAGE)
        if len(self.devices) < 2 or (between_two and len(self.devices) > 2):
            raise ProfileError(f"{self.operation} of devices {self.devices}: expected {'two' if between_two else 'at least two'} devices")


@dataclass(frozen=True, slots=True)
class LinkTiming:
    """How long a probe took, each time, in seconds of the slowest rank (of a collective: on average over the ranks, each from when it was
    ready itself); a message's one way. ``cpu_seconds``: processor time of one of its devices for one of it, which its computation does not
    get; of a restart the tile's, by itself. ``measured_at``: ISO 8601, UTC. ``scale``: of the emulation in which it was
    measured; times are the cluster's."""

    probe: Probe
    seconds: tuple[float, ...]
    cpu_seconds: float
    measured_at: str = ""
    scale: float = 1.0

    def __post_init__(self) -> None:
        if not self.seconds or min(self.seconds) <= 0:
            raise ProfileError(f"times {self.seconds} of {self.probe}: expected some above 0; measure again")

    @property
    def typical_seconds(self) -> float:
        """The median: what other programs do now and then counts little, but what happens in every other round of training counts."""
        return median(self.seconds)


_Lines = Mapping[tuple[Operation, tuple[int, ...]], AlphaBeta]


def probes_for(topology: Topology, sizes_bytes: Sequence[int] = SIZES_BYTES) -> list[Probe]:
    """Messages and exchanges of one pair of each kind (on one host, on two); collectives over devices of one host, over one device of each
    host, and over all, in groups of 2, 4, 8, … and whole. Of processors also those within steps, over a pair's devices and over
    all."""
    hosts = [own for own in _devices_by_host(topology) if own]
    inside = max(hosts, key=len)
    across = [own[0] for own in hosts]
    pairs = [tuple(own[:2]) for own in (inside, across) if len(own) > 1]
    groups: dict[tuple[int, ...], None] = {}
    for own in (inside, across, list(range(topology.device_count))):
        for count in (*GROUP_SIZES, len(own)):
            if 2 <= count <= len(own):
                groups[tuple(sorted(own[:count]))] = None
    wanted = [(operation, pair) for operation in (Operation.MESSAGE, Operation.EXCHANGE) for pair in pairs]
    wanted += [(operation, group) for operation in (Operation.ALL_REDUCE, Operation.ALL_TO_ALL) for group in groups]
    probes = [Probe(operation, devices, size) for operation, devices in wanted for size in sizes_bytes]
    if pairs and all(device.type.kind == "cpu" for device in topology.devices):
        everyone = tuple(range(topology.device_count))
        probes += [Probe(Operation.STEP_MESSAGE, pairs[-1], STEP_BYTES), Probe(Operation.STEP_SUM, everyone, STEP_BYTES)]
        probes += [Probe(Operation.STEP_EXCHANGE, everyone, STEP_BYTES)] if len(everyone) >= SMALLEST_EXCHANGE else []
        probes += [Probe(Operation.STEP_RESTART, everyone, size) for size in RESTART_BYTES]
    return probes


def fits(timings: Sequence[LinkTiming]) -> dict[tuple[Operation, tuple[int, ...]], AlphaBeta]:
    """By operation and devices, in the order of the measurements; of what has several sizes."""
    return {key: fit([t.probe.size_bytes for t in own], [t.typical_seconds for t in own]) for key, own in by_kind(timings).items()}


def cpu_fits(timings: Sequence[LinkTiming]) -> dict[tuple[Operation, tuple[int, ...]], AlphaBeta]:
    """The same of the processor time of one device."""
    return {
        key: fit([t.probe.size_bytes for t in own], [max(t.cpu_seconds, LEAST_CPU_SECONDS) for t in own])
        for key, own in by_kind(timings).items()
    }


def by_kind(timings: Sequence[LinkTiming]) -> dict[tuple[Operation, tuple[int, ...]], list[LinkTiming]]:
    """The timings of each operation over the same devices, but for those within steps."""
    found: dict[tuple[Operation, tuple[int, ...]], list[LinkTiming]] = defaultdict(list)
    for timing in timings:
        if timing.probe.operation not in IN_STEPS:
            found[timing.probe.operation, timing.probe.devices].append(timing)
    return dict(found)


def scales_of(timings: Sequence[LinkTiming]) -> list[float]:
    """The scales at which these were measured, the smallest first."""
    return sorted({timing.scale for timing in timings})


def is_enough(topology: Topology, timings: Sequence[LinkTiming]) -> bool:
    """Whether all messages and exchanges were measured, from which the links' figures follow, and what they are within steps; at one
    scale."""
    known, needed = {timing.probe for timing in timings}, (Operation.MESSAGE, Operation.EXCHANGE, *IN_STEPS)
    complete = all(probe in known for probe in probes_for(topology) if probe.operation in needed)
    return complete and len(scales_of(timings)) == 1


def modelled_seconds(communication: Communication, probe: Probe) -> float:
    """What the simulator says that a probe takes of its links; nothing for a restart."""
    size, devices = probe.size_bytes, probe.devices
    match probe.operation:
        case Operation.MESSAGE | Operation.STEP_MESSAGE:
            return communication.transfer_ns(size, *devices) / 1e9
        case Operation.ALL_REDUCE | Operation.STEP_SUM:
            return communication.allreduce(size, devices)[0] / 1e9
        case Operation.STEP_RESTART:
            return 0.0
    return communication.exchange_ns([(a, b, size) for a in devices for b in devices if a != b]) / 1e9


def with_measured_links(topology: Topology, timings: Sequence[LinkTiming], source: str = "") -> Topology:
    """The same cluster with links that have the measured latency and bandwidth; ``source``: where from, in one line.

    Of a route between two devices of one host, each link has the bandwidth of an exchange between two of them and an equal part of the
    message's latency. Links that only routes between hosts use have an exchange's between hosts, and an equal part of what remains of that
    message's latency. Latencies are those within steps, where these were measured. What was not measured stays. Devices that are processors
    have ports (see ``_port``), and are slower behind a wait.
    """
    found, busy = fits(timings), cpu_fits(timings)
    within = _within_steps(timings, found, busy)
    ports: dict[int, Port] = {}
    inside: dict[int, tuple[float, float]] = {}
    across: dict[int, tuple[float, float]] = {}
    for figures, same_host in ((inside, True), (across, False)):
        for (operation, devices), line in found.items():
            if operation is not Operation.MESSAGE or (topology.devices[devices[0]].host == topology.devices[devices[1]].host) != same_host:
                continue
            exchange = found.get((Operation.EXCHANGE, devices), line)
            if exchange.beta_seconds_per_byte <= 0:
                raise ProfileError(f"messages between devices {devices} take no longer the larger they are; measure again")
            route = topology.route(devices[0], devices[1])
            known = [link for link in route if link in inside]
            left = line.alpha_seconds + within.message.seconds - sum(inside[link][1] for link in known)
            each = max(left / max(1, len(route) - len(known)), LEAST_LATENCY_SECONDS)
            for link in _alike(topology, [link for link in route if link not in known], same_host):
                figures[link] = 1 / exchange.beta_seconds_per_byte, each
                ports[link] = _port(topology, link, busy[operation, devices], exchange, within.message.busy_seconds)
    measured = {**across, **inside}
    links = list(topology.links)
    for link, (bandwidth, latency) in measured.items():
        links[link] = replace(links[link], bandwidth_bytes_per_second=bandwidth, latency_seconds=latency)
    described = topology.described or topology.links
    made = replace(topology, links=tuple(links), described=described, links_source=source)
    made = replace(made, crowding=_crowding(made, found, within), restart=_restart(timings))
    if any(device.type.kind != "cpu" for device in topology.devices):
        return made  # what sends there is not what computes
    return replace(made, ports=tuple(ports[i] for i in sorted(ports)), handling=_handling(made, busy, within))


_BY_ITSELF = {
    Operation.STEP_MESSAGE: Operation.MESSAGE,
    Operation.STEP_SUM: Operation.ALL_REDUCE,
    Operation.STEP_EXCHANGE: Operation.ALL_TO_ALL,
}


class _Longer(NamedTuple):
    """How many seconds longer something takes within a step than by itself, and for how long it keeps a device busier there."""

    seconds: float = 0.0
    busy_seconds: float = 0.0


class _WithinSteps(NamedTuple):
    """Of a message beside what it keeps its ends busier: the sender's end is no part of it, but its port's."""

    message: _Longer = _Longer()
    all_reduce: _Longer = _Longer()
    all_to_all: _Longer = _Longer()


def _within_steps(timings: Sequence[LinkTiming], found: _Lines, busy: _Lines) -> _WithinSteps:
    """From what was measured; nothing if it was not. Never less than nothing."""
    more = _WithinSteps()
    for timing in timings:
        operation, size = _BY_ITSELF.get(timing.probe.operation), timing.probe.size_bytes
        if operation is not None and (operation, timing.probe.devices) in found:
            longer = timing.typical_seconds - found[operation, timing.probe.devices].seconds(size)
            busier = max(0.0, timing.cpu_seconds - busy[operation, timing.probe.devices].seconds(size))
            if operation is Operation.MESSAGE:
                longer -= busier
            more = more._replace(**{operation.value: _Longer(max(0.0, longer), busier)})
    return more


def _crowding(topology: Topology, found: _Lines, within: _WithinSteps) -> Crowding:
    """From the latencies of collectives that were measured, beside what the links' latencies make of them: of each number of devices those
    over most hosts. An exchange as a whole has no less than a message's, as bounds assume."""
    communication = Communication(topology)
    factors: dict[Operation, dict[int, float]] = {Operation.ALL_REDUCE: {}, Operation.ALL_TO_ALL: {}}
    for (operation, devices), line in _collectives(topology, found):
        modelled = modelled_seconds(communication, Probe(operation, devices, 0))
        factor = (line.alpha_seconds + getattr(within, operation.value).seconds) / modelled
        least = 1 / (len(devices) - 1) if operation is Operation.ALL_TO_ALL else 0.0
        factors[operation][len(devices)] = max(factor, least)
    return Crowding(*(tuple(sorted(own.items())) for own in factors.values()))


def _handling(topology: Topology, busy: _Lines, within: _WithinSteps) -> Handling:
    """From the processor's time of collectives that were measured: of each number of devices those over most hosts."""
    communication = Communication(topology)
    shares: dict[Operation, dict[int, Share]] = {Operation.ALL_REDUCE: {}, Operation.ALL_TO_ALL: {}}
    for (operation, devices), line in _collectives(topology, busy):
        nothing, all_of_it = (modelled_seconds(communication, Probe(operation, devices, size)) for size in (0, LARGE_BYTES))
        fixed = line.alpha_seconds + getattr(within, operation.value).busy_seconds
        permille = 1000 * line.beta_seconds_per_byte * LARGE_BYTES / (all_of_it - nothing)
        shares[operation][len(devices)] = Share(round(1e9 * fixed), round(permille))
    return Handling(*(tuple(sorted(own.items())) for own in shares.values()))


def _collectives(topology: Topology, lines: _Lines) -> list[tuple[tuple[Operation, tuple[int, ...]], AlphaBeta]]:
    """Sums and exchanges of all devices with all, those over fewer hosts first."""
    own = [entry for entry in lines.items() if entry[0][0] in (Operation.ALL_REDUCE, Operation.ALL_TO_ALL)]
    return sorted(own, key=lambda entry: len({topology.devices[device].host for device in entry[0][1]}))


def _restart(timings: Sequence[LinkTiming]) -> Restart:
    """How much longer tiles took behind sums, by how long they take on one device; longer tiles no less than shorter ones."""
    points: list[tuple[int, int]] = []
    own = [timing for timing in timings if timing.probe.operation is Operation.STEP_RESTART]
    for timing in sorted(own, key=lambda timing: timing.cpu_seconds):
        alone_ns, longer_ns = round(1e9 * timing.cpu_seconds), round(1e9 * timing.typical_seconds)
        before_ns, less_ns = points[-1] if points else (0, 0)
        if alone_ns > before_ns:
            points.append((alone_ns, max(less_ns, longer_ns)))
    return Restart(tuple(points))


def _port(topology: Topology, link: int, busy: AlphaBeta, exchange: AlphaBeta, busier_seconds: float) -> Port:
    """What a device at an end of a link is busy with messages over it: seconds per byte as a part of an exchange's, what a message of
    no bytes takes, and what it takes longer within steps."""
    names = {device.name: device.index for device in topology.devices}
    ends = (topology.links[link].source, topology.links[link].target)
    device = next((names[end] for end in ends if end in names), None)
    permille = round(1000 * busy.beta_seconds_per_byte / exchange.beta_seconds_per_byte)
    return Port(link, device, max(0, round(1e9 * (busy.alpha_seconds + busier_seconds))), max(0, permille))


def _alike(topology: Topology, links: Sequence[int], same_host: bool) -> list[int]:
    """All links that have the declared figures of one of these, and the same part in routes inside of a host."""
    local = {link for own in _devices_by_host(topology) for a, b in permutations(own, 2) for link in topology.route(a, b)}
    kinds = {(topology.links[i].bandwidth_bytes_per_second, topology.links[i].latency_seconds) for i in links}
    return [
        link.index
        for link in topology.links
        if (link.bandwidth_bytes_per_second, link.latency_seconds) in kinds and (link.index in local) == same_host
    ]


def _devices_by_host(topology: Topology) -> list[list[int]]:
    hosts: list[list[int]] = [[] for _ in topology.hosts]
    for device in topology.devices:
        hosts[device.host].append(device.index)
    return hosts
