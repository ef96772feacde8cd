"""What to measure of a cluster's links, and the results. ``probes_for`` chooses messages and collectives between every kind of devices.
``soap.measure.link_timing`` runs them between the real ranks. ``fits`` makes a line of each kind's times, and
``with_measured_links`` a topology whose links have the figures of these lines.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import permutations
from statistics import median
from typing import Annotated, Any, ClassVar, NamedTuple

import numpy as np

from soap.cluster.overheads import NO_CPU_OVERHEAD, NO_LATENCY_FACTOR, ColdPenalty, CollectiveLatencyFactor, CpuOverhead, Port, Share
from soap.cluster.topology import Topology
from soap.errors import ProfileError
from soap.model.json_text import Form, Schema, read_as, record, schema_of
from soap.plan.delivery import SMALLEST_EXCHANGE
from soap.simulator.communication.prices import Communication


@dataclass(frozen=True, slots=True)
class AlphaBeta:
    """A time of ``alpha_seconds``, and ``beta_seconds_per_byte`` more a byte. ``deviation``: the median of |fit / measured - 1|."""

    alpha_seconds: float
    beta_seconds_per_byte: float
    deviation: float

    def seconds(self, size_bytes: int) -> float:
        """Seconds for so many bytes."""
        return self.alpha_seconds + self.beta_seconds_per_byte * size_bytes


def fit(sizes_bytes: Sequence[int], seconds: Sequence[float]) -> AlphaBeta:
    """The line with the least sum of |log(fit / measured)| among the lines through two of the points, and those through one that are
    level or begin at 0. Neither figure is negative.

    Logarithms, because small and large messages matter alike, and half the time is as wrong as twice the time. By |fit / measured - 1|
    a time of zero would only be an error of one, and a level line through some short messages would seem good enough for all. Absolute,
    not squared, so that a measurement which another program has slowed down counts little. ProfileError without two different sizes, or
    for times that are not above 0.
    """
    x, y = np.asarray(sizes_bytes, float), np.asarray(seconds, float)
    if x.shape != y.shape or len(np.unique(x)) < 2 or (x < 0).any() or not (np.isfinite(y) & (y > 0)).all():
        raise ProfileError("a fit needs times above 0 of at least two different sizes; measure more sizes")
    first, second = np.triu_indices(len(x), 1)
    apart = x[first] != x[second]
    first, second = first[apart], second[apart]
    slopes = (y[second] - y[first]) / (x[second] - x[first])
    level, steep = np.zeros_like(y), y[x > 0] / x[x > 0]
    betas = np.concatenate([slopes, level, steep])
    alphas = np.concatenate([y[first] - slopes * x[first], y, np.zeros_like(steep)])
    legal = (betas >= 0) & (alphas >= 0)
    alphas, betas = alphas[legal], betas[legal]
    ratios = (alphas[:, None] + betas[:, None] * x) / y
    with np.errstate(divide="ignore"):  # a line that begins at 0 is infinitely wrong about size 0
        best = int(np.abs(np.log(ratios)).sum(axis=1).argmin())
    return AlphaBeta(float(alphas[best]), float(betas[best]), float(np.median(np.abs(ratios[best] - 1))))


SIZES_BYTES = (1024, 16 * 1024, 128 * 1024, 512 * 1024, 2 * 2**20)
QUICK_SIZES_BYTES = (1024, 128 * 1024, 2 * 2**20)
GROUP_SIZES = (2, 4, 8, 16, 32, 64)
MOST_TIMES = 10**4
"""Most times that one timing holds."""
LEAST_CPU_SECONDS = 1e-9


class Operation(StrEnum):
    """``message``: from the first device to the second. ``exchange``: both ways at once. ``all_to_all``: from each to each.
    ``step_message``, ``step_sum`` and ``step_exchange``: bytes from one tile to the next, summed behind each tile, or from each to
    each, as a training step has them (``soap.measure.link_timing``). ``step_restart``, ``step_wait``: how much longer a tile that reads so
    many bytes takes behind a sum of all devices, and behind a message of one other."""

    MESSAGE = "message"
    EXCHANGE = "exchange"
    ALL_REDUCE = "all_reduce"
    ALL_TO_ALL = "all_to_all"
    STEP_MESSAGE = "step_message"
    STEP_SUM = "step_sum"
    STEP_EXCHANGE = "step_exchange"
    STEP_COLD_PENALTY = "step_restart"
    STEP_WAIT = "step_wait"


COLD_PENALTIES = (Operation.STEP_COLD_PENALTY, Operation.STEP_WAIT)
IN_STEPS = (Operation.STEP_MESSAGE, Operation.STEP_SUM, Operation.STEP_EXCHANGE, *COLD_PENALTIES)
NEEDED = (Operation.MESSAGE, Operation.EXCHANGE, *IN_STEPS)
"""Operations that must have been measured before predictions use any."""
STEP_BYTES = 4
"""Bytes that are sent or summed within steps."""
STEP_SIZES_BYTES = (STEP_BYTES, 64 * 1024)
"""Bytes of messages, and from each device to each other one, within steps: a few bytes, and enough that packing them takes time."""
LAYERS, ROWS, WIDTH = 1, 64, 192
SAMPLES, CHANNELS, SIDE, WINDOW = 2, 24, 16, 3
BLOCK_BYTES = 4 * (LAYERS * WIDTH**2 + SAMPLES * CHANNELS * SIDE**2 + (CHANNELS * WINDOW) ** 2)
"""Bytes that one block of a tile's work reads: the weights of its layers, and the operands of its convolution."""
COLD_PENALTY_BYTES = (BLOCK_BYTES, 4 * BLOCK_BYTES, 12 * BLOCK_BYTES)
"""Bytes read by the tiles that are timed behind a wait: about one, four and twelve milliseconds on a device with 0.4 cores."""


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
    """Times of one probe, in seconds of the slowest rank (of a collective: the average over the ranks, each from when it was ready
    itself). A message's time is one way. ``cpu_seconds``: processor time that one operation takes from one of its devices' computation;
    of a cold penalty the tile's own time. ``measured_at``: ISO 8601, UTC. ``scale``: of the emulation in which it was measured; times are
    the cluster's."""

    probe: Probe
    seconds: tuple[float, ...]
    cpu_seconds: float
    measured_at: str = ""
    scale: float = 1.0
    json_form: ClassVar[Form]

    def __post_init__(self) -> None:
        if not self.seconds or min(self.seconds) <= 0:
            raise ProfileError(f"times {self.seconds} of {self.probe}: expected some above 0; measure again")

    @property
    def typical_seconds(self) -> float:
        """The median: what other programs do now and then counts little, but what happens in every other round of training counts."""
        return median(self.seconds)


