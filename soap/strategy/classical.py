"""The classical strategies, and a random one: functions of a graph and a topology that return a legal ``Strategy``.

``grids`` places their tiles; ``megatron`` has the strategies that combine data, tensor and pipeline parallelism.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from types import MappingProxyType
from typing import Protocol

from soap.cluster.topology import Topology
from soap.model.batch import sample_factor
from soap.model.graph import Operator, OperatorGraph
from soap.strategy.config import OpConfig, Strategy, settled, settled_config
from soap.strategy.grids import device_order, fill, grouped, largest_divisor, tensor_parallel_width, uniform_config
from soap.strategy.megatron import balanced_blocks, context_parallel, hybrid, megatron, operator_work, sequence_parallel
from soap.strategy.recomputation import recomputed
from soap.strategy.sync import SHARDED, SHARDED_IN_HOSTS, SHARDED_STATE, SPARSE_ALL_GATHER, synchronized, usual_server
from soap.strategy.tensor_parallel_chains import dense, expert_factor


def expert_parallel(graph: OperatorGraph, topology: Topology) -> Strategy:
    """Experts divided among the devices of each host, and samples among hosts; everything else is data parallel on all devices.

    A group has as many neighbouring devices as divide the number of a host's, and at most one for each expert. GShard (Lepikhin et al.,
    ICLR 2021) divides experts so.
    """
    most, order = tensor_parallel_width(topology), device_order(topology)
    chosen: dict[int, OpConfig] = {}
    for i, op in enumerate(graph.operators):
        factor = expert_factor(graph, op)
        width = 1 if factor is None else largest_divisor(most, op.factors[factor].size)
        if width > 1:
            chosen[i] = grouped(op, order, width, factor)
    return settled(graph, fill(graph, [order] * len(graph.operators), chosen), topology.device_count)


__all__ = [
    "CLASSICAL",
    "EXPERTS",
    "LONG_CONTEXT",
    "NAMED",
    "RECOMPUTED",
    "SYNCHRONIZED",
    "context_parallel",
    "data_parallel",
    "expert_parallel",
    "fsdp",
    "hsdp",
    "hybrid",
    "hybrid_synchronization",
    "megatron",
    "model_parallel",
    "one_weird_trick",
    "parameter_server",
    "random_config",
    "random_strategy",
    "recompute",
    "sample_factor",
    "sequence_parallel",
    "single_device",
    "sparse_allgather",
    "uniform_config",
    "zero1",
]


class Randomness(Protocol):
    """What ``random.Random`` and ``numpy.random.Generator`` have in common."""

    def random(self) -> float:
        """A number drawn uniformly from [0, 1)."""


def single_device(graph: OperatorGraph, topology: Topology, device: int | None = None) -> Strategy:
    """Everything on one device (default: the first worker's)."""
    chosen = (topology.workers[0] if device is None else device,)
    strategy = settled(graph, Strategy({op.name: uniform_config(op, {}, chosen) for op in graph.operators}), topology.device_count)
    strategy.validate(graph, topology.device_count)
    return strategy


def data_parallel(graph: OperatorGraph, topology: Topology) -> Strategy:
    """The batch split over all devices (of workers), with all parameters on each: what DistributedDataParallel does.

    An operator without batch (position embeddings, what follows a summed loss) runs on every device that has its inputs anyway. An operator
    that needs the whole batch runs on a single device.
    """
    return settled(graph, fill(graph, [device_order(topology)] * len(graph.operators), {}), topology.device_count)


def model_parallel(graph: OperatorGraph, topology: Topology) -> Strategy:
    """Contiguous blocks of operators, one block per device, balanced by floating-point operations."""
    order = device_order(topology)
    blocks = balanced_blocks(operator_work(graph), len(order))
    configs = {op.name: uniform_config(op, {}, (order[block],)) for op, block in zip(graph.operators, blocks, strict=True)}
    return settled(graph, Strategy(configs), topology.device_count)


def one_weird_trick(graph: OperatorGraph, topology: Topology) -> Strategy:
    """Data parallelism, but dense layers split by their outputs (Krizhevsky 2014): their many parameters need no synchronization."""
    order = device_order(topology)
    chosen: dict[int, OpConfig] = {}
    for i, op in enumerate(graph.operators):
        matrix = dense(graph, op)
        if matrix is not None:
            width = largest_divisor(len(order), op.factors[matrix.column].size)
            chosen[i] = grouped(op, order, width, matrix.column)
    return settled(graph, fill(graph, [order] * len(graph.operators), chosen), topology.device_count)


CLASSICAL: Mapping[str, Callable[[OperatorGraph, Topology], Strategy]] = MappingProxyType(
    {
        "single_device": single_device,
        "data_parallel": data_parallel,
        "model_parallel": model_parallel,
        "one_weird_trick": one_weird_trick,
        "megatron": megatron,
    }
)
"""The classical strategies by name."""


def hybrid_synchronization(graph: OperatorGraph, topology: Topology) -> Strategy:
    """Data parallelism with sparse parameters on servers and dense ones all-reduced: the rule of Kim et al., "Parallax", EuroSys 2019."""
    return data_parallel(graph, topology).with_changes(parameters=synchronized(graph, usual_server(topology), sparse=True))


def parameter_server(graph: OperatorGraph, topology: Topology) -> Strategy:
    """Data parallelism with all parameters on servers."""
    return data_parallel(graph, topology).with_changes(parameters=synchronized(graph, usual_server(topology), sparse=False))


def sparse_allgather(graph: OperatorGraph, topology: Topology) -> Strategy:
    """Data parallelism with sparse parameters by sparse all-gather and dense ones all-reduced, as Horovod does."""
    return data_parallel(graph, topology).with_changes(parameters=synchronized(graph, SPARSE_ALL_GATHER, sparse=True))


def zero1(graph: OperatorGraph, topology: Topology) -> Strategy:
    """Data parallelism in which each device owns a part of every parameter and its optimizer's state: Rajbhandari et al., "ZeRO", 2020."""
    return data_parallel(graph, topology).with_changes(parameters=synchronized(graph, SHARDED_STATE, sparse=False))


def fsdp(graph: OperatorGraph, topology: Topology) -> Strategy:
    """Data parallelism in which each device owns a part of every parameter, and has the others' values only while it uses them: ZeRO-3, as
    PyTorch's ``fully_shard`` does. ZeRO-2 is ``zero1``, whose gradients are scattered as well."""
    return data_parallel(graph, topology).with_changes(parameters=synchronized(graph, SHARDED, sparse=False))


def hsdp(graph: OperatorGraph, topology: Topology) -> Strategy:
    """``fsdp`` inside each host, with sums of gradients across hosts: PyTorch's hybrid sharding (``HYBRID_SHARD``)."""
    return data_parallel(graph, topology).with_changes(parameters=synchronized(graph, SHARDED_IN_HOSTS, sparse=False))


SYNCHRONIZED: Mapping[str, Callable[[OperatorGraph, Topology], Strategy]] = MappingProxyType(
    {
        "hybrid": hybrid_synchronization,
        "parameter_server": parameter_server,
        "sparse_allgather": sparse_allgather,
        "zero1": zero1,
        "fsdp": fsdp,
        "hsdp": hsdp,
    }
)
"""Data parallelism with methods of synchronization other than all-reduce, by name."""

LONG_CONTEXT: Mapping[str, Callable[[OperatorGraph, Topology], Strategy]] = MappingProxyType(
    {"sequence_parallel": sequence_parallel, "context_parallel": context_parallel}
)
"""Strategies that split sequences, by name."""

EXPERTS: Mapping[str, Callable[[OperatorGraph, Topology], Strategy]] = MappingProxyType({"expert_parallel": expert_parallel})
"""Strategies that divide experts, by name."""


def recompute(graph: OperatorGraph, topology: Topology) -> Strategy:
    """Data parallelism that keeps only what goes on from run to run, and computes each run again (``recomputation.runs_of``)."""
    return recomputed(graph, data_parallel(graph, topology))


RECOMPUTED: Mapping[str, Callable[[OperatorGraph, Topology], Strategy]] = MappingProxyType({"recompute": recompute})
"""Strategies that recompute, by name: searches try them only if memory binds."""

NAMED: Mapping[str, Callable[[OperatorGraph, Topology], Strategy]] = MappingProxyType(
    {**CLASSICAL, **SYNCHRONIZED, **LONG_CONTEXT, **EXPERTS, **RECOMPUTED}
)
"""All strategies that have a name."""


def random_config(op: Operator, device_count: int, rng: Randomness, max_tiles: int | None = None) -> OpConfig:
    """A legal configuration drawn at random, with at most ``max_tiles`` tiles (default: twice the number of devices)."""
    only = settled_config(op, device_count)
    if only is not None:
        return only
    room = 2 * device_count if max_tiles is None else max_tiles
    degrees = [1] * len(op.factors)
    for i in sorted(range(len(degrees)), key=lambda _: rng.random()) if op.partitionable else ():
        if rng.random() < 0.6:
            degrees[i] = 1 + _below(min(op.factors[i].size, room), rng)
            room //= degrees[i]
    replicas = 1 + _below(room, rng) if rng.random() < 0.25 else 1
    tiles = prod(degrees) * replicas
    if rng.random() < 0.5:
        devices = tuple(_below(device_count, rng) for _ in range(tiles))
    else:
        devices = tuple(i * device_count // max(tiles, device_count) for i in range(tiles))
    return OpConfig(tuple(degrees), devices, replicas)


def random_strategy(graph: OperatorGraph, topology: Topology, rng: Randomness) -> Strategy:
    """A legal configuration drawn at random for every operator."""
    return Strategy({op.name: random_config(op, topology.device_count, rng) for op in graph.operators})


def _below(limit: int, rng: Randomness) -> int:
    return int(rng.random() * max(limit, 1))
