"""What all methods that synchronize by rows share: moving rows of sparse parameters, and their gradients.

Tiles look rows up in a *compact table*, which has one row per distinct index; so has its gradient. The complete gradient goes to the
owners. They know the indices already (``row_requests``) and add up the leaders' gradients in the order of the devices.

A rank may have three roles for a region: a *member*, whose tiles look rows up; a *leader*, which talks to the owners for its members; an
*owner* of shards. Each exchange is one all-to-all, in which a rank plays all its roles at once. A rank with nothing to send takes part too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from soap.model.regions import lengths
from soap.plan.plan import ShardSync
from soap.runtime.comm.parcels import Parcels, bytes_of, start_exchange
from soap.runtime.comm.redistribute import Pending
from soap.runtime.program.actions import ActionKind, MicroBatch
from soap.runtime.sync.roles import Roles
from soap.runtime.sync.row_requests import Wanted
from soap.runtime.sync.row_update import RowGradient, add_up, common_rows, parallel
from soap.runtime.sync.seam import Gradient, RankSync, SyncContext
from soap.runtime.trace import Watch


class Member:
    """A rank whose tiles look rows up. ``blank``: an empty table. ``leaf``: this micro-batch's table. ``gradient``: the sum so far."""

    def __init__(self, blank: torch.Tensor) -> None:
        self.blank = blank
        self.leaf: torch.Tensor | None = None
        self.gradient: RowGradient | None = None
        self.arriving: Pending | None = None
        self._compact = blank

    def make_room(self, wanted: Wanted) -> list[torch.Tensor]:
        """Allocate the compact table, into which the leader's rows are received."""
        self._compact = _room(self.blank, len(wanted.rows))
        return [self._compact]

    def received(self) -> torch.Tensor:
        """The compact table, once the leader's rows are here."""
        assert self.arriving is not None
        self.arriving.wait()
        return self._compact

    def take_gradient(self, wanted: Wanted, no_rows: torch.Tensor) -> None:
        """Add the gradient of this micro-batch; zeros if the backward pass did not reach the table. A second call does nothing."""
        if wanted.rows is no_rows:
            return
        leaf, self.leaf = self.leaf, None
        gradient = None if leaf is None else leaf.grad
        if gradient is None:
            gradient = self.blank.new_zeros((len(wanted.rows), *self.blank.shape[1:]))
        found = RowGradient(wanted.rows, gradient.to_dense() if gradient.is_sparse else gradient)
        self.gradient = found if self.gradient is None else add_up([self.gradient, found])
        wanted.rows = no_rows

    def end(self) -> None:
        """End a micro-batch: drop its rows."""
        self._compact = self.blank
        if self.arriving is not None:
            self.arriving.wait()
        self.arriving = None


class Leader:
    """A rank that talks to the owners for its members, of which it is one. ``arriving``: the rows that it has requested."""

    def __init__(self, rank: int, roles: Roles, blank: torch.Tensor) -> None:
        self._rank, self._roles, self._blank = rank, roles, blank
        self._others = [member for member in roles.members(rank) if member != rank]
        self.arriving: Pending | None = None
        self._pulled: torch.Tensor | None = None
        self.collecting: Pending | None = None
        self._collected: dict[int, RowGradient] = {}

    def place(self, wanted: Wanted, shard: int) -> torch.Tensor:
        """Where the requested rows of a shard are received."""
        assert wanted.spoken is not None
        if self._pulled is None:
            self._pulled = _room(self._blank, len(wanted.spoken))
        return self._pulled[slice(*wanted.cuts[shard])]

    def places(self, wanted: Wanted) -> Parcels:
        """Owner -> where the requested rows of its shards are received; other owners alone."""
        found: Parcels = {}
        for shard, owner in self._roles.parts:
            if owner != self._rank:
                found.setdefault(owner, []).append(self.place(wanted, shard))
        return found

    def values(self, wanted: Wanted, rows: torch.Tensor) -> torch.Tensor:
        """Some of the requested rows, once they are here."""
        assert self.arriving is not None and self._pulled is not None and wanted.spoken is not None
        self.arriving.wait()
        return self._pulled if len(rows) == len(wanted.spoken) else self._pulled.index_select(0, torch.searchsorted(wanted.spoken, rows))

    def handed(self, wanted: Wanted) -> Parcels:
        """Other member -> the rows that it has requested."""
        return {member: [self.values(wanted, wanted.members[member][-1])] for member in self._others}

    def make_room(self, wanted: Wanted) -> Parcels:
        """Other member -> where its gradient is received."""
        for member in self._others:
            rows = common_rows(wanted.members[member])
            self._collected[member] = RowGradient(rows, _room(self._blank, len(rows)))
        return {member: [self._collected[member].values] for member in self._others}

    def total(self, own: Member) -> RowGradient:
        """The sum of all members' gradients, in the order of the members."""
        if self.collecting is not None:
            self.collecting.wait()
        parts = []
        for member in self._roles.members(self._rank):
            part = own.gradient if member == self._rank else self._collected[member]
            assert part is not None
            parts.append(part)
        return add_up(parts)

    def end(self) -> None:
        """End a micro-batch: drop its rows."""
        for pending in (self.arriving, self.collecting):
            if pending is not None:
                pending.wait()
        self.arriving = self.collecting = self._pulled = None


