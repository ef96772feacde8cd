"""The interface between a plan and the methods that synchronize its parameters: what a method answers, and how it is found. No costs.

A method lays out what it synchronizes as ``ShardSync``s. For each it says which communications take place in which phase of a step, what is
updated, and what memory that takes. Lowering, memory, explanations and the runtime read these answers.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import lru_cache
from importlib import import_module
from typing import Literal

from soap.model.graph import OperatorGraph
from soap.model.regions import Box
from soap.plan.compression.seam import Exchange, ExchangeKind, Layout, Work
from soap.plan.delivery import Round, box_bytes
from soap.plan.memory_kinds import MemoryKind
from soap.plan.placement import owner_of
from soap.plan.plan import Plan, Shard, ShardSync, sync_name
from soap.plan.syncs.amounts import Amounts, Group, moving_rounds
from soap.plan.syncs.bucketing import gradient_bytes, make_buckets, usual_limits
from soap.plan.syncs.even_parts import Collective, Kind, collective, is_even
from soap.plan.syncs.represented import Represented
from soap.plan.syncs.sharing import owned_bytes
from soap.strategy.compression import Compression
from soap.strategy.config import SyncConfig
from soap.strategy.sync_contracts import Contract
from soap.strategy.wrapped import Wrapped


class Phase(IntEnum):
    """When in a step a communication takes place."""

    BEFORE_FORWARD = 0
    BEFORE_BACKWARD = 1
    AFTER_BACKWARD = 2
    UPDATE = 3
    AFTER_UPDATE = 4


SUM, PUSH, SERVE, PULL, SELECT, COMBINE, SPREAD, RESTORE = range(8)
"""Stages, the third part of a task's id: if several tasks of a synchronization are ready at once, the lowest stage goes first."""
REGATHER = SERVE
"""Stage of values that are gathered again before the backward pass: no server has anything to do then."""


class Of(IntEnum):
    """What an amount counts: all bytes that are synchronized together, as they travel; what one reader of a copy owns of it; or of a region
    by itself its values, or only the rows of it that some readers look up; the indices of these rows; or both; or a compressed message."""

    WHOLE = 0
    OWNED = 1
    VALUES = 2
    INDICES = 3
    ROWS = 4
    MESSAGE = 5


@dataclass(frozen=True, slots=True)
class Amount:
    """A number of bytes, by its role. ``who``: the readers that look up rows: one, or all with one leader. ``part``: the place of the owner
    in its copy; the exchange of a message; or the partition on servers, -1 for the whole region."""

    of: Of
    who: Group = ()
    part: int = -1


WHOLE = Amount(Of.WHOLE)

Flow = tuple[int, int, Amount]
"""(source, target, what moves). A server is named by ``server_of``, the others are devices."""


def server_of(partition: int) -> int:
    """How templates name the server of a partition; the server itself from that."""
    return -1 - partition


class How(IntEnum):
    """What a row is: an all-reduce, messages between pairs of devices, a collective of equal parts; or work of devices, or the update of
    each partition by its server, each a task of its own."""

    SUM = 0
    EXCHANGE = 1
    GATHER = 2
    SCATTER = 3
    WORK = 4
    SERVE = 5


@dataclass(frozen=True, slots=True)
class Row:
    """One communication, by roles: it says which devices move which amounts, not how many bytes these are. Or what devices or servers do.

    ``verb``: of its name. ``groups``: the devices that sum, or work, or in each copy those that gather or scatter. ``rounds`` of an
    exchange, one after the other: flows that run at once, and whether each target then adds up what has come. ``amount``: of a sum.
    ``apart``: it runs at the same time as the rows next to it that are so too, each among devices of its own. ``large``: see ``SyncStep``.
    ``work``: which, if devices do some. A row whose amounts are all zero does not take place.
    """

    phase: Phase
    stage: int
    verb: str
    how: How
    groups: tuple[Group, ...] = ()
    rounds: tuple[tuple[Sequence[Flow], bool], ...] = ()
    amount: Amount = WHOLE
    apart: bool = False
    large: bool = False
    work: Work | None = None


