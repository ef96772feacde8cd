"""Rows of sparse tables on their way: which are wanted, the rows themselves, and their gradients.

At the beginning of a (micro-)batch every reader tells each keeper which rows of its parts it looks up. Servers send the rows back; tiles
look them up in a *compact* table, one row per index, whose gradient therefore has one row per index as well. When it is complete it
goes to the keepers, which know the indices, and add up what comes from the readers in the order of their devices. With local aggregation
the readers of a host speak through their leader. Whoever has nothing to ask or to give takes part with nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch

from soap.runtime.comm.parcels import Parcels, bytes_of, start_exchange
from soap.runtime.comm.redistribute import Communicator, Pending
from soap.runtime.program.actions import ActionKind
from soap.runtime.step.early_start import EarlyStart, first_exchange
from soap.runtime.step.micro_batch import MicroBatch
from soap.runtime.sync.row_gradient import RowGradient, add_up, common_rows
from soap.runtime.sync.tables import Table, speakers
from soap.runtime.trace import Watch, watch_nothing
from soap.simulator.tasks import TaskKind


@dataclass
class _Step:
    """One table in one step of this rank.

    ``rows``: what its tiles look up in this micro-batch, ``compact`` these rows, ``leaf`` the same as tiles read them. ``spoken``: the
    rows that it asks for, for all members, cut by shard (``cuts``), which come as ``pulled``; ``members``: what the others asked it for, by
    micro-batch. ``asked``: shard -> sender -> rows, by micro-batch. ``own``: the gradient of its tiles so far; ``collected``: that of other
    members; ``given``: shard -> sender -> gradient. ``pushed``: whether that is under way.
    """

    rows: torch.Tensor
    compact: torch.Tensor
    leaf: torch.Tensor | None = None
    spoken: torch.Tensor | None = None
    cuts: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    pulled: torch.Tensor | None = None
    members: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    asked: dict[int, dict[int, list[torch.Tensor]]] = field(default_factory=dict)
    own: RowGradient | None = None
    collected: dict[int, RowGradient] = field(default_factory=dict)
    given: dict[int, dict[int, RowGradient]] = field(default_factory=dict)
    arriving: Pending | None = None
    collecting: Pending | None = None
    pushed: bool = False


class TableSync:
    """A rank's part in all tables of a plan. ``tensors``: the shards that it keeps. ``blanks``: no rows of each table.
    ``asks_others``: whether this rank tells others which rows it looks up, or is told.

    For each micro-batch ``begin``, ``ask``, ``pull`` and ``hand_on``, then ``leaf`` and ``rows`` for the tiles, then ``end``, before which
    come, in the last one, ``collect`` and ``push``. ``gradient`` is then the sum over all readers.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        comm: Communicator,
        tensors: Mapping[int, torch.Tensor],
        blanks: Sequence[torch.Tensor],
        early: EarlyStart,
    ) -> None:
        self.tables, self.comm, self._tensors = tables, comm, tensors
        self._early = early
        early.by(self.collect, ActionKind.COLLECT_ROWS)
        early.by(self.push, ActionKind.PUSH_ROWS)
        self._rank = comm.rank
        self._empty_rows = torch.empty(0, dtype=torch.int64, device=comm.device)
        self._blank = blanks
        self._steps: list[_Step] = []
        self._pushing: list[Pending] = []
        self._watch: Watch = watch_nothing
        self._everyone = speakers(tables)
        self._shard_of = {shard: number for number, table in enumerate(tables) for shard, _ in table.kept_by(self._rank)}
        self._edges = [self._numbers([table.parts[0][1][0], *(stop for _, (_, stop), _ in table.parts)]) for table in tables]
        others = [device for device in self._everyone if device != self._rank]
        self._to_leader = {device: _shared(tables, self._rank, device) for device in others}
        self._from_member = {device: _shared(tables, device, self._rank) for device in others}
        self._to_keeper = {device: _lists_for(tables, self._rank, device) for device in self._everyone}
        self._from_sender = {device: _lists_for(tables, device, self._rank) for device in self._everyone}
        told = (self._to_leader, self._from_member, self._to_keeper, self._from_sender)
        self.asks_others = any(own for lists in told for device, own in lists.items() if device != self._rank)

    def begin(self, part: MicroBatch, watch: Watch) -> None:
        """Before a micro-batch."""
        self._watch = watch
        if part.first:
            self._steps = [_Step(self._empty_rows, blank) for blank in self._blank]

    def ask(self, rows: Mapping[int, torch.Tensor]) -> None:
        """Tell keepers which ``rows`` (by table) this rank's tiles look up, and learn what is wanted here."""
        for number, own in rows.items():
            self._steps[number].rows = own
        self._ask_leaders()
        for number, table in enumerate(self.tables):
            if self._rank in table.senders:
                step = self._steps[number]
                step.spoken = common_rows([step.members[m][-1] if m != self._rank else step.rows for m in table.members(self._rank)])
                step.cuts = self._cut(number, step.spoken)
        lists = {keeper: [self._spoken_for(*pair) for pair in pairs] for keeper, pairs in self._to_keeper.items()}
        for sender, found in self._give_lists(lists, {sender: len(pairs) for sender, pairs in self._from_sender.items()}).items():
            for (number, shard), asked in zip(self._from_sender[sender], found, strict=True):
                self._steps[number].asked.setdefault(shard, {}).setdefault(sender, []).append(asked)

    def pull(self, number: int) -> None:
        """Send the rows of a table that were asked for, and begin to receive those that this rank has asked for."""
        table, step = self.tables[number], self._steps[number]
        parcels: Parcels = {}
        places: Parcels = {}
        for shard, (start, _) in table.kept_by(self._rank):
            for sender, asked in step.asked[shard].items():
                rows = self._tensors[shard].detach().index_select(0, asked[-1] - start)
                if sender != self._rank:
                    parcels.setdefault(sender, []).append(rows)
                else:
                    self._place(number, shard).copy_(rows)
        if self._rank in table.senders:
            for shard, _, keeper in table.parts:
                if keeper != self._rank:
                    places.setdefault(keeper, []).append(self._place(number, shard))
        step.arriving = self._move(table.devices, parcels, places, table.pull)
        self.comm.traffic.pulled_bytes += bytes_of(parcels) + bytes_of(places)

    def hand_on(self, number: int) -> None:
        """Send the other members their rows, or begin to receive this rank's from its leader."""
        table, step = self.tables[number], self._steps[number]
        parcels: Parcels = {}
        places: Parcels = {}
        if self._rank in table.senders:
            for member in table.members(self._rank):
                if member != self._rank:
                    parcels[member] = [self._of_spoken(number, step.members[member][-1])]
        elif self._rank in table.readers:
            step.compact = step.compact.new_empty((len(step.rows), *step.compact.shape[1:]))
            places[self._leader(table)] = [step.compact]
        pending = self._move(table.devices, parcels, places, None)
        if places:
            self._watch(table.pull, TaskKind.SYNC, pending)
            step.arriving = pending
        self.comm.traffic.handed_bytes += bytes_of(parcels) + bytes_of(places)

    def rows(self, number: int) -> torch.Tensor:
        """The rows of a table that this rank's tiles look up, ascending."""
        return self._steps[number].rows

    def leaf(self, number: int) -> torch.Tensor:
        """These rows, one below the other, as a leaf that takes a gradient."""
        step, table = self._steps[number], self.tables[number]
        if step.leaf is None:
            if not table.pulled:
                (shard, (start, _)), *_ = table.kept_by(self._rank)
                compact = self._tensors[shard].detach().index_select(0, step.rows - start)
            elif self._rank in table.senders:
                compact = self._of_spoken(number, step.rows)
            else:
                assert step.arriving is not None
                step.arriving.wait()
                compact = step.compact
            step.leaf = compact.detach().requires_grad_()
            key = first_exchange(ActionKind.PUSH_ROWS, table.aggregated), number
            step.leaf.register_post_accumulate_grad_hook(lambda _: self._early.arrived(key))  # type: ignore[no-untyped-call]
        return step.leaf

    def collect(self, number: int) -> None:
        """Send the leader this rank's gradient, or begin to receive those of the other members; once."""
        table, step = self.tables[number], self._steps[number]
        if step.collecting is not None:
            return
        self._add_own(number)
        parcels: Parcels = {}
        places: Parcels = {}
        if self._rank in table.senders:
            for member in table.members(self._rank):
                if member != self._rank:
                    rows = common_rows(step.members[member])
                    step.collected[member] = RowGradient(rows, step.compact.new_empty((len(rows), *step.compact.shape[1:])))
                    places[member] = [step.collected[member].values]
        elif step.own is not None:
            parcels[self._leader(table)] = [step.own.values]
        step.collecting = self._move(table.devices, parcels, places, table.push)
        self.comm.traffic.handed_bytes += bytes_of(parcels) + bytes_of(places)

    def push(self, number: int) -> None:
        """Send keepers the gradient of what this rank has asked for, and begin to receive what others give; once."""
        table, step = self.tables[number], self._steps[number]
        if step.pushed:
            return
        step.pushed = True
        self._add_own(number)
        parcels: Parcels = {}
        places: Parcels = {}
        if self._rank in table.senders:
            total = self._total(number)
            cuts = self._cut(number, total.rows)
            for shard, _, keeper in table.parts:
                part = slice(*cuts[shard])
                if keeper == self._rank:
                    step.given.setdefault(shard, {})[self._rank] = RowGradient(total.rows[part], total.values[part])
                else:
                    parcels.setdefault(keeper, []).append(total.values[part])
        for shard, _ in table.kept_by(self._rank):
            for sender, asked in step.asked[shard].items():
                if sender != self._rank:
                    rows = common_rows(asked)
                    values = step.compact.new_empty((len(rows), *step.compact.shape[1:]))
                    step.given.setdefault(shard, {})[sender] = RowGradient(rows, values)
                    places.setdefault(sender, []).append(values)
        self._pushing.append(self._move(table.devices, parcels, places, table.push))
        moved = bytes_of(parcels) + bytes_of(places)
        if table.pulled:
            self.comm.traffic.pushed_bytes += moved
        else:
            self.comm.traffic.gathered_bytes += moved

    def end(self) -> None:
        """Behind a micro-batch; behind the last one all gradients are there."""
        for number, step in enumerate(self._steps):
            self._add_own(number)
            step.compact, step.spoken, step.pulled = self._blank[number], None, None
            for arrival in (step.arriving, step.collecting):
                if arrival is not None:
                    arrival.wait()
            step.arriving = step.collecting = None
        for pending in self._pushing:
            pending.wait()
        self._pushing.clear()

    @property
    def shards(self) -> tuple[int, ...]:
        """The shards of tables that this rank keeps."""
        return tuple(self._shard_of)

    def gradient(self, shard: int) -> RowGradient:
        """What all readers give for a shard that this rank keeps, added up in the order of their devices."""
        given = self._steps[self._shard_of[shard]].given[shard]
        return add_up([given[sender] for sender in sorted(given)])

    def _ask_leaders(self) -> None:
        """Tell leaders what their members look up."""
        if not any(table.aggregated for table in self.tables):
            return
        lists = {leader: [self._steps[number].rows for number in numbers] for leader, numbers in self._to_leader.items()}
        for member, found in self._give_lists(lists, {member: len(own) for member, own in self._from_member.items()}).items():
            for number, rows in zip(self._from_member[member], found, strict=True):
                self._steps[number].members.setdefault(member, []).append(rows)

    def _cut(self, number: int, rows: torch.Tensor) -> dict[int, tuple[int, int]]:
        """Where the rows of each part lie among ascending ones."""
        table = self.tables[number]
        if not table.pulled:
            return {table.parts[0][0]: (0, len(rows))}
        edges = torch.searchsorted(rows, self._edges[number]).tolist()
        return {shard: cut for (shard, *_), cut in zip(table.parts, pairwise(edges), strict=True)}

    def _spoken_for(self, number: int, shard: int) -> torch.Tensor:
        """The rows of a part that this rank asks for."""
        step = self._steps[number]
        assert step.spoken is not None
        return step.spoken[slice(*step.cuts[shard])]

    def _place(self, number: int, shard: int) -> torch.Tensor:
        """Where the rows of a part belong that this rank has asked for."""
        step = self._steps[number]
        assert step.spoken is not None
        if step.pulled is None:
            step.pulled = step.compact.new_empty((len(step.spoken), *step.compact.shape[1:]))
        return step.pulled[slice(*step.cuts[shard])]

    def _of_spoken(self, number: int, rows: torch.Tensor) -> torch.Tensor:
        """Some of the rows that this rank has asked for, when they are here."""
        step = self._steps[number]
        assert step.arriving is not None and step.pulled is not None and step.spoken is not None
        step.arriving.wait()
        return step.pulled if len(rows) == len(step.spoken) else step.pulled.index_select(0, torch.searchsorted(step.spoken, rows))

    def _add_own(self, number: int) -> None:
        """Take the gradient that autograd has left for this rank's rows."""
        step = self._steps[number]
        if self._rank not in self.tables[number].readers or step.rows is self._empty_rows:
            return
        leaf, step.leaf = step.leaf, None
        gradient = None if leaf is None else leaf.grad
        if gradient is None:
            gradient = step.compact.new_zeros((len(step.rows), *step.compact.shape[1:]))
        found = RowGradient(step.rows, gradient.to_dense() if gradient.is_sparse else gradient)
        step.own = found if step.own is None else add_up([step.own, found])
        step.rows = self._empty_rows

    def _total(self, number: int) -> RowGradient:
        """The gradient of all members, added up in their order."""
        step, parts = self._steps[number], []
        if step.collecting is not None:
            step.collecting.wait()
        for member in self.tables[number].members(self._rank):
            part = step.own if member == self._rank else step.collected[member]
            assert part is not None
            parts.append(part)
        return add_up(parts)

    def _leader(self, table: Table) -> int:
        return table.leaders[table.readers.index(self._rank)]

    def _give_lists(self, lists: Parcels, expected: Mapping[int, int]) -> Parcels:
        """Give each device some lists of rows, and receive as many as expected; those for this rank itself stay."""
        given = {device: own for device, own in lists.items() if device != self._rank and own}
        lengths = {device: [self._numbers([len(rows) for rows in own])] for device, own in given.items()}
        others = {device: count for device, count in expected.items() if device != self._rank and count}
        counts = {device: [torch.empty(count, dtype=torch.int64, device=self.comm.device)] for device, count in others.items()}
        self._move(self._everyone, lengths, counts, None).wait()
        found = {
            device: [torch.empty(count, dtype=torch.int64, device=self.comm.device) for count in own[0].tolist()]
            for device, own in counts.items()
        }
        self._move(self._everyone, given, found, None).wait()
        self.comm.traffic.index_bytes += bytes_of(lengths) + bytes_of(counts) + bytes_of(given) + bytes_of(found)
        if lists.get(self._rank):
            found[self._rank] = lists[self._rank]
        return {device: found[device] for device in sorted(found)}

    def _numbers(self, numbers: Sequence[int]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self.comm.device)

    def _move(self, devices: tuple[int, ...], parcels: Parcels, places: Parcels, name: str | None) -> Pending:
        """Start an all-to-all among devices, timed under the name of a task if there is one."""
        pending = start_exchange(self.comm, devices, parcels, places, self._empty_rows)
        if name is not None and len(devices) > 1:
            self._watch(name, TaskKind.SYNC, pending)
        return pending


def _shared(tables: Sequence[Table], member: int, leader: int) -> list[int]:
    """The tables for which a device speaks for another one."""
    return [number for number, table in enumerate(tables) if member != leader and member in table.members(leader)]


def _lists_for(tables: Sequence[Table], sender: int, keeper: int) -> list[tuple[int, int]]:
    """What a sender tells a keeper about: (table, shard)."""
    known = [(number, table) for number, table in enumerate(tables) if sender in table.senders]
    return [(number, shard) for number, table in known for shard, _ in table.kept_by(keeper)]