Lines = Mapping[tuple[Operation, tuple[int, ...]], AlphaBeta]
"""The key by which probes of different sizes belong together: operation and devices."""


def probes_for(topology: Topology, sizes_bytes: Sequence[int] = SIZES_BYTES) -> list[Probe]:
    """Messages and exchanges of one pair of each kind (on one host, on two). Collectives over devices of one host, over one device of
    each host, and over all, in groups of 2, 4, 8, … and whole. Of processors also those within steps, over a pair's devices and over
    all."""
    hosts = [own for own in devices_by_host(topology) if own]
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
        probes += [Probe(Operation.STEP_MESSAGE, pairs[-1], size) for size in STEP_SIZES_BYTES]
        probes.append(Probe(Operation.STEP_SUM, everyone, STEP_BYTES))
        exchanged = STEP_SIZES_BYTES if len(everyone) >= SMALLEST_EXCHANGE else ()
        probes += [Probe(Operation.STEP_EXCHANGE, everyone, size) for size in exchanged]
        probes += [Probe(operation, everyone, size) for operation in COLD_PENALTIES for size in COLD_PENALTY_BYTES]
    return probes


def quick_probes(topology: Topology) -> list[Probe]:
    """Those of them that say most, for a measurement of a few seconds: three sizes, of collectives two, sums over a pair and over all,
    exchanges over all; within steps both sizes of messages, one of exchanges, and one cold penalty of each kind. None of
    these where devices share cores: tiles across them are slower for that alone, which their own time has in it."""
    whole, ends = topology.device_count, (QUICK_SIZES_BYTES[0], QUICK_SIZES_BYTES[-1])

    def says_much(probe: Probe) -> bool:
        match probe.operation:
            case Operation.ALL_REDUCE:
                return len(probe.devices) in (2, whole) and probe.size_bytes in ends
            case Operation.ALL_TO_ALL:
                return len(probe.devices) == whole >= SMALLEST_EXCHANGE and probe.size_bytes in ends
            case Operation.STEP_EXCHANGE:
                return probe.size_bytes == STEP_BYTES
            case Operation.STEP_COLD_PENALTY | Operation.STEP_WAIT:
                return probe.size_bytes == COLD_PENALTY_BYTES[1] and whole <= sum(host.cpu_cores for host in topology.hosts)
        return True

    return [probe for probe in probes_for(topology, QUICK_SIZES_BYTES) if says_much(probe)]