Pairs = Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Template:
    """The rows of a synchronization, in the order of their phases; those of one phase run one after the other. The first one after the
    backward pass is not ``apart``. Work that comes first waits for the gradients of its own device, if this has any.

    ``copies``: of what readers own in parts, the readers of each copy; each of them owns one part of every region. ``added``: how many
    others' gradients an owner adds up before its update, beside its own. ``partitions``: at most so many on servers, if these own it.
    ``told``, ``asked``: who tells whom, before a step, which rows it looks up: members their leaders, then leaders the owners.
    """

    rows: tuple[Row, ...] = ()
    copies: tuple[Group, ...] = ()
    added: int = 0
    partitions: int = 0
    told: Pairs = ()
    asked: Pairs = ()


@dataclass(frozen=True, slots=True)
class Setting:
    """What a template depends on beside its devices. ``even``: whether all of them are accelerators, whose library has collectives of equal
    parts. ``partitions``: on servers. ``pull_together``: see ``SyncMethod.steps``. ``exchanges``: their kinds, of a compression."""

    even: bool = False
    partitions: int = 1
    pull_together: bool = True
    exchanges: tuple[ExchangeKind, ...] = ()


@dataclass(frozen=True, slots=True)
class DeviceWork:
    """Work of a device for a synchronization, as a task of its own: it takes time, and the device does nothing else meanwhile.

    ``settled``: it waits until the device has no backward pass to run any more. ``compression``, ``layouts``, ``work``: what it does, to
    one shard after the other.
    """

    stage: int
    device: int
    name: str
    compression: Compression
    layouts: tuple[Layout, ...]
    work: Work
    settled: bool


@dataclass(frozen=True, slots=True)
class SyncStep:
    """One communication: an all-reduce of ``summed_bytes`` over the devices ``among``, or ``rounds`` of flows, one after the other, or a
    ``collective`` of equal parts. Or ``works`` of devices, at the same time.

    ``large``: it moves much, over many connections. On links with ports and between GPUs the simulator cuts it into chunks, between which
    messages pass. ``apart``: it runs at the same time as those next to it that are so too, among other devices.
    """

    phase: Phase
    stage: int
    name: str
    rounds: tuple[Round, ...] = ()
    summed_bytes: int = 0
    among: tuple[int, ...] = ()
    collective: Collective | None = None
    large: bool = False
    apart: bool = False
    works: tuple[DeviceWork, ...] = ()


@dataclass(frozen=True, slots=True)
class ShardUpdate:
    """Work of each owner of a shard once its gradients are there: bytes and rows to add up, then bytes of the shard to update.

    ``added_rows``: 0 unless ``by_rows``. ``updated_bytes``: how many bytes of the shard have a gradient. ``name``: if set, the name of a
    task of its own on the owner's server; if empty, the work is part of the device's update.
    """

    shard: int
    added_bytes: int
    added_rows: int
    updated_bytes: int
    by_rows: bool
    name: str = ""


Uses = Literal["forward", "backward", "both"]
"""Passes of tiles that use values."""


@dataclass(frozen=True, slots=True)
class Hold:
    """Memory that a device holds from the start of task ``since`` to the end of task ``until``, or with ``before`` to its start.

    An empty name means the step's beginning, or its end. ``with_uses``: held at least until the last pass of a tile that uses what is
    synchronized. If task ``since`` does not take place, nothing is held, or with ``with_uses`` from the step's beginning. If task ``until``
    does not take place, the memory is held until the last use. ``gradients_of``: held from the end of the first backward pass on the
    device that makes a gradient of one of these regions (positions in ``ShardSync.regions``); if none does, nothing is held. ``copied``:
    that gradient is there beside it for a moment. ``used``: held for these passes of the device's tiles that use what is synchronized: from
    the first one on, or with ``since`` until the first one has begun, with ``throughout`` from ``since`` to the last one; a backward pass
    lasts as long as its segment's. ``queue``: if set, the device learns late that the memory is free: it then waits for the oldest in the
    queue where too much is held (``simulator.memory.transit``), with ``few`` where it is the third one; what is sent may be free only when
    the device updates. ``sum_bytes``: of a queue's, bytes of the sum that is made of it before it is free, and that stays. ``kind``: what
    it is held for; a queue's is ``BUFFERS``, a sum's ``GRADIENTS``.
    """

    device: int
    size_bytes: int
    since: str = ""
    until: str = ""
    with_uses: bool = False
    before: bool = False
    gradients_of: tuple[int, ...] = ()
    copied: bool = False
    used: Uses | Literal[""] = ""
    throughout: bool = False
    queue: Literal["", "sent", "received", "few"] = ""
    sum_bytes: int = 0
    kind: MemoryKind = MemoryKind.BUFFERS


