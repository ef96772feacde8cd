"""Dense parameters that servers keep: readers push gradients of their copies, servers add them up, and values come back after the update.

Each partition of a region is a shard of its server. With local aggregation the readers of a host push and pull through their leader.
"""

from __future__ import annotations

import torch

from soap.plan.plan import Plan, Served, pull_name, push_name
from soap.runtime.comm.parcels import Parcels, bytes_of, start_exchange
from soap.runtime.comm.redistribute import Communicator, Pending, cut
from soap.runtime.program.actions import ActionKind
from soap.runtime.step.early_start import EarlyStart, first_exchange
from soap.runtime.step.micro_batch import MicroBatch
from soap.runtime.sync.shards import ShardStore
from soap.runtime.sync.tables import members_of
from soap.runtime.trace import Watch, watch_nothing
from soap.simulator.tasks import TaskKind


class DenseServing:
    """A rank's part in the dense regions that it reads or keeps as a server. In a step's last micro-batch ``collect`` and ``push``, then
    ``end``; ``gradient`` is then the sum over all readers. After the update, and whenever shards were loaded, ``pull``."""

    def __init__(self, plan: Plan, comm: Communicator, shards: ShardStore, early: EarlyStart) -> None:
        self.plan, self.comm, self.store = plan, comm, shards
        early.by(self.collect, ActionKind.COLLECT)
        early.by(self.push, ActionKind.PUSH)
        self._rank = comm.rank
        self.regions = {i: own for i, own in enumerate(plan.served) if not own.sparse and self._rank in members_of(plan, own)}
        kept = [(i, number) for number, own in self.regions.items() for i in own.shards if plan.shards[i].devices == (self._rank,)]
        self._region_of = dict(kept)
        self._blank = torch.empty(0, device=comm.device)
        self._watch: Watch = watch_nothing
        self._collecting: dict[int, tuple[Pending, Parcels]] = {}
        self._pushing: dict[int, Pending] = {}
        self._given: dict[int, dict[int, torch.Tensor]] = {}
        for number, own in self.regions.items():
            if self._reads(number):  # the object of a hook is not kept alive by it: a leaf's hooks live as long as the leaf
                key = first_exchange(ActionKind.PUSH, own.aggregated), number
                self._leaf(number).register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    lambda _, key=key: early.arrived(key)
                )

    @property
    def shards(self) -> tuple[int, ...]:
        """The partitions that this rank keeps."""
        return tuple(self._region_of)

    def begin(self, part: MicroBatch, watch: Watch) -> None:
        """Before a micro-batch."""
        self._watch = watch
        if part.first:
            self._given.clear()
            for number in self.regions:
                if self._reads(number):
                    self._leaf(number).grad = None

    def collect(self, number: int) -> None:
        """Send the leader this rank's gradient, or begin to receive those of the other members; once."""
        if number in self._collecting:
            return
        own = self.regions[number]
        parcels: Parcels = {}
        places: Parcels = {}
        if self._rank in own.readers:
            leader = own.leaders[own.readers.index(self._rank)]
            if leader != self._rank:
                parcels[leader] = [self._own_gradient(number)]
            else:
                like = self._leaf(number).detach()
                places = {member: [torch.empty_like(like)] for member in self._members(own) if member != self._rank}
        self._collecting[number] = self._move(own, parcels, places, push_name(own)), places
        self.comm.traffic.handed_bytes += bytes_of(parcels) + bytes_of(places)

    def push(self, number: int) -> None:
        """Send servers their partitions of the gradient, or begin to receive them; once."""
        if number in self._pushing:
            return
        own = self.regions[number]
        parcels: Parcels = {}
        places: Parcels = {}
        if self._rank in own.leaders:
            total = self._total(number)
            for shard, server in self._servers(own):
                part = cut(total, own.box, self.plan.shards[shard].box)
                if server == self._rank:
                    self._given.setdefault(shard, {})[server] = part
                else:
                    parcels.setdefault(server, []).append(part)
        for shard, server in self._servers(own):
            for sender in sorted(set(own.leaders) - {self._rank}) if server == self._rank else ():
                place = torch.empty_like(self.store.tensors[shard], requires_grad=False)
                self._given.setdefault(shard, {})[sender] = place
                places.setdefault(sender, []).append(place)
        self._pushing[number] = self._move(own, parcels, places, push_name(own))
        self.comm.traffic.pushed_bytes += bytes_of(parcels) + bytes_of(places)

    def end(self) -> None:
        """Behind a micro-batch; behind the last one all gradients are there."""
        for pending in (*self._pushing.values(), *(pending for pending, _ in self._collecting.values())):
            pending.wait()
        self._pushing.clear()
        self._collecting.clear()

    def gradient(self, shard: int) -> torch.Tensor:
        """What all readers give for a partition of this rank, added up in the order of their devices."""
        first, *others = [part for _, part in sorted(self._given[shard].items(), key=lambda item: item[0])]
        total = first.clone(memory_format=torch.contiguous_format)
        for part in others:
            total.add_(part)
        return total

    def pull(self, watch: Watch = watch_nothing) -> None:
        """Bring all values from the servers to the readers."""
        self._watch = watch
        arriving = []
        for number, own in self.regions.items():
            parcels: Parcels = {}
            places: Parcels = {}
            for shard, server in self._servers(own):
                for leader in sorted(set(own.leaders) - {server}):
                    if server == self._rank:
                        parcels.setdefault(leader, []).append(self.store.tensors[shard].detach())
                    elif leader == self._rank:
                        whole = self._leaf(number).detach()
                        places.setdefault(server, []).append(cut(whole, own.box, self.plan.shards[shard].box))
            arriving.append(self._move(own, parcels, places, pull_name(own)))
            self.comm.traffic.pulled_bytes += bytes_of(parcels) + bytes_of(places)
        for pending in arriving:
            pending.wait()
        self._hand_on()
        self.comm.finish_sends()

    def _hand_on(self) -> None:
        """Bring values from leaders to the other members."""
        arriving = []
        for number, own in self.regions.items():
            if own.aggregated:
                parcels: Parcels = {}
                places: Parcels = {}
                for member, leader in zip(own.readers, own.leaders, strict=True):
                    if member != leader and leader == self._rank:
                        parcels[member] = [self._leaf(number).detach()]
                    elif member != leader and member == self._rank:
                        places[leader] = [self._leaf(number).detach()]
                arriving.append(self._move(own, parcels, places, None))
                self.comm.traffic.handed_bytes += bytes_of(parcels) + bytes_of(places)
        for pending in arriving:
            pending.wait()

    def _reads(self, number: int) -> bool:
        return self._rank in self.regions[number].readers

    def _leaf(self, number: int) -> torch.Tensor:
        return self.store.leaves[len(self.plan.shards) + number]

    def _own_gradient(self, number: int) -> torch.Tensor:
        """This rank's own; zeros if nothing has flowed here."""
        leaf = self._leaf(number)
        return torch.zeros_like(leaf, requires_grad=False) if leaf.grad is None else leaf.grad.contiguous()

    def _total(self, number: int) -> torch.Tensor:
        """The gradient of all members, added up in their order."""
        own = self._own_gradient(number)
        if number not in self._collecting:
            return own
        pending, places = self._collecting[number]
        pending.wait()
        first, *others = [own if member == self._rank else places[member][0] for member in self._members(self.regions[number])]
        total = first.clone()
        for part in others:
            total.add_(part)
        return total

    def _members(self, own: Served) -> list[int]:
        return [reader for reader, leader in zip(own.readers, own.leaders, strict=True) if leader == self._rank]

    def _servers(self, own: Served) -> list[tuple[int, int]]:
        """(partition, its server's device), in order."""
        return [(shard, self.plan.shards[shard].devices[0]) for shard in own.shards]

    def _move(self, own: Served, parcels: Parcels, places: Parcels, name: str | None) -> Pending:
        devices = members_of(self.plan, own)
        pending = start_exchange(self.comm, devices, parcels, places, self._blank)
        if name is not None and len(devices) > 1:
            self._watch(name, TaskKind.SYNC, pending)
        return pending
