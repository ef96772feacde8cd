"""The seam between a plan and the methods that synchronize its parameters: what a method says, and how it is found. No costs here.

A method lays out what it synchronizes in ``ShardSync``s, and says of each which communications there are in which phase of a step, what is
updated then, and what memory that takes. Lowering, memory, explanations and the runtime walk over these answers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from importlib import import_module

from soap.model.graph import OperatorGraph
from soap.model.regions import Box
from soap.plan.flows import Round, box_bytes
from soap.plan.placement import server_of
from soap.plan.plan import Plan, Shard, ShardSync
from soap.plan.tiling import Tile
from soap.strategy.config import SyncConfig
from soap.strategy.methods import Contract


class Phase(IntEnum):
    """When in a step a communication takes place."""

    BEFORE_FORWARD = 0
    AFTER_BACKWARD = 1
    AFTER_UPDATE = 2


SUM, PUSH, SERVE, PULL = range(4)
"""Stages, the third part of a task's id: which of a synchronization's tasks comes first where several are ready at once."""


@dataclass(frozen=True, slots=True)
class SyncStep:
    """One communication: an all-reduce of ``summed_bytes`` over the readers, or ``rounds`` of flows, one after the other.

    ``large``: many connections that share links with others where links have ports, rather than one queue.
    """

    phase: Phase
    stage: int
    name: str
    rounds: tuple[Round, ...] = ()
    summed_bytes: int = 0
    large: bool = False


@dataclass(frozen=True, slots=True)
class ShardUpdate:
    """What each owner of a shard does when its gradients are there: adds up so many bytes, in so many rows if it is ``by_rows``, and has
    gradients for so many bytes of the shard then. ``name``: of a task of its own on the owner's server; else it is a part of the device's
    update."""

    shard: int
    added_bytes: int
    added_rows: int
    updated_bytes: int
    by_rows: bool
    name: str = ""


@dataclass(frozen=True, slots=True)
class Hold:
    """Memory for a while: from the start of the task ``since`` to the end of the task ``until``; empty names are the step's ends. If
    ``with_uses``, at least to the last pass of a tile that uses what is synchronized. If the first task does not
    take place, nothing is held, or if ``with_uses``, from the step's beginning; if the second does not, until the last use."""

    device: int
    size_bytes: int
    since: str = ""
    until: str = ""
    with_uses: bool = False


@dataclass(frozen=True, slots=True)
class Servers:
    """Where servers are. ``devices``: by server, beside which it runs. ``first``: parameter -> the server at which its partitions begin."""

    devices: tuple[int, ...]
    first: Mapping[str, int]

    def owner(self, parameter: str, region: int, partition: int) -> int:
        """The device of the server that keeps a partition of a parameter's region."""
        return self.devices[server_of(self.first[parameter], region, partition, len(self.devices))]


Asked = tuple[Sequence[tuple[int, int]], Sequence[tuple[int, int]]]
"""Who tells whom, before a step, which rows it looks up: members their leaders, then leaders the owners, as (source, target)."""


class SyncMethod(ABC):
    """One method: the part of it that a plan knows. Without state; one object serves all plans."""

    contract: Contract

    def __init__(self, contract: Contract) -> None:
        self.contract = contract

    def serves_region(self, readers: Sequence[int]) -> bool:
        """Whether a region with these readers is synchronized so, rather than as by default."""
        return True

    def owners(
        self, parameter: str, region: int, box: Box, readers: tuple[int, ...], sync: SyncConfig, servers: Servers
    ) -> Sequence[tuple[Box, tuple[int, ...]]]:
        """Who owns which part of a region: each reader all of it."""
        return [(box, readers)]

    def groups(
        self, graph: OperatorGraph, tiles: Sequence[Tile], shards: Sequence[Shard], syncs: Sequence[ShardSync]
    ) -> Sequence[ShardSync]:
        """The synchronizations of single regions, some of them joined; in one order for all ranks."""
        return syncs

    @abstractmethod
    def steps(self, plan: Plan, sync: ShardSync, *, pull_together: bool = True) -> Sequence[SyncStep]:
        """Its communications; those of one phase one after the other. ``pull_together``: as the runtime pulls; without it readers of a host
        pull each for itself, to simulate systems that do so."""

    def updates(self, plan: Plan, sync: ShardSync) -> Sequence[ShardUpdate]:
        """What owners do with each of its shards."""
        sizes = ((number, box_bytes(plan, plan.shards[number].parameter, plan.shards[number].box)) for number in sync.shards)
        return [ShardUpdate(number, 0, 0, size, by_rows=False) for number, size in sizes]

    def asked(self, plan: Plan, sync: ShardSync, *, pull_together: bool = True) -> Asked:
        """Who tells whom which rows it looks up."""
        return (), ()

    def copies(self, plan: Plan, sync: ShardSync) -> Mapping[int, int]:
        """By reader, bytes of values that it has of what others own; as many of their gradient."""
        return {}

    def buffers(self, plan: Plan, sync: ShardSync) -> Iterable[tuple[int, int]]:
        """(device, bytes) of what is sent and received beside values and gradients, at any time of a step."""
        return ()

    def holds(self, plan: Plan, sync: ShardSync) -> Iterator[Hold]:
        """When copies and buffers are there."""
        return iter(())


def method_of(contract: Contract) -> SyncMethod:
    """The part of a method that a plan knows: ``METHOD`` of its module."""
    method = import_module(f"soap.plan.syncs.{contract.name}").METHOD
    assert isinstance(method, SyncMethod)
    return method


def method_for(sync: ShardSync) -> SyncMethod:
    """The method of a synchronization."""
    return method_of(sync.contract)
