"""What to measure of a cluster's links, and the results. ``probes_for`` chooses messages and collectives between every kind of devices.
``soap.measure.link_timing`` runs them between the real ranks. ``fits`` makes a line of each kind's times, and ``link_figures`` a
topology whose links have the figures of these lines.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median
from typing import Any

import numpy as np

from soap.cluster.topology import Topology
from soap.errors import ProfileError
from soap.plan.delivery import SMALLEST_EXCHANGE


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
    """The timing as plain JSON values, with times in whole nanoseconds, as TIMING_SCHEMA describes them; ``decode_timing`` reads them."""
    return {
        "operation": timing.probe.operation.value,
        "devices": list(timing.probe.devices),
        "size_bytes": timing.probe.size_bytes,
        "times_ns": [max(1, round(1e9 * one)) for one in timing.seconds],
        "cpu_ns": max(0, round(1e9 * timing.cpu_seconds)),
        "measured_at": timing.measured_at,
        "scale": timing.scale,
    }


def decode_timing(record: Mapping[str, Any]) -> LinkTiming:
    """Read a timing from values that TIMING_SCHEMA allows."""
    probe = Probe(Operation(record["operation"]), tuple(record["devices"]), record["size_bytes"])
    return LinkTiming(probe, tuple(one / 1e9 for one in record["times_ns"]), record["cpu_ns"] / 1e9, record["measured_at"], record["scale"])


_LONGEST_NS = MOST_SECONDS * 10**9
_NS: dict[str, Any] = {"type": "integer", "minimum": 1, "maximum": _LONGEST_NS}
_PROPERTIES: dict[str, Any] = {
    "operation": {"enum": [operation.value for operation in Operation]},
    "devices": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 2**20}, "minItems": 2, "uniqueItems": True},
    "size_bytes": {"type": "integer", "minimum": 1, "maximum": 2**62},
    "times_ns": {"type": "array", "items": _NS, "minItems": 1, "maxItems": MOST_TIMES},
    "cpu_ns": {"type": "integer", "minimum": 0, "maximum": _LONGEST_NS},
    "measured_at": {"type": "string", "maxLength": 40},
    "scale": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
}
TIMING_SCHEMA: dict[str, Any] = {
    "type": "object", "properties": _PROPERTIES, "required": list(_PROPERTIES), "additionalProperties": False,
}  # fmt: skip
"""JSON schema of an encoded timing."""
