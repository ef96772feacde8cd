"""The interface between a plan and the methods that synchronize its parameters: what a method answers, and how it is found. No costs.

A method lays out what it synchronizes as ``ShardSync``s. For each it says which communications take place in which phase of a step, what is
updated, and what memory that takes. Lowering, memory, explanations and the runtime read these answers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from importlib import import_module
from typing import Literal

from soap.model.graph import OperatorGraph
from soap.model.regions import Box
from soap.plan.compression.seam import Layout, Work
from soap.plan.delivery import Round, box_bytes
from soap.plan.memory_kinds import MemoryKind
from soap.plan.placement import owner_of
from soap.plan.plan import Plan, Shard, ShardSync
from soap.plan.syncs.even_parts import Collective
from soap.plan.syncs.represented import Represented
from soap.plan.tiling import Tile
from soap.strategy.compression import Compression
from soap.strategy.config import SyncConfig
from soap.strategy.sync_contracts import Contract
from soap.strategy.wrapped import Wrapped


class Phase(IntEnum):
    """When in a step a communication takes place."""

    BEFORE_FORWARD = 0
    BEFORE_BACKWARD = 1
    AFTER_BACKWARD = 2
    AFTER_UPDATE = 3


SUM, PUSH, SERVE, PULL, SELECT, COMBINE, SPREAD, RESTORE = range(8)
"""Stages, the third part of a task's id: if several tasks of a synchronization are ready at once, the lowest stage goes first."""
REGATHER = SERVE
"""Stage of values that are gathered again before the backward pass: no server has anything to do then."""


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
    ``collective`` of equal parts.

    ``works``: what devices do before it, each once what it needs is there; the communication waits for all. ``large``: it moves much, over
    many connections. On links with ports and between GPUs the simulator cuts it into chunks, between which messages pass. ``beside``: it
    waits for what the step before it waits for, not for that step: both run side by side, among other devices.
    """

    phase: Phase
    stage: int
    name: str
    rounds: tuple[Round, ...] = ()
    summed_bytes: int = 0
    among: tuple[int, ...] = ()
    collective: Collective | None = None
    large: bool = False
    beside: bool = False
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


Asked = tuple[Sequence[tuple[int, int]], Sequence[tuple[int, int]]]
"""Who tells whom, before a step, which rows it looks up: members their leaders, then leaders the owners, as (source, target)."""


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

    def groups(
        self, graph: OperatorGraph, tiles: Sequence[Tile], shards: Sequence[Shard], syncs: Sequence[ShardSync], wrapped: Wrapped
    ) -> Sequence[ShardSync]:
        """The synchronizations to carry out, made by joining some of ``syncs``, which have one region each. All ranks need one order."""
        return syncs

    @abstractmethod
    def steps(self, plan: Plan, sync: ShardSync, *, pull_together: bool = True) -> Sequence[SyncStep]:
        """The communications of ``sync``; those of one phase run one after the other.

        ``pull_together``: with local aggregation a host's readers also pull through their leader, as the runtime does. Without it each
        reader pulls for itself, to simulate systems that do so.
        """

    def ending(self, plan: Plan, sync: ShardSync) -> Sequence[DeviceWork]:
        """What devices do between the last communication after the backward pass and their update."""
        return ()

    def updates(self, plan: Plan, sync: ShardSync) -> Sequence[ShardUpdate]:
        """The owners' work on each shard of ``sync``."""
        sizes = ((number, box_bytes(plan, plan.shards[number].parameter, plan.shards[number].box)) for number in sync.shards)
        return [ShardUpdate(number, 0, 0, size, by_rows=False) for number, size in sizes]

    def asked(self, plan: Plan, sync: ShardSync, *, pull_together: bool = True) -> Asked:
        """Who tells whom, before the step, which rows it looks up."""
        return (), ()

    def copies(self, plan: Plan, sync: ShardSync) -> Mapping[int, int]:
        """Reader -> bytes of its copy of values that others own; the copy's gradient takes as much again."""
        return {}

    def buffers(self, plan: Plan, sync: ShardSync) -> Iterable[tuple[int, int]]:
        """(device, bytes) of send and receive buffers, beside values and gradients, whenever in a step they are needed."""
        return ()

    def host_buffers(self, plan: Plan, sync: ShardSync) -> Iterable[tuple[int, int]]:
        """(device, bytes) of buffers in the memory of the device's host, which servers beside accelerators have there."""
        return ()

    def holds(self, plan: Plan, sync: ShardSync) -> Iterator[Hold]:
        """When in a step the copies and buffers are held."""
        return iter(())


def method_of(contract: Contract) -> SyncMethod:
    """The ``SyncMethod`` of a contract: ``METHOD`` of the module with its name."""
    method = import_module(f"soap.plan.syncs.{contract.name}").METHOD
    assert isinstance(method, SyncMethod)
    return method


def method_for(sync: ShardSync) -> SyncMethod:
    """The ``SyncMethod`` of a synchronization."""
    return method_of(sync.contract)
