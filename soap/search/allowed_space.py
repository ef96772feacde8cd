"""The space that a search's options leave.

Some parameters must stay whole: factors that cut them are not split. If operators read parts of it, or if all parameters are needed
together (``together``), these operators are computed as in data parallelism, so that whoever has a part has all of it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from soap.cluster.topology import Topology
from soap.errors import StrategyError, asked
from soap.model.graph import Operand, Operator, OperatorGraph
from soap.model.regions import whole
from soap.search.constraints import Allowed, pairs_of, parse
from soap.search.lossy import lossy_ways, may_be_ragged, with_lossy
from soap.search.options import SearchOptions
from soap.search.space import Space, build_space, grid_of
from soap.strategy.classical import data_parallel
from soap.strategy.config import SyncConfig
from soap.strategy.sync import require_sharers, sync_choices


def with_uncut(
    graph: OperatorGraph, topology: Topology, allowed: Mapping[str, Allowed], names: Collection[str], together: Collection[str] = ()
) -> dict[str, Allowed]:
    """What is left to operators if these parameters are not cut. StrategyError in one line if the user's constraints cut one."""
    found, everything = dict(allowed), tuple(range(topology.device_count))
    usual = data_parallel(graph, topology) if names or together else None
    everywhere = {name for name in names if any(_reads_part(graph, op, own) for op, own in _readers(graph, name))} | {*together}
    for name in dict.fromkeys((*names, *together)):
        for op, own in _readers(graph, name):
            before = found.get(op.name, Allowed(None, frozenset(), everything))
            cutting = frozenset(1 + dim.factor for dim in own.dims if dim.factor is not None)
            grid = before.grid
            if grid is not None and any(grid[axis] > 1 for axis in cutting):
                raise StrategyError(
                    f"{asked('pins')} splits operator {op.name!r} so that parameter {name!r} is cut, which the optimizer needs whole; "
                    "pin it otherwise, or use an elementwise optimizer"
                )
            devices = before.devices
            if name in everywhere and usual is not None:
                config = usual.operators[op.name]
                devices = tuple(device for device in devices if device in config.devices)
                if grid not in (None, grid_of(config)) or len(devices) < len({*config.devices}) or any(
                    grid_of(config)[axis] > 1 for axis in before.whole
                ):
                    raise StrategyError(
                        f"the optimizer needs operator {op.name!r} as in data parallelism, which {asked('pins')} or "
                        f"{asked('forbidden')} rules out; drop that"
                    )
                grid = grid_of(config)
            whole = before.whole | (frozenset() if grid is not None else cutting)
            found[op.name] = replace(before, grid=grid, whole=whole, devices=devices)
    return found


def _readers(graph: OperatorGraph, name: str) -> list[tuple[Operator, Operand]]:
    return [(op, own) for op in graph.operators for own in op.parameters if own.tensor == name]


def _reads_part(graph: OperatorGraph, op: Operator, own: Operand) -> bool:
    shape = graph.tensors[own.tensor].shape
    return own.box([(0, factor.size) for factor in op.factors], shape) != whole(shape)


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
