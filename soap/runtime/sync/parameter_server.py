"""Dense parameters on servers: readers push the gradients of their copies, servers add these up, and readers pull the updated values. Each
partition of a region is a shard of its server. With local aggregation, the readers of a host push and pull through their leader."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from soap.plan.plan import ShardSync
from soap.runtime.comm.packing import adjacent, are_adjacent, cut
from soap.runtime.comm.parcels import Parcels, bytes_of, start_exchange
from soap.runtime.comm.redistribute import Pending
from soap.runtime.program.actions import ActionKind, MicroBatch
from soap.runtime.sync.roles import pieces_read, roles_of
from soap.runtime.sync.row_update import parallel
from soap.runtime.sync.seam import Gradient, RankSync, SyncContext
from soap.runtime.trace import Watch


class DenseServing(RankSync):
    """A rank's part as reader and as server of dense regions. A reader's copy is a leaf of the ``ShardStore``."""

    def __init__(self, context: SyncContext, syncs: Mapping[int, ShardSync]) -> None:
        super().__init__(context, syncs)
        self._roles = {number: roles_of(self.plan, sync) for number, sync in syncs.items()}
        self._owned = [shard for roles in self._roles.values() for shard in roles.owned_by(self.rank)]
        self._blank = torch.empty(0, device=self.comm.device)
        self._arriving: dict[int, Pending] = {}
        self._collecting: dict[int, tuple[Pending, Parcels]] = {}
        self._pushing: dict[int, Pending] = {}
        self._number_of = {shard: number for number, sync in syncs.items() for shard in sync.shards}
        self._given: dict[int, dict[int, torch.Tensor]] = {}
        read = pieces_read(self.plan)
        self._leaves = {i: self.store.leaves[read[i][0]] for i, roles in self._roles.items() if self.rank in roles.readers}
        early = context.early
        for number, leaf in self._leaves.items():  # the hook must not hold this object: it lives as long as the leaf
            leaf.register_post_accumulate_grad_hook(lambda _, number=number: early.arrived(number))  # type: ignore[no-untyped-call]

    @property
    def shards(self) -> Iterable[int]:
        """The partitions that this rank owns."""
        return self._owned

    def begin(self, part: MicroBatch, watch: Watch) -> None:
        """Drop the last step's gradients before the first micro-batch."""
        super().begin(part, watch)
        if part.first:
            self._given.clear()
            self._pushing.clear()
            for leaf in self._leaves.values():
                leaf.grad = None

    def collect(self, number: int) -> None:
        """As a member, send this rank's gradient to the leader. As a leader, begin to receive the other members' gradients."""
        roles = self._roles[number]
        parcels: Parcels = {}
        places: Parcels = {}
        if self.rank in roles.readers and self.rank not in roles.speakers:
            parcels[roles.leader(self.rank)] = [self._own_gradient(number)]
        elif self.rank in roles.readers:
            like = self._leaves[number].detach()
            members = [member for member in roles.members(self.rank) if member != self.rank]
            places = {member: [room] for member, room in zip(members, adjacent([like] * len(members)), strict=True)}
        self._collecting[number] = self._move(ActionKind.COLLECT, number, parcels, places), places
        self.comm.traffic.handed_bytes += bytes_of(parcels) + bytes_of(places)

    def synchronize(self, number: int) -> None:
        """As a leader, send each server its partition of the gradient. As a server, begin to receive them."""
        roles, box = self._roles[number], self.syncs[number].box
        parcels: Parcels = {}
        places: Parcels = {}
        if self.rank in roles.speakers:
            total = self._total(number)
            for shard, server in roles.parts:
                part = cut(total, box, self.plan.shards[shard].box)
                if server == self.rank:
                    self._given.setdefault(shard, {})[server] = part
                else:
                    parcels.setdefault(server, []).append(part)
        coming = [(sender, shard) for sender in sorted(roles.speakers) if sender != self.rank for shard in roles.owned_by(self.rank)]
        for (sender, shard), room in zip(coming, adjacent([self.store.tensors[shard] for _, shard in coming]), strict=True):
            self._given.setdefault(shard, {})[sender] = room
            places.setdefault(sender, []).append(room)
        self._pushing[number] = self._move(ActionKind.SYNC, number, parcels, places)
        self.comm.traffic.pushed_bytes += bytes_of(parcels) + bytes_of(places)
        if self.serves_early and self.syncs[number].parameter not in self.context.read_apart:
            self._pull_at_once(number)

    def end(self, part: MicroBatch) -> None:
        """Wait for all messages, but for servers' gradients if these are served early: ``gradients`` waits for them."""
        for number in () if self.serves_early else [*self._pushing]:
            self._pushing.pop(number).wait()
        for pending, _ in self._collecting.values():
            pending.wait()
        self._collecting.clear()

    def gradients(self, shards: Sequence[int]) -> Mapping[int, Gradient]:
        """See ``RankSync``. Waits for what has not come yet."""
        for number in sorted({self._number_of[shard] for shard in shards} & self._pushing.keys()):
            self._pushing.pop(number).wait()  # and let go of the memory in which all of it came
        return dict(zip(shards, parallel(self.gradient, shards), strict=True))

    def gradient(self, shard: int) -> torch.Tensor:
        """The sum of a partition's gradients, in the order of the readers' devices."""
        return _sum([part for _, part in sorted(self._given[shard].items(), key=lambda item: item[0])])

    def bring(self, number: int) -> None:
        """As a server, send leaders the values of this rank's partitions. As a leader, begin to receive them."""
        roles = self._roles[number]
        parcels: Parcels = {}
        for shard, server in roles.parts:
            for leader in roles.speakers if server == self.rank else ():
                if leader != server:
                    parcels.setdefault(leader, []).append(self.store.tensors[shard].detach())
        places = {} if number in self._arriving else self._room_for(number)
        self._arriving.setdefault(number, self._pull(number, parcels, places))

    def hand_on(self, number: int) -> None:
        """As a leader, send the pulled values to the other members. As a member, begin to receive them."""
        roles = self._roles[number]
        self._arriving[number].wait()
        parcels: Parcels = {}
        places: Parcels = {}
        if self.rank in roles.speakers:
            parcels = {member: [self._leaves[number].detach()] for member in roles.members(self.rank) if member != self.rank}
        elif self.rank in roles.readers:
            places = {roles.leader(self.rank): [self._leaves[number].detach()]}
        self._arriving[number] = start_exchange(self.comm, roles.devices, parcels, places, self._blank, answers=number)
        self.comm.traffic.handed_bytes += bytes_of(parcels) + bytes_of(places)

    def arrived(self) -> None:
        """Wait for all pulled values."""
        for pending in self._arriving.values():
            pending.wait()
        self._arriving.clear()

    def _own_gradient(self, number: int) -> torch.Tensor:
        """This rank's own gradient; zeros if its backward pass did not reach the parameter."""
        leaf = self._leaves[number]
        return torch.zeros_like(leaf, requires_grad=False) if leaf.grad is None else leaf.grad.contiguous()

    def _total(self, number: int) -> torch.Tensor:
        """The sum of all members' gradients, in the order of the members."""
        own = self._own_gradient(number)
        if number not in self._collecting:
            return own
        pending, places = self._collecting[number]
        pending.wait()
        return _sum([own if member == self.rank else places[member][0] for member in self._roles[number].members(self.rank)])

    def _pull_at_once(self, number: int) -> None:
        """As a leader, begin to receive the updated values, if these need no memory on their way."""
        places = self._room_for(number)
        rooms = [room for _, own in sorted(places.items()) for room in own]
        if rooms and are_adjacent(rooms):
            self._arriving[number] = self._pull(number, {}, places)

    def _room_for(self, number: int) -> Parcels:
        """As a leader: by server, where in this rank's copy its partitions belong."""
        roles, box = self._roles[number], self.syncs[number].box
        places: Parcels = {}
        for shard, server in roles.parts:
            if self.rank in roles.speakers and server != self.rank:
                places.setdefault(server, []).append(cut(self._leaves[number].detach(), box, self.plan.shards[shard].box))
        return places

    def _pull(self, number: int, parcels: Parcels, places: Parcels) -> Pending:
        self.comm.traffic.pulled_bytes += bytes_of(parcels) + bytes_of(places)
        return self._move(ActionKind.BRING, number, parcels, places, answers=number)

    def _move(self, kind: ActionKind, number: int, parcels: Parcels, places: Parcels, *, answers: int | None = None) -> Pending:
        devices = self._roles[number].devices
        pending = start_exchange(self.comm, devices, parcels, places, self._blank, answers=answers)
        return self.named(kind, number, pending) if len(devices) > 1 else pending


def _sum(parts: list[torch.Tensor]) -> torch.Tensor:
    """The sum in the given order, as a new tensor."""
    first, *others = parts
    total = first.clone(memory_format=torch.contiguous_format)
    for part in others:
        total.add_(part)
    return total


METHOD = DenseServing
