"""What-if over figures of a cluster: by how much each must be another one for the choice between a plan and data parallelism to turn over.

A plan's *gain* is data parallelism's time / its own; the choice turns over where the gain crosses 1. From the cluster as it is, each figure
is made larger and smaller in equal steps of its logarithm (``GRID``) up to a factor of 10; between the first two neighbours of which only
one turns the choice over, the place is bisected. A gain that crosses 1 twice within one step is not noticed.

How the gain varies between half and twice a figure is what a *tornado* plot shows, the widest range on top (Howard, "Decision Analysis:
Practice and Promise", 1988).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from math import sqrt

from soap.cluster.overheads import ColdPenalty, CpuOverhead, Share, Shares
from soap.cluster.topology import DeviceType, Topology
from soap.simulator.draws import links_between_hosts

MOST = 10.0
GRID = tuple(MOST ** (step / 6) for step in range(1, 7))
PRECISION = 1.01
"""A turning point is known within this factor."""
HALF, DOUBLE = 0.5, 2.0


class Figure(StrEnum):
    """What is made another one. RATE: arithmetic per second. MEMORY: bandwidth of devices' memory. INSIDE, BETWEEN: bandwidth of links
    inside hosts, and of those that lead from one to others. LATENCY: of all links. OVERHEAD: what communication costs devices, which is how
    little it overlaps with what they compute. LAUNCH: extra time of each kernel call."""

    RATE = "device rate"
    MEMORY = "memory bandwidth"
    INSIDE = "links inside hosts"
    BETWEEN = "links between hosts"
    LATENCY = "latency"
    OVERHEAD = "cost of communication to devices"
    LAUNCH = "time per kernel call"


@dataclass(frozen=True)
class Sensitivity:
    """How a plan's gain depends on one figure. ``below``, ``above``: the factors nearest to 1 at which the choice turns over; None: not
    within a factor of ``MOST``. ``usual``, ``at_half``, ``at_double``: the gain as it is, and at half and twice the figure. ``is_known``:
    whether the cluster has such a figure; if not, no factor changes anything."""

    figure: Figure
    below: float | None
    above: float | None
    usual: float
    at_half: float
    at_double: float
    is_known: bool = True

    @property
    def width(self) -> float:
        """The length of its bar in a tornado."""
        gains = (self.usual, self.at_half, self.at_double)
        return max(gains) - min(gains)


def sensitivities(gain: Callable[[Figure, float], float], known: Iterable[Figure]) -> list[Sensitivity]:
    """Every figure's, the widest range first. ``gain``: of the plan with a figure times a factor. ``known``: figures that there are."""
    there, found = set(known), []
    usual = gain(Figure.RATE, 1.0)
    for figure in Figure:
        if figure not in there:
            found.append(Sensitivity(figure, None, None, usual, usual, usual, is_known=False))
            continue

        def at(factor: float, figure: Figure = figure) -> float:
            return gain(figure, factor)

        turns = turning_point(at, upwards=False), turning_point(at, upwards=True)
        found.append(Sensitivity(figure, *turns, usual, at(HALF), at(DOUBLE)))
    return sorted(found, key=lambda one: (not one.is_known, -one.width, list(Figure).index(one.figure)))


def turning_point(gain: Callable[[float], float], *, upwards: bool) -> float | None:
    """The factor nearest to 1, above or below it, at which a gain gets to the other side of 1; None if it does not up to ``MOST`` or down
    to 1 / ``MOST``."""
    wins = gain(1.0) > 1
    near = 1.0
    for step in GRID:
        far = step if upwards else 1 / step
        if (gain(far) > 1) != wins:
            return _bisect(gain, near, far, wins=wins)
        near = far
    return None


def _bisect(gain: Callable[[float], float], near: float, far: float, *, wins: bool) -> float:
    """A factor on the far side of a turning point between these two, within ``PRECISION`` of it."""
    while max(near, far) > PRECISION * min(near, far):
        middle = sqrt(near * far)
        if (gain(middle) > 1) != wins:
            far = middle
        else:
            near = middle
    return far


def known_figures(topology: Topology) -> list[Figure]:
    """The figures that a cluster has: one of a single host has no links between hosts, and only measured links tell what communication
    costs devices."""
    between = links_between_hosts(topology)
    there = {
        Figure.INSIDE: not between.all(),
        Figure.BETWEEN: between.any(),
        Figure.LATENCY: any(link.latency_seconds for link in topology.links),
        Figure.OVERHEAD: with_figure(topology, Figure.OVERHEAD, 2.0) != topology,
        Figure.LAUNCH: any(device.type.kernel_seconds for device in topology.devices),
    }
    return [figure for figure in Figure if there.get(figure, True)]


def with_figure(topology: Topology, figure: Figure, factor: float) -> Topology:
    """The cluster with one of its figures times a factor."""
    match figure:
        case Figure.RATE | Figure.MEMORY | Figure.LAUNCH:
            return _with_devices(topology, figure, factor)
        case Figure.INSIDE | Figure.BETWEEN | Figure.LATENCY:
            return _with_links(topology, figure, factor)
        case Figure.OVERHEAD:
            return _with_overhead(topology, factor)


def _with_devices(topology: Topology, figure: Figure, factor: float) -> Topology:
    def of(kind: DeviceType) -> DeviceType:
        match figure:
            case Figure.RATE:
                return replace(kind, flops_per_second={dtype: rate * factor for dtype, rate in kind.flops_per_second.items()})
            case Figure.MEMORY:
                return replace(kind, memory_bandwidth_bytes_per_second=kind.memory_bandwidth_bytes_per_second * factor)
            case _:
                return replace(kind, kernel_seconds=kind.kernel_seconds * factor)

    devices = tuple(replace(device, type=of(device.type)) for device in topology.devices)
    hosts = tuple(host if host.core is None else replace(host, core=of(host.core)) for host in topology.hosts)
    return replace(topology, devices=devices, hosts=hosts)


def _with_links(topology: Topology, figure: Figure, factor: float) -> Topology:
    if figure is Figure.LATENCY:
        return replace(topology, links=tuple(replace(link, latency_seconds=link.latency_seconds * factor) for link in topology.links))
    between = links_between_hosts(topology)
    return replace(
        topology,
        links=tuple(
            replace(link, bandwidth_bytes_per_second=link.bandwidth_bytes_per_second * factor)
            if between[link.index] == (figure is Figure.BETWEEN)
            else link
            for link in topology.links
        ),
    )


def _with_overhead(topology: Topology, factor: float) -> Topology:
    def of(shares: Shares) -> Shares:
        return tuple((count, Share(round(own.fixed_ns * factor), round(own.permille * factor))) for count, own in shares)

    ports = tuple(
        replace(port, fixed_ns=round(port.fixed_ns * factor), permille=round(port.permille * factor)) for port in topology.ports
    )
    overhead = CpuOverhead(of(topology.cpu_overhead.all_reduce), of(topology.cpu_overhead.exchange))
    cold = topology.cold_penalty
    penalty = ColdPenalty(*(tuple((after, round(more * factor)) for after, more in own) for own in (cold.points, cold.behind_messages)))
    return replace(topology, ports=ports, cpu_overhead=overhead, cold_penalty=penalty)
