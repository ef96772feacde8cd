"""In which order rings of an all-reduce pass their devices: one ring, or one for each NIC of a host.

A single ring enters and leaves each host once, so that it uses one NIC, however many there are. NCCL makes as many rings as NICs (its
channels), each of an equal part of the bytes: ring c enters every host at the device of NIC c, passes the others inside, and leaves by
NIC c again, so that it stays on one rail (NVIDIA/nccl, issues 412 and 1933).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from soap.cluster.topology import Topology

Orders = tuple[tuple[int, ...], ...]


def ring_orders(topology: Topology, devices: Sequence[int]) -> Orders:
    """The orders of the rings over these devices. One ring in ascending order, unless they are GPUs on several hosts, and messages between
    those of the same places in their hosts take ways of their own. Then a ring starts at each place that has one."""
    members = tuple(sorted(set(devices)))
    hosts: dict[int, list[int]] = {}
    for device in members:
        hosts.setdefault(topology.devices[device].host, []).append(device)
    groups = list(hosts.values())
    if len(groups) < 2 or any(topology.devices[device].type.kind == "cpu" for device in members):  # gloo has one ring
        return (members,)
    starts = _apart(topology, groups)
    if len(starts) < 2:
        return (members,)
    return tuple(tuple(device for group in groups for device in (*group[start:], *group[:start])) for start in starts)


def _apart(topology: Topology, groups: Sequence[Sequence[int]]) -> Sequence[int]:
    """Places that all hosts have, and whose routes from host to host share no link with those of other places here."""
    steps, places = [*pairwise(groups), (groups[-1], groups[0])], range(min(map(len, groups)))
    return _disjoint(topology, steps, _disjoint(topology, steps[:1], places))  # most clusters are told by their first two hosts


def _disjoint(topology: Topology, steps: Sequence[tuple[Sequence[int], Sequence[int]]], places: Sequence[int]) -> Sequence[int]:
    if len(places) < 2:
        return places
    chosen: list[int] = []
    taken: set[int] = set()
    for place in places:
        links = {link for one, following in steps for link in topology.route(one[place], following[place])}
        if not links & taken:
            chosen.append(place)
            taken |= links
    return chosen
