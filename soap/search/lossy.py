"""Compressed synchronization as a choice of the search: only of methods that the user names, and only where their policy compresses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from soap.cluster.topology import Topology
from soap.model.graph import OperatorGraph
from soap.plan.compression.policy import chosen, layer_of
from soap.strategy.compression import EXACT, Compression, Rgc, RgcAsq
from soap.strategy.config import FLOATING, Strategy, SyncConfig
from soap.strategy.sync import ALL_REDUCE, compressed, host_count, shares_in_hosts, ways_within
from soap.strategy.sync_contracts import Within

Choices = Mapping[str, tuple[SyncConfig, ...]]


def lossy_ways(topology: Topology) -> tuple[Within, ...]:
    """Who may compress: each device, and where there are several hosts of several devices one device of each host."""
    return ways_within(topology) if shares_in_hosts(topology) else ("none",)


def peer_counts(topology: Topology) -> tuple[int, ...]:
    """How many devices then compress, if all that there are train alike."""
    counts = {"none": topology.device_count, "host": host_count(topology)}
    return tuple(counts[within] for within in lossy_ways(topology))


def may_be_ragged(topology: Topology) -> bool:
    """Whether searches try ragged messages: on processors. The sizes of messages are known when a GPU has made them; a processor that
    waited for that in the middle of a step would not launch what comes behind."""
    return all(device.type.kind == "cpu" for device in topology.devices)


def _ragged(method: Compression) -> Sequence[Compression]:
    if isinstance(method, Rgc | RgcAsq) and method.selection not in EXACT:
        return [replace(method, ragged=True)]
    return []


def lossy_syncs(
    graph: OperatorGraph, lossy: Sequence[Compression], withins: Sequence[Within] = ("none",), *, ragged: bool = False
) -> dict[str, tuple[SyncConfig, ...]]:
    """Dense trainable parameter -> how these methods compress it (``policy.chosen``); parameters that none of them does are left out.
    ``ragged``: with ragged messages, too, where messages vary in length."""
    lossy = [way for method in lossy for way in (method, *(_ragged(method) if ragged else ()))]
    found = {}
    for tensor in graph.parameters:
        if tensor.requires_grad and tensor.name not in graph.sparse and tensor.dtype in FLOATING:
            layer = layer_of(graph, tensor.name)
            ways = [how for method in lossy if (how := chosen(method, layer)) is not None]
            if ways:
                found[tensor.name] = tuple(dict.fromkeys(compressed(how, within) for how in ways for within in withins))
    return found


def with_lossy(
    graph: OperatorGraph, syncs: Choices, lossy: Sequence[Compression], withins: Sequence[Within] = ("none",), *, ragged: bool = False
) -> dict[str, tuple[SyncConfig, ...]]:
    """The choices of ``sync.sync_choices`` with those that compress, in the graph's order; all-reduce stays the first."""
    more = lossy_syncs(graph, lossy, withins, ragged=ragged)
    names = [tensor.name for tensor in graph.parameters if tensor.name in syncs or tensor.name in more]
    return {name: (*syncs.get(name, (ALL_REDUCE,)), *more.get(name, ())) for name in names}


def lossy_starts(
    graph: OperatorGraph, baseline: Strategy, lossy: Sequence[Compression], withins: Sequence[Within] = ("none",)
) -> dict[str, Strategy]:
    """Name -> data parallelism in which one method compresses all that it does, in one of these ways."""
    found = {}
    for method in lossy:
        for within in withins:
            own = {name: ways[0] for name, ways in lossy_syncs(graph, [method], [within]).items()}
            if own:
                found[f"data_parallel, {method.word}{' by host' * (within == 'host')}"] = baseline.with_changes(parameters=own)
    return found
