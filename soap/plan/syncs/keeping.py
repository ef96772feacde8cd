"""Shards and synchronizations of a plan: each parameter's method decides who owns which part of it and what is synchronized together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain

from soap.cluster.topology import Topology
from soap.model.graph import OperatorGraph
from soap.model.regions import Box
from soap.plan.compression.policy import settled
from soap.plan.placement import first_readers, first_servers, server_devices
from soap.plan.plan import ReadRegion, Shard, ShardSync
from soap.plan.syncs.amounts import Group
from soap.plan.syncs.represented import Represented
from soap.plan.syncs.seam import Places, SyncMethod, method_of
from soap.plan.tiling import Tile
from soap.strategy.config import Strategy, SyncConfig
from soap.strategy.sync import ALL_REDUCE
from soap.strategy.sync_contracts import METHODS
from soap.strategy.wrapped import USUAL, Wrapped

Cell = tuple[Box, tuple[int, ...], tuple[tuple[int, int, int], ...]]
"""A region of a parameter that the same tiles read: (box, devices, uses as (operator, tile, parameter position))."""


class Keeping:
    """Lays out shards and synchronizations for one graph on one cluster."""

    def __init__(
        self, graph: OperatorGraph, topology: Topology, represented: Represented | None = None, wrapped: Wrapped = USUAL
    ) -> None:
        """``represented``: see ``Places``."""
        self._graph, self._topology, self._wrapped = graph, topology, wrapped
        devices = server_devices(topology)
        self._places = Places(devices, first_servers(graph, len(devices)), first_readers(graph), represented)

    def keep(
        self, tiles: Sequence[Tile], first_tile: Sequence[int], regions: Iterable[tuple[str, Sequence[Cell]]], strategy: Strategy
    ) -> tuple[tuple[Shard, ...], tuple[ShardSync, ...]]:
        """All shards, parameter by parameter, and all synchronizations, method by method.

        ``regions``: (parameter, its cells), in the graph's order. Regions that the strategy's method does not serve use the default method.
        Parameters without a gradient are not synchronized; frozen ones may be gathered for their uses.
        """
        shards: list[Shard] = []
        syncs: dict[str, list[ShardSync]] = {}
        for parameter, cells in regions:
            sync, first, trainable = strategy.sync(parameter), len(shards), self._graph.tensors[parameter].requires_grad
            for index, (box, readers, uses) in enumerate(cells):
                places = tuple((first_tile[operator] + tile, place) for operator, tile, place in uses)
                used = self.used(parameter, (box, readers, uses), sync)
                if used is None:
                    shards.append(Shard(parameter, len(shards) - first, box, readers, places, trainable))
                    continue
                method, (_, leaders) = method_of(used.contract), serving(self._topology, sync, readers)
                owned = method.owners(parameter, index, box, readers, leaders, used, self._places)
                numbers = tuple(range(len(shards), len(shards) + len(owned)))
                for part, owners in owned:
                    shards.append(Shard(parameter, len(shards) - first, part, owners, places, trainable))
                name = method.contract.name
                how = None if used.compression is None else settled(self._graph, parameter, used.compression)
                region, away = ReadRegion(parameter, box, numbers, places), trainable and used.offload
                made = ShardSync(name, parameter, index, (region,), readers, leaders, how, away, self._cluster_readers(method, readers))
                syncs.setdefault(name, []).append(made)
        of_graph = self._graph, tiles, shards
        groups = [method.groups(*of_graph, syncs[method.contract.name], self._wrapped) for method in self._in_order(syncs)]
        return tuple(shards), tuple(chain.from_iterable(groups))

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

    def _cluster_readers(self, method: SyncMethod, readers: Sequence[int]) -> int | None:
        """``ShardSync.cluster_readers``."""
        stand_ins = self._places.represented
        return len(stand_ins.everyone(readers)) if stand_ins is not None and method.contract.owned_in_parts else None


def serving(topology: Topology, sync: SyncConfig, readers: Group) -> tuple[SyncConfig, Group]:
    """How a region with these readers is synchronized, by ``sync`` or else by the default method; and ``ShardSync.leaders``."""
    first: dict[int, int] = {}  # host -> the first of these readers there
    of_hosts = tuple([first.setdefault(topology.devices[own].host, own) for own in readers]) if sync.within == "host" else readers
    method = method_of(sync.contract)
    if method.serves_region(readers, dict.fromkeys(of_hosts), sync):
        return sync, method.leaders(readers, of_hosts)
    return replace(ALL_REDUCE, offload=sync.offload), readers
