"""Clusters of several hosts, and strategies that synchronize sparse and dense parameters in any way."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod

from soap.cluster.topology import Topology
from soap.model.graph import FactorKind, OperatorGraph
from soap.strategy.classical import random_strategy
from soap.strategy.config import OpConfig, Strategy, SyncConfig
from soap.strategy.sync import SHARDED, SHARDED_IN_HOSTS, SHARDED_STATE, SPARSE_ALL_GATHER, fitted, parameter_server
from tests.strategies import CPU, WITHIN, cluster


def hosts(*devices: int) -> Topology:
    """A cluster with so many devices on each host."""
    return cluster([*devices], CPU)


def by_samples(graph: OperatorGraph, devices: Sequence[int], samples: int) -> Strategy:
    """Every operator's first factor of so many elements (which the batch is) in parts, one for each device."""
    configs = {}
    for op in graph.operators:
        first = next((k for k, f in enumerate(op.factors) if f.size == samples and f.kind is not FactorKind.PARAMETER), None)
        degrees = tuple(min(len(devices), samples) if k == first else 1 for k in range(len(op.factors)))
        configs[op.name] = OpConfig(degrees, tuple(devices[: prod(degrees)]))
    return Strategy(configs)


def synchronized(strategy: Strategy, graph: OperatorGraph, sparse: SyncConfig, dense: SyncConfig | None = None) -> Strategy:
    """The strategy with its sparse, and its dense, parameters synchronized so, as far as these are of that kind."""
    for tensor in graph.parameters:
        sync = sparse if tensor.name in graph.sparse else dense
        if sync is not None:
            strategy = strategy.with_parameter(tensor.name, fitted(graph, tensor.name, sync))
    return strategy


SYNCS: Mapping[str, SyncConfig] = {
    "allreduce": SyncConfig(),
    "allgather": SPARSE_ALL_GATHER,
    "server": parameter_server(1),
    "servers": parameter_server(5),
    "many partitions": parameter_server(40),
    "local": parameter_server(3, "host"),
    "zero": SHARDED_STATE,
    "fsdp": SHARDED,
    "hsdp": SHARDED_IN_HOSTS,
}


def random_sync(rng: random.Random, sparse: bool) -> SyncConfig:
    method = rng.choice(["allreduce", "allgather", "parameter_server", "parameter_server", "zero", "fsdp"])
    if method in ("zero", "fsdp"):
        return replace(SYNCS[method], within=rng.choice(WITHIN))
    if method == "parameter_server":
        return parameter_server(rng.choice([1, 2, 3, 7, 40]), "host" if rng.random() < 0.5 else "none", rows=sparse)
    return SPARSE_ALL_GATHER if method == "allgather" and sparse else SyncConfig()


def with_random_syncs(graph: OperatorGraph, strategy: Strategy, rng: random.Random) -> Strategy:
    """The strategy with any method for each parameter, some of them with states on hosts, and any prefetch."""
    syncs = {tensor.name: random_sync(rng, tensor.name in graph.sparse) for tensor in graph.parameters}
    syncs = {name: replace(sync, offload=sync.contract.offloads and rng.random() < 0.3) for name, sync in syncs.items()}
    return replace(strategy.with_changes(parameters=syncs), prefetch=rng.randrange(3))


def random_synchronized(graph: OperatorGraph, topology: Topology, rng: random.Random) -> Strategy:
    """Any configurations and any methods."""
    return with_random_syncs(graph, random_strategy(graph, topology, rng), rng)