class Owner:
    """A rank that owns shards. ``given``: shard -> leader -> gradient."""

    def __init__(self, rank: int, roles: Roles, blank: torch.Tensor) -> None:
        self._rank, self._blank = rank, blank
        self.shards = roles.owned_by(rank)
        self.given: dict[int, dict[int, RowGradient]] = {}

    def give(self, shard: int, leader: int, gradient: RowGradient) -> None:
        """Note a leader's gradient for a shard."""
        self.given.setdefault(shard, {})[leader] = gradient

    def make_room(self, wanted: Wanted) -> Parcels:
        """Leader -> where its gradients are received, one tensor for each shard that it has requested rows of."""
        found: Parcels = {}
        for shard in self.shards:
            for leader, asked in wanted.asked[shard].items():
                if leader != self._rank:
                    rows = common_rows(asked)
                    values = _room(self._blank, len(rows))
                    self.give(shard, leader, RowGradient(rows, values))
                    found.setdefault(leader, []).append(values)
        return found

    def gradient(self, shard: int) -> RowGradient:
        """The sum of all leaders' gradients, in the order of their devices."""
        given = self.given[shard]
        return add_up([given[leader] for leader in sorted(given)])


class RowSync(RankSync):
    """A rank's part in synchronizations by rows. Subclasses say where the rows come from (``values``)."""

    def __init__(self, context: SyncContext, syncs: Mapping[int, ShardSync]) -> None:
        super().__init__(context, syncs)
        self.requests = context.requests
        self._blanks = {
            i: torch.empty((0, *lengths(sync.box)[1:]), dtype=context.dtype_of(sync.parameter), device=self.comm.device)
            for i, sync in syncs.items()
        }
        self.members: dict[int, Member] = {}
        self.leaders: dict[int, Leader] = {}
        self.owners: dict[int, Owner] = {}
        self._take_roles()
        self._owner_of = {shard: number for number, owner in self.owners.items() for shard in owner.shards}
        self.under_way: list[Pending] = []

    def _take_roles(self) -> None:
        """Make fresh members, leaders and owners, as a step begins."""
        for number, blank in self._blanks.items():
            roles = self.requests.roles[number]
            if self.rank in roles.readers:
                self.members[number] = Member(blank)
            if self.rank in roles.speakers:
                self.leaders[number] = Leader(self.rank, roles, blank)
            if roles.owned_by(self.rank):
                self.owners[number] = Owner(self.rank, roles, blank)

    def begin(self, part: MicroBatch, watch: Watch) -> None:
        """Start afresh with the first micro-batch."""
        super().begin(part, watch)
        if part.first:
            self._take_roles()

    def leaf(self, number: int) -> torch.Tensor:
        """The compact table of the rows that this rank's tiles look up: a leaf that takes a gradient."""
        member, early = self.members[number], self.context.early
        if member.leaf is None:
            member.leaf = self.values(number).detach().requires_grad_()
            member.leaf.register_post_accumulate_grad_hook(lambda _: early.arrived(number))  # type: ignore[no-untyped-call]
        return member.leaf

    def rows(self, number: int) -> torch.Tensor:
        """The row numbers of the compact table, ascending."""
        return self.requests.wanted[number].rows

    def values(self, number: int) -> torch.Tensor:
        """The values of the compact table, once they are here."""
        raise NotImplementedError

    def collect(self, number: int) -> None:
        """As a member, send this rank's gradient to the leader. As a leader, begin to receive the other members' gradients."""
        roles, wanted = self.requests.roles[number], self.requests.wanted[number]
        parcels: Parcels = {}
        places: Parcels = {}
        own, leader = self.members.get(number), self.leaders.get(number)
        if own is not None:
            own.take_gradient(wanted, self.requests.no_rows)
        if leader is not None:
            places = leader.make_room(wanted)
        elif own is not None:
            assert own.gradient is not None
            parcels[roles.leader(self.rank)] = [own.gradient.values]
        pending = self._move(ActionKind.COLLECT, number, parcels, places)
        if leader is not None:
            leader.collecting = pending
        self.under_way.append(pending)
        self.comm.traffic.handed_bytes += bytes_of(parcels) + bytes_of(places)

    def synchronize(self, number: int) -> None:
        """As a leader, send owners the gradients of the requested rows. As an owner, begin to receive them."""
        roles, wanted = self.requests.roles[number], self.requests.wanted[number]
        own, leader, owner = self.members.get(number), self.leaders.get(number), self.owners.get(number)
        parcels: Parcels = {}
        if own is not None:
            own.take_gradient(wanted, self.requests.no_rows)
        if leader is not None:
            assert own is not None  # a leader is a reader
            total = leader.total(own)
            cuts = self.requests.cut(number, total.rows)
            for shard, device in roles.parts:
                part = slice(*cuts[shard])
                if device != self.rank:
                    parcels.setdefault(device, []).append(total.values[part])
                elif owner is not None:
                    owner.give(shard, self.rank, RowGradient(total.rows[part], total.values[part]))
        places = {} if owner is None else owner.make_room(wanted)
        self.under_way.append(self._move(ActionKind.SYNC, number, parcels, places))
        self.count_given(bytes_of(parcels) + bytes_of(places))

    def count_given(self, moved_bytes: int) -> None:
        """Count the traffic of gradients."""
        self.comm.traffic.pushed_bytes += moved_bytes

    def end(self, part: MicroBatch) -> None:
        """Wait for all messages. After the last micro-batch the gradients are complete."""
        for number, member in self.members.items():
            member.take_gradient(self.requests.wanted[number], self.requests.no_rows)
            member.end()
        for number, leader in self.leaders.items():
            leader.end()
            self.requests.wanted[number].spoken = None
        for pending in self.under_way:
            pending.wait()
        self.under_way.clear()

    @property
    def shards(self) -> Iterable[int]:
        """The shards that this rank owns."""
        return self._owner_of

    def gradient(self, shard: int) -> RowGradient:
        """The sum of all leaders' gradients for a shard, in the order of their devices."""
        return self.owners[self._owner_of[shard]].gradient(shard)

    def gradients(self, shards: Sequence[int]) -> Mapping[int, Gradient]:
        """See ``RankSync``."""
        return dict(zip(shards, parallel(self.gradient, shards), strict=True))

    def _move(self, kind: ActionKind, number: int, parcels: Parcels, places: Parcels) -> Pending:
        devices = self.requests.roles[number].devices
        pending = start_exchange(self.comm, devices, parcels, places, self.requests.no_rows)
        return self.named(kind, number, pending) if len(devices) > 1 else pending


def _room(blank: torch.Tensor, rows: int) -> torch.Tensor:
    return blank.new_empty((rows, *blank.shape[1:]))
