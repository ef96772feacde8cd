"""Sparse parameters that servers own: readers pull the rows that a micro-batch looks up, and push gradients of these."""

from __future__ import annotations

from typing import ClassVar

import torch

from soap.plan.plan import ShardSync
from soap.runtime.comm.parcels import Parcels, bytes_of, start_exchange
from soap.runtime.program.actions import ActionKind
from soap.runtime.sync.sparse_rows import RowSync


class RowServing(RowSync):
    """Owners answer at once, so that nobody who waits for rows waits for long."""

    gives: ClassVar[str] = "push"

    @classmethod
    def before_forward(cls, sync: ShardSync) -> tuple[ActionKind, ...]:
        """Rows are asked for, and come."""
        found = (*super().before_forward(sync), ActionKind.BRING)
        return (*found, ActionKind.HAND_ON) if sync.aggregated else found

    def bring(self, number: int) -> None:
        """Send the rows that were asked for, and begin to receive those that this rank has asked for."""
        wanted, leader, owner = self.requests.wanted[number], self.leaders.get(number), self.owners.get(number)
        parcels: Parcels = {}
        for shard in owner.shards if owner is not None else ():
            start, _ = self.plan.shards[shard].box[0]
            for asking, asked in wanted.asked[shard].items():
                rows = self.store.tensors[shard].detach().index_select(0, asked[-1] - start)
                if asking != self.rank:
                    parcels.setdefault(asking, []).append(rows)
                elif leader is not None:
                    leader.place(wanted, shard).copy_(rows)
        places = {} if leader is None else leader.places(wanted)
        pending = self._move(ActionKind.BRING, number, parcels, places)
        if leader is not None:
            leader.arriving = pending
        self.under_way.append(pending)
        self.comm.traffic.pulled_bytes += bytes_of(parcels) + bytes_of(places)

    def hand_on(self, number: int) -> None:
        """Send the other members their rows, or begin to receive this rank's from its leader."""
        roles, wanted = self.requests.roles[number], self.requests.wanted[number]
        own, leader = self.members.get(number), self.leaders.get(number)
        parcels: Parcels = {}
        places: Parcels = {}
        if leader is not None:
            parcels = leader.handed(wanted)
        elif own is not None:
            places = {roles.leader(self.rank): own.make_room(wanted)}
        pending = start_exchange(self.comm, roles.devices, parcels, places, self.requests.no_rows)
        if own is not None and places:
            own.arriving = self.named(ActionKind.HAND_ON, number, pending)
        self.comm.traffic.handed_bytes += bytes_of(parcels) + bytes_of(places)

    def values(self, number: int) -> torch.Tensor:
        """From this rank's servers, or its leader."""
        leader = self.leaders.get(number)
        return self.members[number].received() if leader is None else leader.values(self.requests.wanted[number], self.rows(number))


METHOD = RowServing
