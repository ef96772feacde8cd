"""Compressed synchronization as a choice of the search: only of methods that the user names, and only where their policy compresses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from soap.model.graph import OperatorGraph
from soap.plan.compression.policy import chosen, layer_of
from soap.strategy.compression import Compression
from soap.strategy.config import FLOATING, Strategy, SyncConfig
from soap.strategy.sync import ALL_REDUCE, compressed

Choices = Mapping[str, tuple[SyncConfig, ...]]


def lossy_syncs(graph: OperatorGraph, lossy: Sequence[Compression]) -> dict[str, tuple[SyncConfig, ...]]:
    """Dense trainable parameter -> how these methods compress it (``policy.chosen``); parameters that none of them does are left out."""
    found = {}
    for tensor in graph.parameters:
        if tensor.requires_grad and tensor.name not in graph.sparse and tensor.dtype in FLOATING:
            layer = layer_of(graph, tensor.name)
            ways = [how for method in lossy if (how := chosen(method, layer)) is not None]
            if ways:
                found[tensor.name] = tuple(dict.fromkeys(map(compressed, ways)))
    return found


def with_lossy(graph: OperatorGraph, syncs: Choices, lossy: Sequence[Compression]) -> dict[str, tuple[SyncConfig, ...]]:
    """The choices of ``sync.sync_choices`` with those that compress, in the graph's order; all-reduce stays the first."""
    more = lossy_syncs(graph, lossy)
    names = [tensor.name for tensor in graph.parameters if tensor.name in syncs or tensor.name in more]
    return {name: (*syncs.get(name, (ALL_REDUCE,)), *more.get(name, ())) for name in names}


def lossy_starts(graph: OperatorGraph, baseline: Strategy, lossy: Sequence[Compression]) -> dict[str, Strategy]:
    """Name -> data parallelism in which one method compresses all that it does."""
    found = {}
    for method in lossy:
        own = {name: ways[0] for name, ways in lossy_syncs(graph, [method]).items()}
        if own:
            found[f"data_parallel, {method.word}"] = baseline.with_changes(parameters=own)
    return found
