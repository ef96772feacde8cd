"""Requests for rows of sparse parameters, sent at the beginning of every micro-batch for all synchronizations by rows at once.

Members tell their leaders which rows they look up. Then each leader tells each owner which rows of its shards it wants. Counts travel
before the rows. A rank without requests sends empty lists.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch

from soap.plan.plan import Plan
from soap.runtime.comm.parcels import Parcels, bytes_of, start_exchange
from soap.runtime.comm.redistribute import Communicator
from soap.runtime.sync.roles import roles_of
from soap.runtime.sync.row_update import common_rows


@dataclass
class Wanted:
    """The requested rows of one region, as this rank knows them.

    ``rows``: what its own tiles look up in this micro-batch. As a leader, ``members``: member -> its rows, one entry per micro-batch;
    ``spoken``: the union that the leader requests; ``cuts``: shard -> (start, end) of its rows in ``spoken``. As an owner, ``asked``:
    shard -> leader -> rows, one entry per micro-batch.
    """

    rows: torch.Tensor
    members: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    spoken: torch.Tensor | None = None
    cuts: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    asked: dict[int, dict[int, list[torch.Tensor]]] = field(default_factory=dict)

    def spoken_for(self, shard: int) -> torch.Tensor:
        """The rows of a shard that this leader requests."""
        assert self.spoken is not None
        return self.spoken[slice(*self.cuts[shard])]


class RowRequests:
    """One rank's requests. ``wanted``: synchronization -> requested rows. ``asks_others``: True if it exchanges requests with others."""

    def __init__(self, plan: Plan, comm: Communicator) -> None:
        self._comm, self._rank = comm, comm.rank
        self.roles = {i: roles_of(plan, sync) for i, sync in enumerate(plan.syncs) if sync.contract.by_rows}
        self.no_rows = torch.empty(0, dtype=torch.int64, device=comm.device)
        self.wanted: dict[int, Wanted] = {}
        self._everyone = asking_devices(plan)
        self._boxes = {i: [plan.shards[shard].box[0] for shard in plan.syncs[i].shards] for i in self.roles}
        self._edges = {i: self._numbers([own[0][0], *(stop for _, stop in own)]) for i, own in self._boxes.items()}
        others = [device for device in self._everyone if device != self._rank]
        self._to_leader = {device: self._shared(self._rank, device) for device in others}
        self._from_member = {device: self._shared(device, self._rank) for device in others}
        self._to_owner = {device: self._lists(self._rank, device) for device in self._everyone}
        self._from_leader = {device: self._lists(device, self._rank) for device in self._everyone}
        self._aggregated = any(sync.contract.by_rows and sync.aggregated for sync in plan.syncs)
        told = (self._to_leader, self._from_member, self._to_owner, self._from_leader)
        self.asks_others = any(own for lists in told for device, own in lists.items() if device != self._rank)

    def forget(self) -> None:
        """Drop all requests, as a step begins."""
        self.wanted = {number: Wanted(self.no_rows) for number in self.roles}

    def ask(self, rows: Mapping[int, torch.Tensor]) -> None:
        """Send this rank's requests, ``rows`` by synchronization, and receive those of the others."""
        for number, looked_up in rows.items():
            self.wanted[number].rows = looked_up
        if self._aggregated:
            self._ask_leaders()
        for number, roles in self.roles.items():
            if self._rank in roles.speakers:
                own = self.wanted[number]
                own.spoken = common_rows([own.members[m][-1] if m != self._rank else own.rows for m in roles.members(self._rank)])
                own.cuts = self.cut(number, own.spoken)
        lists = {owner: [self.wanted[number].spoken_for(shard) for number, shard in pairs] for owner, pairs in self._to_owner.items()}
        for leader, found in self._give_lists(lists, {leader: len(pairs) for leader, pairs in self._from_leader.items()}).items():
            for (number, shard), asked in zip(self._from_leader[leader], found, strict=True):
                self.wanted[number].asked.setdefault(shard, {}).setdefault(leader, []).append(asked)

    def cut(self, number: int, rows: torch.Tensor) -> dict[int, tuple[int, int]]:
        """Shard -> (start, end) of its rows among ascending ``rows`` of a region."""
        shards = dict.fromkeys(shard for shard, _ in self.roles[number].parts)
        if len(shards) == 1:
            return dict.fromkeys(shards, (0, len(rows)))
        edges = torch.searchsorted(rows, self._edges[number]).tolist()
        return dict(zip(shards, pairwise(edges), strict=True))

    def _ask_leaders(self) -> None:
        """Send members' rows to their leaders."""
        lists = {leader: [self.wanted[number].rows for number in numbers] for leader, numbers in self._to_leader.items()}
        for member, found in self._give_lists(lists, {member: len(own) for member, own in self._from_member.items()}).items():
            for number, rows in zip(self._from_member[member], found, strict=True):
                self.wanted[number].members.setdefault(member, []).append(rows)

    def _shared(self, member: int, leader: int) -> list[int]:
        """The synchronizations in which ``leader`` is the leader of another device, ``member``."""
        return [number for number, roles in self.roles.items() if member != leader and member in roles.members(leader)]

    def _lists(self, leader: int, owner: int) -> list[tuple[int, int]]:
        """The (synchronization, shard) pairs whose rows a leader requests from an owner."""
        return [(number, shard) for number, roles in self.roles.items() if leader in roles.speakers for shard in roles.owned_by(owner)]

    def _give_lists(self, lists: Parcels, expected: Mapping[int, int]) -> Parcels:
        """Send each device its lists of rows, and receive as many lists as expected. This rank's lists for itself are passed through."""
        given = {device: own for device, own in lists.items() if device != self._rank and own}
        lengths = {device: [self._numbers([len(rows) for rows in own])] for device, own in given.items()}
        others = {device: count for device, count in expected.items() if device != self._rank and count}
        counts = {device: [self._room(count)] for device, count in others.items()}
        self._move(lengths, counts)
        found = {device: [self._room(count) for count in own[0].tolist()] for device, own in counts.items()}
        self._move(given, found)
        if lists.get(self._rank):
            found[self._rank] = lists[self._rank]
        return {device: found[device] for device in sorted(found)}

    def _move(self, parcels: Parcels, places: Parcels) -> None:
        start_exchange(self._comm, self._everyone, parcels, places, self.no_rows).wait()
        self._comm.traffic.index_bytes += bytes_of(parcels) + bytes_of(places)

    def _room(self, count: int) -> torch.Tensor:
        return torch.empty(count, dtype=torch.int64, device=self._comm.device)

    def _numbers(self, numbers: Sequence[int]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self._comm.device)


def asking_devices(plan: Plan) -> tuple[int, ...]:
    """All devices that exchange requests for rows, ascending; empty if no parameter is synchronized by rows."""
    return tuple(sorted({device for sync in plan.syncs if sync.contract.by_rows for device in plan.members(sync)}))
