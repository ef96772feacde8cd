"""Shards and synchronizations of a plan: each parameter's method decides who owns which part of it and what is synchronized together."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from operator import is_
from typing import NamedTuple

from soap.cluster.topology import Topology
from soap.model.graph import OperatorGraph
from soap.model.regions import Box
from soap.plan.compression.policy import settled
from soap.plan.pass_order import PassOrder
from soap.plan.placement import first_readers, first_servers, server_devices
from soap.plan.plan import ReadRegion, Shard, ShardSync
from soap.plan.syncs.amounts import Group
from soap.plan.syncs.gathering import in_parts, repeats
from soap.plan.syncs.represented import Represented
from soap.plan.syncs.seam import Places, SyncMethod, method_of
from soap.plan.tiling import part_of
from soap.strategy.config import Strategy, SyncConfig
from soap.strategy.sync import ALL_REDUCE
from soap.strategy.sync_contracts import METHODS
from soap.strategy.wrapped import USUAL, Wrapped

Cell = tuple[Box, tuple[int, ...], tuple[tuple[int, int, int], ...]]
"""A region of a parameter that the same tiles read: (box, devices, uses as (operator, tile, parameter position))."""


@dataclass(frozen=True, eq=False)
class KeptRegion:
    """A region of a parameter, wherever its readers' tiles and its shards are numbered in a plan. ``uses``: (operator, tile, parameter
    position). ``parts``: (part, its owners), each a shard. ``sync``: its synchronization, without the region; None if there is none."""

    box: Box
    uses: tuple[tuple[int, int, int], ...]
    parts: tuple[tuple[Box, tuple[int, ...]], ...]
    sync: ShardSync | None


@dataclass(frozen=True, eq=False)
class KeptParameter:
    """A parameter with its regions: one object for as long as nothing of it changes. ``users``: the operators that read it. ``offload``:
    whether owners update in their host's memory."""

    parameter: str
    regions: tuple[KeptRegion, ...]
    users: tuple[int, ...]
    trainable: bool
    offload: bool


class _Placed(NamedTuple):
    """The shards and synchronizations of ``kept`` in the plan in which its users' first tiles and its first shard have these numbers."""

    kept: KeptParameter
    first_tiles: tuple[int, ...]
    first_shard: int
    shards: tuple[Shard, ...]
    syncs: tuple[ShardSync, ...]


