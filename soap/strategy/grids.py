"""Where the classical strategies place tiles: on grids of devices, host by host, in groups of neighbours.

All operators use the same grid, so that data stays where it is: the i-th part of one operator's batch is on the same device as the i-th
part of the next operator's. Operators with equal degrees share one tuple of devices, which matters for thousands of devices.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import product
from math import gcd, prod

from soap.cluster.topology import Topology
from soap.errors import StrategyError, one_of
from soap.model.batch import sample_factor
from soap.model.graph import Operator, OperatorGraph, TensorKind
from soap.strategy.config import OpConfig, Strategy, check_config, settled_config


def uniform_config(op: Operator, degrees: Mapping[str, int], devices: Sequence[int], replicas: int = 1) -> OpConfig:
    """A configuration by factor names; factors without a degree are not split.

    The tiles go to ``devices`` in order, in equal shares; fewer tiles than devices go to evenly spaced ones. StrategyError if a factor is
    unknown, there are no devices, or the result is illegal.
    """
    names = [factor.name for factor in op.factors]
    for name in degrees:
        if name not in names:
            raise StrategyError(f"operator {op.name!r} has no factor {name!r}; expected {one_of(name, names)}")
    if not devices:
        raise StrategyError(f"operator {op.name!r}: no devices given; expected at least one")
    split = tuple(degrees.get(name, 1) for name in names)
    tiles = prod(split) * replicas
    config = OpConfig(split, tuple(devices[i * len(devices) // tiles] for i in range(tiles)), replicas)
    if settled_config(op, 1) is None:  # operators without a choice are configured by ``config.settled``
        check_config(op, config, max(devices) + 1)
    return config


def device_order(topology: Topology) -> tuple[int, ...]:
    """Numbers of the workers' devices (``Topology.workers``) host by host: neighbours in this order share a host wherever possible."""
    devices = topology.devices
    hosts = {host: i for i, host in enumerate(dict.fromkeys(device.host for device in devices))}
    return tuple(sorted(topology.workers, key=lambda device: (hosts[devices[device].host], device)))


def tensor_parallel_width(topology: Topology) -> int:
    """Devices per group: the number per host (a common divisor if hosts differ), or all devices if each host has one."""
    counts = Counter(topology.devices[device].host for device in topology.workers)
    return len(topology.workers) if max(counts.values()) == 1 else gcd(*counts.values())


def largest_divisor(number: int, limit: int) -> int:
    """The largest divisor of a number that is at most ``limit``."""
    return max(d for d in range(1, min(number, limit) + 1) if number % d == 0)


def grouped(
    op: Operator, order: Sequence[int], width: int, factor: int | None = None, periods: int = 1, outer: tuple[int, int] | None = None
) -> OpConfig:
    """Samples split over groups of ``width`` neighbouring devices. Inside a group ``factor`` is split over the devices; without a factor
    every device of the group computes the same.

    ``periods``: how many blocks lie side by side in ``factor``; each device gets its part of every block. ``outer``: (another factor, in
    how many parts it is split): each part is computed by neighbouring devices of the group, among which ``factor`` is split.
    """
    groups, sample, parts = len(order) // width, sample_factor(op), 1 if outer is None else outer[1]
    inner = width // parts
    split = [] if outer is None else [outer]
    degrees = [1] * len(op.factors)
    if sample is not None:
        degrees[sample] = min(groups, op.factors[sample].size)
    if factor is not None:
        degrees[factor] = periods * inner
        split.append((factor, inner))
    if outer is not None:
        degrees[outer[0]] = parts
    inside, across = inner if factor is None else 1, groups if sample is None else 1
    devices = _grouped_devices(tuple(order), width, tuple(degrees), sample, tuple(split), inside, across)
    return OpConfig(tuple(degrees), devices, inside * across)


def shared(op: Operator, order: Sequence[int], samples: int) -> OpConfig:
    """Data parallelism of an operator that has a sample factor. ``samples``: the factor's size in the smallest micro-batch; if devices are
    more, it is divided among as many equal groups of neighbours as can be, which do the same: what follows finds its inputs there."""
    count = len(order)
    return grouped(op, order, next(width for width in range(1, count + 1) if count % width == 0 and count // width <= samples))


@lru_cache(256)
def _grouped_devices(
    order: tuple[int, ...],
    width: int,
    degrees: tuple[int, ...],
    sample: int | None,
    split: tuple[tuple[int, int], ...],
    inside: int,
    across: int,
) -> tuple[int, ...]:
    """``split``: (factor, number of parts), the one whose parts lie farthest apart first."""
    groups = len(order) // width
    devices: list[int] = []
    for replica, cell in product(range(inside * across), product(*map(range, degrees))):
        group = replica // inside if sample is None else cell[sample] * groups // degrees[sample]
        rank = 0
        for factor, parts in split:
            rank = rank * parts + cell[factor] % parts
        devices.append(order[group * width + rank * inside + replica % inside])
    return tuple(devices)


def fill(graph: OperatorGraph, orders: Sequence[Sequence[int]], chosen: Mapping[int, OpConfig]) -> Strategy:
    """The chosen configurations, and data parallelism for every other operator.

    ``orders``: for each operator, the devices that it may use. ``chosen``: operator position -> configuration. Operators that may have only
    one configuration are left to ``config.settled``.
    """
    configs: dict[str, OpConfig] = {}
    whole: dict[str, frozenset[int]] = {}
    sets: dict[int, frozenset[int]] = {}
    for i, op in enumerate(graph.operators):
        config = chosen.get(i)
        if config is None:
            config = grouped(op, orders[i], 1) if sample_factor(op) is not None else _unsplit(graph, op, orders[i], whole)
        configs[op.name] = config
        complete = all(degree == 1 or factor.summed for factor, degree in zip(op.factors, config.degrees, strict=True))
        if id(config.devices) not in sets:
            sets[id(config.devices)] = frozenset(config.devices)
        whole.update({out.tensor: sets[id(config.devices)] if complete else frozenset() for out in op.outputs})
    return Strategy(configs)


def _unsplit(graph: OperatorGraph, op: Operator, order: Sequence[int], whole: Mapping[str, frozenset[int]]) -> OpConfig:
    """An operator without samples: repeated on the devices that have everything it reads, or if there are none, on one device."""
    devices = set(order)
    for operand in op.inputs:
        if graph.tensors[operand.tensor].kind is TensorKind.ACTIVATION:
            devices &= whole[operand.tensor]
    homes = tuple([device for device in order if device in devices]) or (order[0],)
    return OpConfig((1,) * len(op.factors), homes, len(homes))
