"""What hops that run at once put on the links of a topology.

NCCL takes the link that joins two GPUs of a host, even if a message over others would be faster: GPUs do not pass on what is for another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import lcm
from typing import NamedTuple

import numpy as np

from soap.cluster.topology import Topology
from soap.simulator.communication.algorithms import Hop, Step

MANY_HOPS = 64
"""From this many hops in a step on, arrays are faster than one route after the other."""


ROUTES: Mapping[Hop, int] = {}
"""As ``direct`` of ``loads``: all hops take the routes of messages."""


class Loads(NamedTuple):
    """Hops that run at once: latency of the slowest, seconds per byte of the busiest link, and link number -> hops that cross it."""

    latency_seconds: float
    share: float
    crossings: dict[int, int]


def loads(topology: Topology, hops: Sequence[Hop], direct: Mapping[Hop, int] = ROUTES) -> Loads:
    """Loads of hops that each move one byte. ``direct``: hops that take a link of their own instead of the route."""
    if len(hops) >= MANY_HOPS:
        return _many_loads(topology, hops, direct)
    routes = [(direct[hop],) if hop in direct else topology.route(*hop) for hop in hops]
    crossings: dict[int, int] = {}
    for route in routes:
        for link in route:
            crossings[link] = crossings.get(link, 0) + 1
    latency = max(latency_seconds(topology, route) for route in routes)
    bandwidths = topology.effective_bandwidths
    return Loads(latency, max(count / bandwidths[link] for link, count in crossings.items()), crossings)


def step_shares(topology: Topology, todo: Sequence[Step], direct: Mapping[Hop, int] = ROUTES) -> tuple[dict[int, int], int]:
    """({link number: share}, parts): ``share / parts`` of the buffer cross the link in these steps; link numbers ascend."""
    parts = lcm(*(step.parts for step in todo))
    shares: dict[int, int] = {}
    known: dict[tuple[Hop, ...], Mapping[int, int]] = {}
    for step in todo:
        crossings = known.get(step.hops)
        if crossings is None:
            crossings = known[step.hops] = loads(topology, step.hops, direct).crossings
        each = step.repeats * (parts // step.parts)
        for link, count in crossings.items():
            shares[link] = shares.get(link, 0) + count * each
    return dict(sorted(shares.items())), parts


def _many_loads(topology: Topology, hops: Sequence[Hop], direct: Mapping[Hop, int]) -> Loads:
    """``loads`` with arrays. Latencies are added up in the order of the route, as there."""
    routes = topology.routes([source for source, _ in hops], [target for _, target in hops])
    for row, hop in enumerate(hops if direct else ()):
        if hop in direct:
            routes[row, 0], routes[row, 1:] = direct[hop], -1
    bandwidths, latencies = topology.link_figures
    along = np.zeros(len(routes))
    for column in routes.T:
        along += np.where(column < 0, 0.0, latencies[column])
    counts = np.bincount(routes[routes >= 0], minlength=len(topology.links))
    links = np.flatnonzero(counts)
    crossings = dict(zip(links.tolist(), counts[links].tolist(), strict=True))
    return Loads(float(along.max()), float((counts[links] / bandwidths[links]).max()), crossings)


def latency_seconds(topology: Topology, route: Sequence[int]) -> float:
    """The latencies of links, added up in their order."""
    seconds = 0.0
    for link in route:  # not ``sum``, which rounds differently from Python 3.12 on
        seconds += topology.links[link].latency_seconds
    return seconds
