"""Groups of devices that may be the stages of a pipeline: neighbours, host by host, in equal groups or by hosts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from soap.cluster.topology import Topology
from soap.strategy.grids import device_order

MOST_KINDS_ORDERED = 3
"""Up to so many kinds of groups all orders are tried: there are few of them."""


@dataclass(frozen=True, slots=True)
class StageGroups:
    """``devices``: of each group. ``kinds``: of each group, numbered from 0. ``classes``: of each kind, which groups are alike in all but
    their place. ``any_order``: whether a pipeline may take the groups in any order of their kinds."""

    devices: tuple[tuple[int, ...], ...]
    kinds: tuple[int, ...]
    classes: tuple[int, ...]
    any_order: bool

    def example(self, kind: int) -> tuple[int, ...]:
        """The devices of the first group of a kind."""
        return self.devices[self.kinds.index(kind)]

    def in_order(self, kinds: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """The groups as stages whose kinds are these."""
        left = {kind: [group for group, own in zip(self.devices, self.kinds, strict=True) if own == kind] for kind in set(kinds)}
        return tuple(left[kind].pop(0) for kind in kinds)

    def neighbours(self) -> dict[tuple[int, int], tuple[tuple[int, ...], tuple[int, ...]]]:
        """(kind, kind of a stage behind it) -> two groups of these kinds, for all that may follow each other, the last before the first
        included: interleaved stages go round."""
        count = len(self.devices)
        pairs = [(i, (i + 1) % count) for i in range(count)]
        if self.any_order:
            pairs += [(i, j) for i in range(count) for j in range(count) if i != j]
        found: dict[tuple[int, int], tuple[tuple[int, ...], tuple[int, ...]]] = {}
        for i, j in pairs:
            found.setdefault((self.kinds[i], self.kinds[j]), (self.devices[i], self.devices[j]))
        return found


def stage_groups(topology: Topology, most: int) -> Iterator[StageGroups]:
    """All divisions of a cluster's devices into at least two and at most so many groups of neighbours: equal ones, and hosts that differ in
    their number of devices."""
    order = device_order(topology)
    count = len(order)
    for stages in range(2, min(count, most) + 1):
        if count % stages == 0:
            width = count // stages
            yield _grouped(topology, [order[i * width : (i + 1) * width] for i in range(stages)])
    hosts: dict[int, list[int]] = {}
    for device in order:
        hosts.setdefault(topology.devices[device].host, []).append(device)
    if len({len(own) for own in hosts.values()}) > 1 and len(hosts) <= most:
        yield _grouped(topology, [tuple(own) for own in hosts.values()])


def single_devices(topology: Topology, devices: Sequence[int]) -> StageGroups:
    """Each of these devices is a group, in any order; those of one type, with equal memory, on one host are of one kind."""
    limits = topology.memory_limits
    looks = [(topology.devices[device].type.name, limits[device]) for device in devices]
    keys = [(look, topology.devices[device].host) for device, look in zip(devices, looks, strict=True)]
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    classes = {look: number for number, look in enumerate(dict.fromkeys(looks))}
    kinds = tuple(numbers[key] for key in keys)
    return StageGroups(tuple((device,) for device in devices), kinds, tuple(classes[look] for look, _ in numbers), any_order=True)


def _grouped(topology: Topology, groups: list[tuple[int, ...]]) -> StageGroups:
    """Groups that differ in their devices are of different kinds; also those on different hosts, where their order is given."""
    limits = topology.memory_limits
    looks = [tuple((topology.devices[device].type.name, limits[device]) for device in group) for group in groups]
    places = [tuple(topology.devices[device].host for device in group) for group in groups]
    ordered = 1 < len(set(looks)) <= MOST_KINDS_ORDERED
    keys = list(zip(looks, looks if ordered else places, strict=True))
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    classes = {look: number for number, look in enumerate(dict.fromkeys(looks))}
    return StageGroups(tuple(groups), tuple(numbers[key] for key in keys), tuple(classes[look] for look, _ in numbers), ordered)
