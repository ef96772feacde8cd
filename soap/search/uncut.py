"""Parameters that an optimizer needs whole: what that leaves to the operators that read them.

Factors that cut such a parameter are not split. If operators read parts of it, or if all parameters are needed together (``together``),
these operators are computed as in data parallelism, so that whoever has a part has all of it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from soap.cluster.topology import Topology
from soap.errors import StrategyError, asked
from soap.model.graph import Operand, Operator, OperatorGraph
from soap.model.regions import whole
from soap.search.constraints import Allowed
from soap.search.space import grid_of
from soap.strategy.classical import data_parallel


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
