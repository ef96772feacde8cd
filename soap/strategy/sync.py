"""Names for the usual synchronizations, and which synchronizations are worth trying for a model on a cluster."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from soap.cluster.topology import Topology
from soap.errors import StrategyError
from soap.model.graph import OperatorGraph
from soap.strategy.compression import Compression
from soap.strategy.config import Strategy, SyncConfig
from soap.strategy.sync_contracts import COMPRESSED, MAX_PARTITIONS, Within, by_word, words

PARTITIONS_PER_SERVER = 4
"""Partitions of a table per server, where the host has CPU cores beside its devices: a few cores then work at once. A default."""

ALL_REDUCE = SyncConfig()
"""Gradients are summed over the devices that read a parameter, each of which updates its copy."""
SPARSE_ALL_GATHER = SyncConfig(payload="rows")
"""For sparse parameters: every reader gets the others' indices and rows of the gradient, adds them up and updates its copy."""

SHARDED_STATE = SyncConfig("parts")
"""Each reader owns a part of every shard, and alone keeps the optimizer's state for it and updates it (ZeRO-1, ZeRO-2)."""


SHARDED = SyncConfig("parts", residence="gathered")
"""Each reader owns a part of every shard. The rest of the values is there only for the passes that read it (ZeRO-3, FSDP)."""

SHARDED_IN_HOSTS = SyncConfig("parts", residence="gathered", within="host")
"""The readers of each host share a copy so. Owners of the same part on several hosts sum its gradients and update it alike (HSDP)."""


SAVING_MEMORY: tuple[SyncConfig, ...] = (SHARDED_STATE, SHARDED)
"""What searches also choose from, without being asked, where data parallelism does not fit into memory (``saving_memory``)."""


def saving_memory(topology: Topology) -> tuple[SyncConfig, ...]:
    """``SAVING_MEMORY``, and where several hosts have several devices each host's own copy as well."""
    return (*SAVING_MEMORY, SHARDED_IN_HOSTS) if shares_in_hosts(topology) else SAVING_MEMORY


def parameter_server(partitions: int = 1, within: Within = "none", *, rows: bool = False) -> SyncConfig:
    """Each shard is cut by rows into partitions, which the hosts' servers own and update. Readers push gradients and pull values.

    ``rows``: for sparse parameters: only the rows that a step touches travel, and no reader keeps a copy. ``within="host"``: the devices of
    a host push and pull together, through the first of them.
    """
    if rows:
        return SyncConfig("servers", "rows", "gathered", within, partitions)
    return SyncConfig("servers", within=within, partitions=partitions)


def compressed(compression: Compression, within: Within = "none") -> SyncConfig:
    """Every reader sends the others what a method makes of its gradient, and updates its copy with the sum of what all sent. Lossy.

    ``within="host"``: the readers of a host add up their gradients first. The first of them compresses and exchanges with the other hosts',
    and gives the sum to the rest.
    """
    return SyncConfig(payload=COMPRESSED, within=within, compression=compression)


def worded(word: str, partitions: int = 1, within: Within = "none", *, sparse: bool = False) -> SyncConfig:
    """What a method's word means for a sparse or a dense parameter; if it serves only the other kind, what it means for that.

    StrategyError if the word is unknown, or its method does not allow these ``partitions`` or this ``within``.
    """
    contract = by_word(word, sparse=sparse) or by_word(word, sparse=not sparse)
    assert contract is not None  # every method serves sparse or dense parameters
    if contract.compresses:
        raise StrategyError(f"synchronization {word!r} needs a compression; expected one of {', '.join(words())}")
    own_within: Within = "host" if word == contract.host_word else within
    return SyncConfig(contract.owner, contract.payload, contract.residence, own_within, partitions)


def fitting(sync: SyncConfig, *, sparse: bool) -> SyncConfig | None:
    """The counterpart of ``sync`` (same word) for a sparse or a dense parameter; None if there is none."""
    if sync.contract.serves(sparse=sparse):
        return sync
    if sync.contract.compresses:
        return None
    found = worded(sync.contract.word, sync.partitions, sync.within, sparse=sparse)
    return found if found.contract.serves(sparse=sparse) else None


def fitted(graph: OperatorGraph, parameter: str, sync: SyncConfig) -> SyncConfig:
    """``fitting`` for a parameter of a graph. StrategyError if there is none."""
    found = fitting(sync, sparse=parameter in graph.sparse)
    if found is None:
        sync.require_serves(parameter, graph)
        raise AssertionError  # the line above raises whenever ``fitting`` finds nothing
    return found


def offloaded(graph: OperatorGraph, strategy: Strategy) -> Strategy:
    """The strategy with the optimizer's state of every trainable parameter in hosts' memory, if the parameter's method allows that."""
    names = [tensor.name for tensor in graph.parameters if tensor.requires_grad and strategy.sync(tensor.name).contract.offloads]
    return strategy.with_changes(parameters={name: replace(strategy.sync(name), offload=True) for name in names})


def host_count(topology: Topology) -> int:
    """Hosts with devices."""
    return len({device.host for device in topology.devices})


