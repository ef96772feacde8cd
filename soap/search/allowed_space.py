"""The space that a search's options leave."""

from __future__ import annotations

from collections.abc import Mapping

from soap.cluster.topology import Topology
from soap.model.graph import OperatorGraph
from soap.search.constraints import pairs_of, parse
from soap.search.lossy import lossy_ways, may_be_ragged, with_lossy
from soap.search.options import SearchOptions
from soap.search.space import Space, build_space
from soap.search.uncut import with_uncut
from soap.strategy.config import SyncConfig
from soap.strategy.sync import require_sharers, sync_choices


def allowed_space(graph: OperatorGraph, topology: Topology, options: SearchOptions) -> Space:
    """The space of allowed configurations, without reference strategies."""
    pins, forbidden = pairs_of(options.pins), pairs_of(options.forbidden)
    allowed = parse(graph, topology.device_count, pins, forbidden)
    allowed = with_uncut(graph, topology, allowed, options.uncut, options.together)
    require_sharers(topology, options.syncs)
    return build_space(graph, topology.device_count, allowed=allowed, syncs=allowed_syncs(graph, topology, options))


def allowed_syncs(
    graph: OperatorGraph, topology: Topology, options: SearchOptions, *, saving: bool = False
) -> Mapping[str, tuple[SyncConfig, ...]]:
    """By parameter, how it may be synchronized. ``saving``: see ``sync.sync_choices``."""
    exact, withins = sync_choices(graph, topology, options.syncs, options.uncut, saving=saving), lossy_ways(topology)
    return with_lossy(graph, exact, options.compressions, withins, ragged=may_be_ragged(topology))