class Keeping:
    """Lays out shards and synchronizations for one graph on one cluster. Of each parameter it remembers the last ones."""

    def __init__(
        self, graph: OperatorGraph, topology: Topology, represented: Represented | None = None, wrapped: Wrapped = USUAL
    ) -> None:
        """``represented``: see ``Places``."""
        self._graph, self._topology, self._wrapped = graph, topology, wrapped
        devices = server_devices(topology)
        self._places = Places(devices, first_servers(graph, len(devices)), first_readers(graph), represented)
        self._kept: dict[str, tuple[Sequence[Cell], SyncConfig, bool, KeptParameter]] = {}
        self._placed: dict[str, _Placed] = {}
        self._groups: dict[str, tuple[Sequence[ShardSync], Sequence[ShardSync]]] = {}

    def keep(
        self, first_tile: Sequence[int], regions: Iterable[tuple[str, Sequence[Cell]]], strategy: Strategy, order: PassOrder | None
    ) -> tuple[tuple[Shard, ...], tuple[ShardSync, ...], tuple[KeptParameter, ...]]:
        """All shards, parameter by parameter, all synchronizations, method by method, and how each parameter is kept.

        ``regions``: (parameter, its cells), in the graph's order. Regions that the strategy's method does not serve use the default method.
        Parameters without a gradient are not synchronized; frozen ones may be gathered for their uses. ``order``: of the strategy.
        """

        def micro_batch_of(tile: int) -> int:
            operator = bisect_right(first_tile, tile) - 1
            config = strategy.operators[self._graph.operators[operator].name]
            return part_of(config, tile - first_tile[operator], strategy.microbatches)

        shards: list[Shard] = []
        syncs: dict[str, list[ShardSync]] = {}
        kept: list[KeptParameter] = []
        for parameter, cells in regions:
            kept.append(self._keep(parameter, cells, strategy.sync(parameter), order))
            placed = self._place(kept[-1], first_tile, len(shards))
            shards += placed.shards
            for own in placed.syncs:
                syncs.setdefault(own.method, []).append(own)
        groups = [self._group(own, first_tile, shards, syncs[own.contract.name], micro_batch_of, order) for own in self._in_order(syncs)]
        return tuple(shards), tuple(chain.from_iterable(groups)), tuple(kept)

    def _keep(self, parameter: str, cells: Sequence[Cell], sync: SyncConfig, order: PassOrder | None) -> KeptParameter:
        """How a parameter with these cells is kept."""
        known, readers = self._kept.get(parameter), self._graph.parameter_users.get(parameter, ())
        repeated = sync.contract.gathers_values and not self._wrapped.once and all(repeats(order, operator) for operator, _ in readers)
        if known is None or known[0] is not cells or known[1:3] != (sync, repeated):
            regions = tuple([self._region(parameter, index, cell, sync, repeated) for index, cell in enumerate(cells)])
            users = tuple(sorted({operator for region in regions for operator, _, _ in region.uses}))
            own = KeptParameter(parameter, regions, users, self._graph.tensors[parameter].requires_grad, sync.offload)
            known = self._kept[parameter] = cells, sync, repeated, own
        return known[3]

    def _region(self, parameter: str, index: int, cell: Cell, sync: SyncConfig, repeated: bool) -> KeptRegion:
        """How one of its cells is. ``repeated``: for each micro-batch, if its values are gathered."""
        box, readers, uses = cell
        used = self.used(parameter, cell, sync)
        if used is None:
            return KeptRegion(box, uses, ((box, readers),), None)
        method, (_, leaders) = method_of(used.contract), serving(self._topology, sync, readers)
        owned = method.owners(parameter, index, box, readers, leaders, used, self._places)
        how = None if used.compression is None else settled(self._graph, parameter, used.compression)
        away, name = self._graph.tensors[parameter].requires_grad and used.offload, method.contract.name
        together = method.contract.owned_in_parts and leaders == readers and self._places.represented
        count = len(together.everyone(readers)) if together else None
        part = 0 if repeated and method.contract.gathers_values else None
        made = ShardSync(name, parameter, index, (), readers, leaders, how, away, count, part)
        return KeptRegion(box, uses, tuple(owned), made)

    def _place(self, kept: KeptParameter, first_tile: Sequence[int], first_shard: int) -> _Placed:
        """Its shards, of which the first one has this number, and its synchronizations."""
        first_tiles = tuple([first_tile[operator] for operator in kept.users])
        known = self._placed.get(kept.parameter)
        if known is not None and (known.kept, known.first_tiles, known.first_shard) == (kept, first_tiles, first_shard):
            return known
        shards: list[Shard] = []
        syncs: list[ShardSync] = []
        for region in kept.regions:
            uses, number = tuple([(first_tile[operator] + tile, place) for operator, tile, place in region.uses]), len(shards)
            for part, owners in region.parts:
                shards.append(Shard(kept.parameter, len(shards), part, owners, uses, kept.trainable))
            if region.sync is not None:
                numbers = tuple(range(first_shard + number, first_shard + len(shards)))
                syncs.append(replace(region.sync, regions=(ReadRegion(kept.parameter, region.box, numbers, uses),)))
        found = self._placed[kept.parameter] = _Placed(kept, first_tiles, first_shard, tuple(shards), tuple(syncs))
        return found

    def _group(
        self,
        method: SyncMethod,
        first_tile: Sequence[int],
        shards: Sequence[Shard],
        syncs: Sequence[ShardSync],
        micro_batch_of: Callable[[int], int],
        order: PassOrder | None,
    ) -> Sequence[ShardSync]:
        """What a method carries out for these; the last ones are remembered."""
        known = self._groups.get(method.contract.name)
        if known is None or len(known[0]) != len(syncs) or not all(map(is_, known[0], syncs)):
            found = method.groups(self._graph, first_tile, shards, syncs, self._wrapped)
            if order is not None:
                parts = ([own] if own.part is None else in_parts(own, order.cut.count, micro_batch_of) for own in found)
                found = tuple(chain.from_iterable(parts))
            known = self._groups[method.contract.name] = syncs, found
        return known[1]

    def used(self, parameter: str, cell: Cell, sync: SyncConfig) -> SyncConfig | None:
        """How a region of a parameter is synchronized if ``sync`` is asked for; None if it is not synchronized."""
        _, readers, uses = cell
        trainable, (used, _) = self._graph.tensors[parameter].requires_grad, serving(self._topology, sync, readers)
        active = trainable and any(operator in self._graph.backward_operators for operator, _, _ in uses)
        return None if not active and (trainable or not used.contract.gathers_values) else used

    @staticmethod
    def _in_order(syncs: Iterable[str]) -> list[SyncMethod]:
        """The methods that are used, in the registry's order."""
        used = set(syncs)
        return [method_of(contract) for contract in METHODS if contract.name in used]


def serving(topology: Topology, sync: SyncConfig, readers: Group) -> tuple[SyncConfig, Group]:
    """How a region with these readers is synchronized, by ``sync`` or else by the default method; and ``ShardSync.leaders``."""
    first: dict[int, int] = {}  # host -> the first of these readers there
    of_hosts = tuple([first.setdefault(topology.devices[own].host, own) for own in readers]) if sync.within == "host" else readers
    method = method_of(sync.contract)
    if method.serves_region(readers, dict.fromkeys(of_hosts), sync):
        return sync, method.leaders(readers, of_hosts)
    return replace(ALL_REDUCE, offload=sync.offload), readers