def server_count(topology: Topology) -> int:
    """Parameter servers: one on each of the hosts with devices, or of those that are servers, if any is."""
    return len(_serving_hosts(topology))


def _serving_hosts(topology: Topology) -> set[int]:
    chosen = topology.servers or range(topology.device_count)
    return {topology.devices[device].host for device in chosen}


def partition_counts(topology: Topology) -> tuple[int, ...]:
    """Numbers of partitions worth trying: 1, 2, 4, … up to one for each server and for each CPU core that works for a server."""
    most, serving = server_count(topology), _serving_hosts(topology)
    hosts = {device.host for device in topology.devices if device.type.kind != "cpu" and device.host in serving}
    most = min(MAX_PARTITIONS, max(most, sum(topology.hosts[host].cpu_cores for host in hosts)))
    return tuple(2**k for k in range(most.bit_length() + 1) if 2**k < 2 * most and 2**k <= MAX_PARTITIONS)


def usual_server(topology: Topology) -> SyncConfig:
    """The default server synchronization: some partitions per server, with local aggregation where a host has several devices."""
    servers, serving = server_count(topology), _serving_hosts(topology)
    on_cores = any(device.type.kind != "cpu" for device in topology.devices if device.host in serving)
    wanted = servers * (PARTITIONS_PER_SERVER if on_cores else 1)
    counts = partition_counts(topology)
    return parameter_server(next((count for count in counts if count >= wanted), counts[-1]), "host" if _hosts_share(topology) else "none")


def sync_choices(
    graph: OperatorGraph, topology: Topology, asked: Sequence[SyncConfig] = (), uncut: Collection[str] = (), *, saving: bool = False
) -> dict[str, tuple[SyncConfig, ...]]:
    """Parameter -> its possible synchronizations, all-reduce first; parameters without a choice are left out. Frozen ones may be gathered
    for their uses.

    ``asked``: the choices beside all-reduce, for all parameters. If it is empty, sparse parameters may have every method and dense ones
    have no choice; ``saving``: all then have ``saving_memory``, too. ``uncut``: parameters that stay in one partition, and of which readers
    own no parts.
    """
    counts, ways = partition_counts(topology), ways_within(topology)
    every = [SPARSE_ALL_GATHER, *(parameter_server(count, within) for count in counts for within in ways)]
    more = saving_memory(topology) if saving and not asked else ()
    found = {}
    for tensor in graph.parameters:
        sparse = tensor.name in graph.sparse
        known = [fitting(sync, sparse=sparse) for sync in (*(asked or (every if sparse else ())), *more)]
        wanted = [sync for sync in known if sync is not None]
        if tensor.name in uncut:
            wanted = [replace(sync, partitions=1) for sync in wanted if sync.owner != "parts"]
        choices = tuple(dict.fromkeys((ALL_REDUCE, *(own for own in wanted if tensor.requires_grad or own.contract.gathers_values))))
        if len(choices) > 1:
            found[tensor.name] = choices
    return found


def require_sharers(topology: Topology, asked: Sequence[SyncConfig]) -> None:
    """StrategyError in one line if one of these lets devices own parts, and there is one device alone, which owns everything anyway."""
    for sync in asked if topology.device_count == 1 else ():
        if sync.owner == "parts":
            found = f"synchronization by {sync.word}, on cluster {topology.name!r} of one device, which has nobody to share with"
            raise StrategyError(f"{found}: expected two devices or more; leave {sync.word} out, or take a larger cluster")


def in_one_partition(strategy: Strategy, names: Collection[str]) -> Strategy:
    """The strategy with each of these parameters in one partition, if servers own it, and all-reduced, if readers own parts of it."""
    for name, sync in strategy.parameters.items():
        if name in names and sync.owner == "parts":
            strategy = strategy.with_parameter(name, replace(ALL_REDUCE, offload=sync.offload))
        elif name in names and sync.partitions > 1:
            strategy = strategy.with_parameter(name, replace(sync, partitions=1))
    return strategy


def synchronized(graph: OperatorGraph, sync: SyncConfig, *, sparse: bool) -> dict[str, SyncConfig]:
    """Parameter -> ``sync``, or its counterpart for the parameter's kind. ``sparse``: only the sparse parameters. Frozen ones are left out,
    unless their values are gathered for their uses."""
    known = [tensor for tensor in graph.parameters if tensor.requires_grad or sync.contract.gathers_values]
    names = [tensor.name for tensor in known if tensor.name in graph.sparse or not sparse]
    return {name: fitted(graph, name, sync) for name in names}


def ways_within(topology: Topology) -> tuple[Within, ...]:
    """What may be done inside hosts first, on this cluster."""
    return ("none", "host") if _hosts_share(topology) else ("none",)


def shares_in_hosts(topology: Topology) -> bool:
    """Whether there are several hosts, some with several devices, so that each may have a copy of its own."""
    return host_count(topology) > 1 and _hosts_share(topology)


def _hosts_share(topology: Topology) -> bool:
    """Whether some host has several devices."""
    return host_count(topology) < len(topology.devices)
