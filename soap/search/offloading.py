"""Optimizer states on hosts, and what operators keep for their backward passes, as choices of the search: parts of the space only where
nothing else that it begins with fits.

A host updates more slowly than a device, and copies come on top: a plan that fits without that never gains time by it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from soap.cluster.host_links import host_link
from soap.cluster.topology import Topology
from soap.model.graph import OperatorGraph
from soap.plan.tiling import made_bytes, tiles_of
from soap.search.options import SearchOptions
from soap.search.space import Marked, Space
from soap.search.starts import Start
from soap.search.to_fit import Budgeted, Step, bases_of, fewest
from soap.simulator.communication.offloading import copy_ns
from soap.simulator.memory.footprint import kept_share
from soap.simulator.memory.sizes import away_bytes
from soap.strategy.config import Strategy
from soap.strategy.marks import OFFLOADED
from soap.strategy.named import OFFLOAD_KEPT, RECOMPUTE, named, offloaded_names
from soap.strategy.offloading import away, offloadable
from soap.strategy.recomputation import runs_of

if TYPE_CHECKING:
    from soap.simulator.incremental import IncrementalSimulator


def with_offloading(space: Space) -> Space:
    """The space in which hosts may keep the optimizer's state of every trainable parameter whose method allows that, and what operators
    keep: of each that the user has not pinned by itself, and of each of ``runs_of`` as a whole."""
    found = {}
    for name, choices in space.syncs.items():
        trained = space.graph.tensors[name].requires_grad  # frozen ones may be in ``syncs`` as well
        away = (replace(sync, offload=True) for sync in choices if trained and sync.contract.offloads)
        found[name] = tuple(dict.fromkeys((*choices, *away)))
    graph = space.graph
    able = offloadable(graph)
    single = [(graph.index[name],) for name in sorted(able, key=graph.index.__getitem__)]
    runs = [tuple(graph.index[name] for name in run if name in able) for run in runs_of(graph)]
    return replace(space, syncs=found).with_sets("offload", ([Marked(i, OFFLOADED, OFFLOADED) for i in own] for own in (*single, *runs)))


def offloading_starts(graph: OperatorGraph, topology: Topology, starts: Iterable[Start], options: SearchOptions) -> dict[str, Strategy]:
    """Starts that offload, by name; none if the options say which starts or ways of synchronizing there are, or one of ``starts`` fits."""
    if options.starts is not None or options.syncs or any(start.fits for start in starts):
        return {}
    names = [name for name in offloaded_names() if options.recompute is not False or RECOMPUTE not in name]
    return {name: named(name, graph, topology) for name in names}


def offload_to_fit(graph: OperatorGraph, topology: Topology, base: Strategy, share: Callable[[Strategy], float]) -> Budgeted:
    """``base`` with as few runs as it takes to fit that offload what they keep (``to_fit.fewest``)."""
    able = offloadable(graph)
    runs = [own for run in runs_of(graph) if (own := [name for name in run if name in able])]

    def made(chosen: Collection[int]) -> Strategy:
        return away(graph, base, [name for number in chosen for name in runs[number]])

    return fewest(_steps(graph, topology, base, runs), len(runs), made, share)


def _steps(graph: OperatorGraph, topology: Topology, strategy: Strategy, runs: Sequence[Sequence[str]]) -> Iterator[Step]:
    """A step for each run: bytes that it makes and keeps, and what its copies to the host and back take, each on the device where it is
    most."""
    links = [host_link(topology, device) for device in range(topology.device_count)]
    for number, run in enumerate(runs):
        kept, times = [0] * topology.device_count, [0] * topology.device_count
        for position in (graph.index[name] for name in run):
            op = graph.operators[position]
            for tile in tiles_of(graph, position, strategy.operators[op.name]):
                made = sum(made_bytes(graph, op, tile, k) for k in range(len(op.outputs)))
                kept[tile.device] += made + kept_share(graph, op, tile.intervals)
                times[tile.device] += 2 * copy_ns(away_bytes(graph, tile), links[tile.device])
        yield Step(number, OFFLOADED, max(kept), max(times))


def budgeted_offloading(
    graph: OperatorGraph, topology: Topology, evaluator: IncrementalSimulator, starts: Sequence[Start]
) -> Mapping[str, Budgeted]:
    """Further starts by name: the fastest of ``starts`` that lack memory, and keep all that they do on their devices, with as few runs as
    fit offloading it."""
    staying = [start for start in starts if start.fits or not any(config.offload for config in start.strategy.operators.values())]
    share = evaluator.peak_share
    bases = bases_of(staying, share, lambda strategy: away(graph, strategy))
    return {f"{start.name}, {OFFLOAD_KEPT}": offload_to_fit(graph, topology, start.strategy, share) for start in bases}