def fits(timings: Sequence[LinkTiming]) -> dict[tuple[Operation, tuple[int, ...]], AlphaBeta]:
    """A line of each operation over the same devices that was measured in several sizes, in the order of the measurements."""
    return {key: fit([t.probe.size_bytes for t in own], [t.typical_seconds for t in own]) for key, own in by_kind(timings).items()}


def cpu_fits(timings: Sequence[LinkTiming]) -> dict[tuple[Operation, tuple[int, ...]], AlphaBeta]:
    """The same for the processor time of one device."""
    return {
        key: fit([t.probe.size_bytes for t in own], [max(t.cpu_seconds, LEAST_CPU_SECONDS) for t in own])
        for key, own in by_kind(timings).items()
    }


def by_kind(timings: Sequence[LinkTiming]) -> dict[tuple[Operation, tuple[int, ...]], list[LinkTiming]]:
    """The timings of each operation over the same devices, without those within steps."""
    found: dict[tuple[Operation, tuple[int, ...]], list[LinkTiming]] = defaultdict(list)
    for timing in timings:
        if timing.probe.operation not in IN_STEPS:
            found[timing.probe.operation, timing.probe.devices].append(timing)
    return dict(found)


def scales_of(timings: Sequence[LinkTiming]) -> list[float]:
    """The scales at which these were measured, the smallest first."""
    return sorted({timing.scale for timing in timings})


def is_enough(topology: Topology, timings: Sequence[LinkTiming]) -> bool:
    """Whether predictions can use them: all messages and exchanges were measured, and also those within steps, all at one scale."""
    known = {timing.probe for timing in timings}
    complete = all(probe in known for probe in probes_for(topology) if probe.operation in NEEDED)
    return complete and len(scales_of(timings)) == 1


def devices_by_host(topology: Topology) -> list[list[int]]:
    """Numbers of each host's devices, ascending."""
    hosts: list[list[int]] = [[] for _ in topology.hosts]
    for device in topology.devices:
        hosts[device.host].append(device.index)
    return hosts


MOST_SECONDS = 10**6


def probe_text(probe: Probe) -> str:
    """The probe as one word."""
    return f"{probe.operation}:{'-'.join(map(str, probe.devices))}:{probe.size_bytes}"


def encode_timing(timing: LinkTiming) -> dict[str, Any]:
    """The timing as plain JSON values, with times in whole nanoseconds, which ``decode_timing`` reads."""
    return {
        "operation": timing.probe.operation.value,
        "devices": list(timing.probe.devices),
        "size_bytes": timing.probe.size_bytes,
        "times_ns": [max(1, round(1e9 * one)) for one in timing.seconds],
        "cpu_ns": max(0, round(1e9 * timing.cpu_seconds)),
        "measured_at": timing.measured_at,
        "scale": timing.scale,
    }


def decode_timing(given: Mapping[str, Any]) -> LinkTiming:
    """Read a timing from values that its schema allows."""
    probe = Probe(Operation(given["operation"]), tuple(given["devices"]), given["size_bytes"])
    return LinkTiming(probe, tuple(one / 1e9 for one in given["times_ns"]), given["cpu_ns"] / 1e9, given["measured_at"], given["scale"])


_LONGEST_NS = MOST_SECONDS * 10**9
_RECORD = record(
    operation=Operation,
    devices=Annotated[tuple[Annotated[int, Schema(minimum=0, maximum=2**20)], ...], Schema(minItems=2, uniqueItems=True)],
    size_bytes=Annotated[int, Schema(minimum=1, maximum=2**62)],
    times_ns=Annotated[tuple[Annotated[int, Schema(minimum=1, maximum=_LONGEST_NS)], ...], Schema(minItems=1, maxItems=MOST_TIMES)],
    cpu_ns=Annotated[int, Schema(minimum=0, maximum=_LONGEST_NS)],
    measured_at=Annotated[str, Schema(maxLength=40)],
    scale=Annotated[float, Schema(exclusiveMinimum=0, maximum=1)],
)
LinkTiming.json_form = Form(lambda: schema_of(_RECORD), lambda given: decode_timing(read_as(_RECORD, given)), encode_timing)


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
    """How busy messages over a link keep the device at its end: seconds per byte, for no bytes, and the extra within steps."""
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
