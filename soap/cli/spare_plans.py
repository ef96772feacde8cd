"""Plans for a cluster that has lost devices: prepared by ``soap-search --spare-plans``, or searched when ``soap-run --restarts`` needs
one."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

from soap import api
from soap.cli.options import reading
from soap.cli.updating import Updating
from soap.cluster.fewer import without
from soap.cluster.presets import LOCAL, family
from soap.cluster.topology import Topology
from soap.errors import SoapError, TopologyError
from soap.files import reason
from soap.search.options import SearchOptions

SEARCH_S = 30.0
"""Training waits meanwhile."""


def left(topology: Topology, gone: Collection[int]) -> Topology:
    """The cluster without the devices of these numbers; this machine's is as it is when it is loaded, with what was measured of it."""
    found = without(topology, gone)
    if family(found.name) == LOCAL:
        return replace(api.load_cluster(found.name), limits=found.limits, own_samples=found.own_samples)
    return found


def topologies(topology: Topology) -> list[Topology]:
    """The clusters that are left if one device is lost, each once."""
    found: dict[str, Topology] = {}
    for number in range(topology.device_count) if topology.device_count > 1 else ():
        try:
            own = left(topology, [number])
        except TopologyError:  # the others do not reach each other without it
            continue
        found.setdefault(own.hash, own)
    return list(found.values())


def write(folder: str, topology: Topology, find: Callable[[Topology], api.SearchOutcome], stopped: Callable[[], bool]) -> list[Path]:
    """Search a plan for each of ``topologies``, and write it into the folder. Returns the files. SoapError in one line if it cannot be."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as cause:
        raise SoapError(f"--spare-plans {folder!r}: {reason(cause)}; expected a folder that can be written") from None
    written = []
    for number, own in enumerate(topologies(topology)):
        if stopped():
            break
        written.append(Path(folder) / f"spare-{own.device_count}-{number}.json")
        find(own).save(written[-1])
    return written


def search(args: argparse.Namespace, topology: Topology, path: Path) -> None:
    """Search a plan for what ``soap-run`` was told to train, on another cluster, and write it. Quick rather than thorough."""
    from soap.runtime.updates.trial import optimizer_states

    graph = api.with_recorded_rows(api.planned_graph(args.model, **reading(args, topology)), args.strategy)
    tried = Updating.of(args).tried(graph)
    options = SearchOptions(
        seconds=SEARCH_S,
        costs=args.costs,
        optimizer_states=optimizer_states(tried, sparse=bool(graph.sparse)),
        measured_updates=tried.measured,
        uncut=tried.whole,
        together=tried.coupled,
    )
    api.find(graph, topology, options, progress=True).save(path)
