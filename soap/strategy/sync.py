"""Which ways of synchronizing parameters there are for a model on a cluster, and which of them are usual."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from soap.cluster.topology import Topology
from soap.model.graph import OperatorGraph
from soap.strategy.config import MAX_PARTITIONS, Strategy, SyncConfig

PARTITIONS_PER_SERVER = 4
"""Partitions of a table for each server whose host has cores beside its devices, where nothing better is known: a few work at once."""

ALL_REDUCE, GATHER = SyncConfig(), SyncConfig("allgather")


def server_count(topology: Topology) -> int:
    """Hosts with devices."""
    return len({device.host for device in topology.devices})


def partition_counts(topology: Topology) -> tuple[int, ...]:
    """Numbers of partitions worth trying: 1, 2, 4, … until every server, and every core that works for one, has one."""
    most = server_count(topology)
    hosts = {device.host for device in topology.devices if device.type.kind != "cpu"}
    most = min(MAX_PARTITIONS, max(most, sum(topology.hosts[host].cpu_cores for host in hosts)))
    return tuple(2**k for k in range(most.bit_length() + 1) if 2**k < 2 * most and 2**k <= MAX_PARTITIONS)


def usual_server(topology: Topology) -> SyncConfig:
    """Some partitions on every server; a host's devices deal with servers together."""
    servers = server_count(topology)
    on_cores = any(device.type.kind != "cpu" for device in topology.devices)
    wanted = servers * (PARTITIONS_PER_SERVER if on_cores else 1)
    counts = partition_counts(topology)
    return SyncConfig("parameter_server", next((count for count in counts if count >= wanted), counts[-1]), _hosts_share(topology))


def sync_choices(
    graph: OperatorGraph, topology: Topology, asked: Sequence[SyncConfig] = (), uncut: Collection[str] = ()
) -> dict[str, tuple[SyncConfig, ...]]:
    """Trainable parameter -> ways of synchronizing it, all-reduce first; parameters that have no choice are left out.

    ``asked``: what all parameters may have beside all-reduce. If nothing is asked, sparse ones may have everything. ``uncut``: parameters
    that are kept in one partition.
    """
    together = (False, True) if _hosts_share(topology) else (False,)
    counts = partition_counts(topology)
    every = [GATHER, *(SyncConfig("parameter_server", count, local) for count in counts for local in together)]
    found = {}
    for tensor in graph.parameters:
        sparse = tensor.name in graph.sparse
        wanted = [sync for sync in asked if sparse or sync != GATHER] if asked else every if sparse else []
        if tensor.name in uncut:
            wanted = [replace(sync, partitions=1) for sync in wanted]
        choices = tuple(dict.fromkeys((ALL_REDUCE, *wanted)))
        if tensor.requires_grad and len(choices) > 1:
            found[tensor.name] = choices
    return found


def in_one_partition(strategy: Strategy, names: Collection[str]) -> Strategy:
    """The strategy with these parameters in one partition, if servers keep them."""
    for name, sync in strategy.parameters.items():
        if name in names and sync.partitions > 1:
            strategy = strategy.with_parameter(name, replace(sync, partitions=1))
    return strategy


def synchronized(graph: OperatorGraph, sync: SyncConfig, *, sparse: bool) -> dict[str, SyncConfig]:
    """All trainable parameters, or the sparse ones of them, synchronized in one way."""
    names = [tensor.name for tensor in graph.parameters if tensor.requires_grad and (tensor.name in graph.sparse or not sparse)]
    return dict.fromkeys(names, sync)


def _hosts_share(topology: Topology) -> bool:
    """Whether some host has several devices."""
    return server_count(topology) < len(topology.devices)
