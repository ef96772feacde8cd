"""Parameters of which each reader owns a part, as a choice of the search: where that is faster, and which get other owners together.

Sharing saves memory. It also saves time where updates take more of it than what is gathered does, as each device then updates a part alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from soap.cluster.topology import Topology
from soap.model.graph import OperatorGraph
from soap.search.pipelining import is_cut
from soap.search.starts import BASELINE, Start
from soap.strategy.config import Strategy, SyncConfig
from soap.strategy.named import HSDP, SHARING, named, on_top
from soap.strategy.recomputation import runs_of
from soap.strategy.sync import ALL_REDUCE, shares_in_hosts


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


def shared_starts(
    graph: OperatorGraph, topology: Topology, starts: Sequence[Start], syncs: Mapping[str, tuple[SyncConfig, ...]]
) -> dict[str, Strategy]:
    """The fastest start that fits, and data parallelism, with every parameter that they all-reduce owned in parts, in each way that
    ``syncs`` allows (parameter -> its choices), by name. None of what is a start already."""
    fitting = sorted((start for start in starts if start.fits and not is_cut(start.strategy)), key=lambda start: start.cost_ns)
    bases = [*fitting[:1], *(start for start in fitting[1:] if start.name == BASELINE)]
    known = [start.strategy for start in starts]
    found: dict[str, Strategy] = {}
    for word in SHARING:
        if word == HSDP and not shares_in_hosts(topology):
            continue
        shared = named(word, graph, topology).parameters
        for base in bases:
            summed = (name for name in shared if base.strategy.sync(name) == ALL_REDUCE and shared[name] in syncs.get(name, ()))
            strategy = base.strategy.with_changes(parameters={name: shared[name] for name in summed})
            if strategy not in known:
                known.append(strategy)
                found[on_top(base.name, word)] = strategy
    return found