@dataclass(frozen=True, slots=True)
class Places:
    """Where owners of parts are. ``servers``: for each server the device beside it. ``first_server``: parameter -> the server of its first
    partition. ``first_reader``: parameter -> the reader of its first part (``placement.first_readers``). ``represented``: of a folded plan,
    for which devices its readers stand."""

    servers: tuple[int, ...]
    first_server: Mapping[str, int]
    first_reader: Mapping[str, int]
    represented: Represented | None = None

    def server(self, parameter: str, region: int, partition: int) -> int:
        """The device of the server that owns a partition of a parameter's region."""
        return self.servers[owner_of(self.first_server[parameter], region, partition, len(self.servers))]

    def reader(self, parameter: str, region: int, part: int, readers: Sequence[int]) -> int:
        """Which of a region's readers owns a part of it."""
        return readers[owner_of(self.first_reader[parameter], region, part, len(readers))]


class SyncMethod(ABC):
    """What a plan knows of one method. It has no state; one object serves all plans."""

    contract: Contract

    def __init__(self, contract: Contract) -> None:
        self.contract = contract

    def serves_region(self, readers: Sequence[int], peers: Collection[int], sync: SyncConfig) -> bool:
        """Whether this method synchronizes a region with these readers; if not, the default method does. ``peers``: the first reader of
        each host if ``sync`` says so (``within``), else all readers."""
        return True

    def leaders(self, readers: tuple[int, ...], of_hosts: tuple[int, ...]) -> tuple[int, ...]:
        """``ShardSync.leaders`` where hosts do something within themselves. ``of_hosts``: for each reader the first one of its host."""
        return of_hosts

    def owners(
        self, parameter: str, region: int, box: Box, readers: tuple[int, ...], leaders: tuple[int, ...], sync: SyncConfig, places: Places
    ) -> Sequence[tuple[Box, tuple[int, ...]]]:
        """(part, its owners) for each part of a region. By default each reader owns the whole region."""
        return [(box, readers)]

    def limits(self, graph: OperatorGraph) -> tuple[int, int] | None:
        """Bytes at which the first bucket closes, and each later one (``make_buckets``); None if each region travels by itself."""
        return usual_limits() if self.contract.in_buckets else None

    def groups(
        self, graph: OperatorGraph, first_tile: Sequence[int], shards: Sequence[Shard], syncs: Sequence[ShardSync], wrapped: Wrapped
    ) -> Sequence[ShardSync]:
        """The synchronizations to carry out: ``syncs``, which have one region each, or buckets of them. All ranks need one order."""
        limits = self.limits(graph)
        return syncs if limits is None else make_buckets(graph, first_tile, shards, syncs, limits, wrapped)

    def template(self, readers: Group, leaders: Group, how: Setting) -> Template:
        """The communications of what these devices read, by roles. ``leaders``: see ``ShardSync``."""
        return Template()

    def template_of(self, plan: Plan, sync: ShardSync, *, pull_together: bool = True) -> Template:
        """That of a synchronization in a plan."""
        kinds = tuple([exchange.kind for exchange in self.messages(plan, sync)])
        return _template(self, sync.readers, sync.leaders, Setting(is_even(plan, sync), len(sync.shards), pull_together, kinds))

    def messages(self, plan: Plan, sync: ShardSync) -> Sequence[Exchange]:
        """What peers exchange, compressed."""
        return ()

    def works(self, plan: Plan, sync: ShardSync, work: Work) -> Sequence[DeviceWork]:
        """What each peer does for a compression."""
        return ()

    def steps(self, plan: Plan, sync: ShardSync, *, pull_together: bool = True) -> Sequence[SyncStep]:
        """The communications of ``sync``; those of one phase run one after the other. By default those of its template.

        ``pull_together``: with local aggregation a host's readers also pull through their leader, as the runtime does. Without it each
        reader pulls for itself, to simulate systems that do so.
        """
        return steps_of(plan, sync, self.template_of(plan, sync, pull_together=pull_together), self)

    def updates(self, plan: Plan, sync: ShardSync) -> Sequence[ShardUpdate]:
        """The owners' work on each shard of ``sync``."""
        sizes = ((number, box_bytes(plan, plan.shards[number].parameter, plan.shards[number].box)) for number in sync.shards)
        return [ShardUpdate(number, 0, 0, size, by_rows=False) for number, size in sizes]

    def host_buffers(self, plan: Plan, sync: ShardSync) -> Iterable[tuple[int, int]]:
        """(device, bytes) of buffers in the memory of the device's host, which servers beside accelerators have there."""
        return ()

    def holds(self, plan: Plan, sync: ShardSync) -> Iterator[Hold]:
        """Copies of values that others own, their gradients, and buffers: when in a step they are held."""
        return iter(())


