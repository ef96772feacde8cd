"""What keeping parameters on servers, or gathering rows of gradients, moves between devices, and what is then added up and updated.

A push and a pull per step as in Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014; a parameter in
several partitions, rows of sparse ones, and the sum over a host's devices before the network as in Kim et al., "Parallax: Sparsity-aware
Data Parallel Training of Deep Neural Networks", EuroSys 2019. No costs here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from soap.model.regions import Box
from soap.plan.flows import Round, box_bytes, joined
from soap.plan.plan import Plan, Served
from soap.plan.row_counts import DeviceLookups, row_bytes, touched_rows

INDEX_BYTES = 8
"""An index of a row."""

Group = tuple[int, ...]
"""Devices that push and pull together, ascending, through the first of them."""


@dataclass(frozen=True, slots=True)
class Serving:
    """What a partition's server, or each device of a gathered shard, adds up, in so many rows if it is ``sparse``, and for what it has
    gradients then."""

    added_bytes: int
    added_rows: int
    updated_bytes: int
    sparse: bool


@dataclass(frozen=True, slots=True)
class Traffic:
    """Of a served region: rounds of its pull and its push, none if nothing travels, and what becomes of each of its partitions."""

    pull: tuple[Round, ...]
    push: tuple[Round, ...]
    partitions: tuple[Serving, ...]


@dataclass(frozen=True, slots=True)
class Gathering:
    """Of a shard whose devices give each other rows: the rounds, and what becomes of these rows on each device."""

    rounds: tuple[Round, ...]
    kept: Serving


class _Amounts:
    """How much of a region devices read and give gradients to: all of it, or of a sparse parameter the rows that they touch."""

    def __init__(self, plan: Plan, parameter: str, box: Box, uses: Sequence[tuple[int, int]], *, sparse: bool) -> None:
        self._plan, self._parameter, self._sparse = plan, parameter, sparse
        self._lookups = DeviceLookups(plan.graph, parameter, plan.tiles, uses if sparse else ())
        self._touched: dict[Group, int] = {}
        self._row_bytes = row_bytes(plan.graph, parameter, box) if sparse else 0

    def rows(self, devices: Group, box: Box) -> int:
        """Different rows of the region that devices touch together; 0 if the parameter is dense."""
        if not self._sparse:
            return 0
        if devices not in self._touched:
            self._touched[devices] = self._lookups(devices)
        return touched_rows(self._plan.graph.sparse[self._parameter], box, self._touched[devices])

    def values(self, devices: Group, box: Box) -> int:
        """Bytes of values."""
        return self.rows(devices, box) * self._row_bytes if self._sparse else box_bytes(self._plan, self._parameter, box)

    def indices(self, devices: Group, box: Box) -> int:
        """Bytes of indices."""
        return self.rows(devices, box) * INDEX_BYTES


def served_traffic(plan: Plan, served: Served, *, pull_together: bool = True) -> Traffic:
    """What servers of a region, and those that read it, send each other.

    A sparse region is pulled before the step: indices go to the servers, and rows come back. What is pushed then is rows alone. With local
    aggregation each group's leader deals with the servers, and the others with it; unless ``pull_together``, for gradients alone, as in
    Parallax.
    """
    amounts = _Amounts(plan, served.parameter, served.box, served.uses, sparse=served.sparse)
    groups = reading_groups(served)
    pulling = groups if pull_together else [(reader,) for reader in served.readers]
    pulled, pushed = [], []
    partitions = []
    for number in served.shards:
        shard = plan.shards[number]
        server, given = shard.devices[0], [amounts.values(group, shard.box) for group in groups]
        for group in pulling:
            pulled += [(server, group[0], amounts.values(group, shard.box)), (group[0], server, amounts.indices(group, shard.box))]
        pushed += [(group[0], server, size) for group, size in zip(groups, given, strict=True)]
        added = sum(given) if served.sparse else sum(given[1:])
        rows, updated = sum(amounts.rows(group, shard.box) for group in groups), amounts.values(served.readers, shard.box)
        adding = (added, rows) if len(groups) > 1 else (0, 0)
        partitions.append(Serving(*adding, updated, served.sparse))
    handed, summed, most = [], [], 0
    for leader, *others in groups:
        sizes = {device: amounts.values((device,), served.box) for device in others}
        for device, size in sizes.items():
            if pull_together:
                handed += [(leader, device, size), (device, leader, amounts.indices((device,), served.box))]
            summed.append((device, leader, size))
        most = max(most, sum(sizes.values()))
    return Traffic(_rounds((pulled, 0), (handed, 0)), _rounds((summed, most), (pushed, 0)), tuple(partitions))


def gathering(plan: Plan, number: int) -> Gathering:
    """Every device of a shard sends each other one the rows that it touches, with their indices, and adds up what comes and its own."""
    shard = plan.shards[number]
    amounts = _Amounts(plan, shard.parameter, shard.box, shard.uses, sparse=True)
    values = {device: amounts.values((device,), shard.box) for device in shard.devices}
    sent = {device: size + amounts.indices((device,), shard.box) for device, size in values.items()}
    flows = [(source, target, size) for source, size in sent.items() for target in shard.devices]
    rows, updated = sum(amounts.rows((device,), shard.box) for device in shard.devices), amounts.values(shard.devices, shard.box)
    adding = (sum(values.values()), rows) if len(values) > 1 else (0, 0)
    return Gathering(_rounds((flows, 0)), Serving(*adding, updated, sparse=True))


def asking(plan: Plan, *, pull_together: bool = True) -> tuple[Round, ...]:
    """Rounds at the beginning of a step, in which devices tell those that keep sparse regions which rows they look up there: all tables at
    once, how many rows of each part, then which. What these indices weigh is counted with the rows. With local aggregation the others of a
    group tell its leader before."""
    told: list[tuple[int, int]] = []
    asked: list[tuple[int, int]] = []
    for served in plan.served if pull_together else ():
        groups = reading_groups(served) if served.sparse else []
        told += [(device, leader) for leader, *others in groups for device in others]
    for served in plan.served:
        readers = dict.fromkeys(served.leaders if pull_together else served.readers) if served.sparse else ()
        asked += [(reader, plan.shards[number].devices[0]) for reader in readers for number in served.shards]
    for number in plan.gathered:
        devices = plan.shards[number].devices
        asked += [(reader, keeper) for reader in devices for keeper in devices]
    lists = [[(a, b, INDEX_BYTES) for a, b in own if a != b] for own in (told, asked)]
    return tuple((joined((a, b, size if counted else 0) for a, b, size in own), 0) for own in lists if own for counted in (True, False))


def reading_groups(served: Served) -> list[Group]:
    """Readers that push and pull together: alone, or with local aggregation those of each host."""
    together: dict[int, list[int]] = {}
    for reader, leader in zip(served.readers, served.leaders, strict=True):
        together.setdefault(leader, []).append(reader)
    return [tuple(readers) for readers in together.values()]


def _rounds(*rounds: tuple[Sequence[tuple[int, int, int]], int]) -> tuple[Round, ...]:
    """Those in which something travels: what a device gives itself does not."""
    moved = ((joined(flow for flow in flows if flow[0] != flow[1] and flow[2]), added) for flows, added in rounds)
    return tuple((flows, added) for flows, added in moved if flows)
