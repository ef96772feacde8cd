"""Which parameters a search gives to other owners together: sharing one of many alone saves little, and costs an exchange of its own."""

from __future__ import annotations

from collections.abc import Mapping

from soap.model.graph import OperatorGraph
from soap.strategy.config import SyncConfig
from soap.strategy.recomputation import runs_of


def owner_sets(graph: OperatorGraph, syncs: Mapping[str, tuple[SyncConfig, ...]]) -> tuple[tuple[str, ...], ...]:
    """Sets of two or more parameters of which readers may own parts: those that each of ``runs_of`` the graph reads, and all. Those of a
    set have the same choices. ``syncs``: parameter -> its choices."""
    shared = {name: own for name, own in syncs.items() if any(sync.owner == "parts" for sync in own)}
    read = [dict.fromkeys(o.tensor for name in run for o in graph.operators[graph.index[name]].parameters) for run in runs_of(graph)]
    found: dict[tuple[str, ...], None] = {}
    for names in (*read, dict.fromkeys(shared)):
        by_choices: dict[tuple[SyncConfig, ...], list[str]] = {}
        for name in names:
            if name in shared:
                by_choices.setdefault(shared[name], []).append(name)
        found.update(dict.fromkeys(tuple(own) for own in by_choices.values() if len(own) > 1))
    return tuple(found)
