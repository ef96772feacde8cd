"""Optimizer states on hosts, and what operators keep for their backward passes, as choices of the search: parts of the space only where
nothing else that it begins with fits.

A host updates more slowly than a device, and copies come on top: a plan that fits without that never gains time by it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from soap.cluster.topology import Topology
from soap.model.graph import OperatorGraph
from soap.search.options import SearchOptions
from soap.search.space import Marked, Space
from soap.search.starts import Start
from soap.strategy.config import Strategy
from soap.strategy.kept import OFFLOADED, offloadable
from soap.strategy.named import RECOMPUTE, named, offloaded_names
from soap.strategy.recomputation import runs_of


def with_offloading(space: Space) -> Space:
    """The space in which hosts may keep the optimizer's state of every trainable parameter whose method allows that, and what operators
    keep: of each that the user has not pinned by itself, and of each of ``runs_of`` as a whole."""
    found = {}
    for name, choices in space.syncs.items():
        trained = space.graph.tensors[name].requires_grad  # frozen ones may be in ``syncs`` as well
        away = (replace(sync, offload=True) for sync in choices if trained and sync.contract.offloads)
        found[name] = tuple(dict.fromkeys((*choices, *away)))
    graph = space.graph
    able, allowed = offloadable(graph), enumerate(space.allowed)
    pinned = {i for i, own in allowed if own is not None and (own.offload is not None or own.recompute)}
    single = [(graph.index[name],) for name in sorted(able, key=graph.index.__getitem__)]
    runs = [tuple(graph.index[name] for name in run if name in able) for run in runs_of(graph)]
    chosen = (tuple(Marked(i, OFFLOADED, OFFLOADED) for i in own if i not in pinned) for own in (*single, *runs))
    return replace(space, syncs=found, offload=tuple(dict.fromkeys(own for own in chosen if own)))


def offloading_starts(graph: OperatorGraph, topology: Topology, starts: Iterable[Start], options: SearchOptions) -> dict[str, Strategy]:
    """Starts that offload, by name; none if the options say which starts or ways of synchronizing there are, or one of ``starts`` fits."""
    if options.starts is not None or options.syncs or any(start.fits for start in starts):
        return {}
    names = [name for name in offloaded_names() if options.recompute is not False or RECOMPUTE not in name]
    return {name: named(name, graph, topology) for name in names}
