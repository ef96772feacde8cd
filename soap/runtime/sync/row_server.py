"""Sparse parameters on servers: readers pull the rows that a micro-batch looks up, and push the gradients of these rows."""

from __future__ import annotations

import torch

from soap.runtime.comm.parcels import Parcels, bytes_of, start_exchange
from soap.runtime.program.actions import ActionKind
from soap.runtime.sync.sparse_rows import RowSync


class RowServing(RowSync):
    """Rows on servers. Owners answer requests at once, so that readers do not wait long."""

    def bring(self, number: int) -> None:
        """As an owner, send the requested rows. As a leader, begin to receive the rows that this rank has requested."""
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
        """As a leader, send the other members their rows. As a member, begin to receive this rank's rows."""
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
        """The rows that this rank looks up: pulled by itself if it is a leader, else received from its leader."""
        leader = self.leaders.get(number)
        return self.members[number].received() if leader is None else leader.values(self.requests.wanted[number], self.rows(number))


METHOD = RowServing