@lru_cache(32)
def _template(method: SyncMethod, readers: Group, leaders: Group, how: Setting) -> Template:
    return method.template(readers, leaders, how)


def steps_of(plan: Plan, sync: ShardSync, template: Template, method: SyncMethod) -> list[SyncStep]:
    """The rows of a synchronization's template with its bytes; of frozen values those that bring them to their uses."""
    sizes, owners = _Sizes(plan, sync, template, method.messages(plan, sync)), [plan.shards[number].devices for number in sync.shards]
    found: list[SyncStep] = []
    for row in template.rows:
        if row.phase >= Phase.AFTER_BACKWARD and plan.is_frozen(sync):
            continue
        name = row_name(sync, row)
        if row.how is How.SUM and sizes[row.amount]:
            step = SyncStep(row.phase, row.stage, name, summed_bytes=sizes[row.amount], among=row.groups[0])
        elif row.how is How.EXCHANGE and (rounds := moving_rounds(*(_round(own, sizes, owners) for own in row.rounds))):
            step = SyncStep(row.phase, row.stage, name, rounds)
        elif row.work:
            step = SyncStep(row.phase, row.stage, name, works=tuple(method.works(plan, sync, row.work)))
        elif row.how is How.GATHER or row.how is How.SCATTER:
            kind: Kind = "all_gather" if row.how is How.GATHER else "reduce_scatter"
            step = SyncStep(row.phase, row.stage, name, collective=collective(plan, sync, kind))
        else:
            continue
        found.append(replace(step, large=row.large, apart=row.apart))
    return found


class _Sizes(dict[Amount, int]):
    """Amount -> bytes of it in a synchronization."""

    def __init__(self, plan: Plan, sync: ShardSync, template: Template, messages: Sequence[Exchange]) -> None:
        super().__init__({Amount(Of.MESSAGE, part=number): exchange.message_bytes for number, exchange in enumerate(messages)})
        self._plan, self._sync, self._amounts = plan, sync, Amounts(plan, sync, by_rows=sync.contract.by_rows)
        self[WHOLE] = gradient_bytes(plan, sync)
        if template.copies:
            owned = owned_bytes(plan, sync)
            self.update({Amount(Of.OWNED, part=part): owned.get(owner, 0) for part, owner in enumerate(template.copies[0])})

    def __missing__(self, amount: Amount) -> int:
        box = self._sync.box if amount.part < 0 else self._plan.shards[self._sync.shards[amount.part]].box
        self[amount] = size = self._amounts.values(amount.who, box) if amount.of is not Of.INDICES else 0
        if amount.of is not Of.VALUES:
            self[amount] = size = size + self._amounts.indices(amount.who, box)
        return size


def row_name(sync: ShardSync, row: Row) -> str:
    """Task name of a row."""
    name = sync_name(sync, row.verb)
    return f"{name} {','.join(map(str, row.groups[0]))}" if row.apart else name


def device_of(end: int, owners: Sequence[tuple[int, ...]]) -> int:
    """The device at an end of a flow: of a partition, its server. ``owners``: of partitions."""
    return owners[server_of(end)][0] if end < 0 else end


def _round(row: tuple[Sequence[Flow], bool], sizes: _Sizes, owners: Sequence[tuple[int, ...]]) -> tuple[list[tuple[int, int, int]], int]:
    """The flows of a round, and the most bytes that a target adds up. ``owners``: of partitions."""
    flows = [(device_of(source, owners), device_of(target, owners), sizes[amount]) for source, target, amount in row[0]]
    come: dict[int, int] = {}
    for _, target, size in flows if row[1] else ():
        come[target] = come.get(target, 0) + size
    return flows, max(come.values(), default=0)


def method_of(contract: Contract) -> SyncMethod:
    """The ``SyncMethod`` of a contract: ``METHOD`` of the module with its name."""
    method = import_module(f"soap.plan.syncs.{contract.name}").METHOD
    assert isinstance(method, SyncMethod)
    return method


def method_for(sync: ShardSync) -> SyncMethod:
    """The ``SyncMethod`` of a synchronization."""
    return method_of(sync.contract)
