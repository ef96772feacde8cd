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
from soap.model.graph import FactorKind, Operator, OperatorGraph, TensorKind
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
    op: Operator,
    order: Sequence[int],
    width: int,
    factor: int | None = None,
    periods: int = 1,
    outer: tuple[int | None, int] = (None, 1),
) -> OpConfig:  # fmt: skip
    """Samples split over groups of ``width`` neighbouring devices. Inside a group ``factor`` is split over the devices; without a factor
    every device of the group computes the same.

    ``periods``: how many blocks lie side by side in ``factor``; each device gets its part of every block. ``outer``: (another factor, in
    how many parts it is split): each part is computed by neighbouring devices of the group, among which ``factor`` is split. Without such
    a factor parts do the same. It may be ``factor`` too: then it is split over the parts, and inside them.
    """
    groups, sample, (apart, parts) = len(order) // width, sample_factor(op), outer
    inner = width // parts
    degrees = [1] * len(op.factors)
    if sample is not None:
        degrees[sample] = min(groups, op.factors[sample].size)
    if factor is not None:
        degrees[factor] = periods * inner
    if apart is not None:
        degrees[apart] *= parts
    replicas = groups if sample is None else 1, parts if apart is None else 1, inner if factor is None else 1
    devices = _grouped_devices(tuple(order), inner, parts, tuple(degrees), (sample, apart, factor), replicas)
    return OpConfig(tuple(degrees), devices, prod(replicas))


def spread(op: Operator, order: Sequence[int], factor: int | None, parts: int, width: int) -> OpConfig:
    """``factor`` split over ``parts`` sets of ``width`` neighbouring devices in each group of these, and samples over all sets of the same
    part, in each of which devices have a share. Without a factor, or with too few samples, only samples are split."""
    sample, shares = sample_factor(op), len(order) // parts
    if sample is None or factor is None or op.factors[sample].size < shares:
        return grouped(op, order, 1)
    degrees = [1] * len(op.factors)
    degrees[sample], degrees[factor] = shares, parts
    return OpConfig(tuple(degrees), _spread_devices(tuple(order), tuple(degrees), sample, factor, width))


@lru_cache(256)
def _spread_devices(order: tuple[int, ...], degrees: tuple[int, ...], sample: int, factor: int, width: int) -> tuple[int, ...]:
    places = ((*divmod(cell[sample], width), cell[factor]) for cell in product(*map(range, degrees)))
    return tuple([order[(group * degrees[factor] + part) * width + share] for group, share, part in places])


def shared(op: Operator, order: Sequence[int], samples: int) -> OpConfig:
    """Data parallelism of an operator that has a sample factor. ``samples``: the factor's size in the smallest micro-batch; if devices are
    more, it is divided among as many equal groups of neighbours as can be, which do the same: what follows finds its inputs there. The
    devices of a group share the positions of a loss, which on each of them would need all scores."""
    width = width_for(len(order), samples)
    return grouped(op, order, width, positions_of_loss(op, width))


def width_for(count: int, samples: int) -> int:
    """Devices of each of the most equal groups in which so many devices can divide so many samples."""
    return next(width for width in range(1, count + 1) if count % width == 0 and count // width <= samples)


def positions_of_loss(op: Operator, parts: int) -> int | None:
    """The longest factor but the samples along which a loss, a sum over all that it reads, may be split in so many parts."""
    if sample_factor(op) is None or not all(factor.summed for factor in op.factors):
        return None
    found = [i for i, factor in enumerate(op.factors) if factor.kind is FactorKind.REDUCTION and factor.size >= parts]
    return max(found, key=lambda i: (op.factors[i].size, -i), default=None)


@lru_cache(256)
def _grouped_devices(
    order: tuple[int, ...],
    width: int,
    parts: int,
    degrees: tuple[int, ...],
    factors: tuple[int | None, int | None, int | None],
    replicas: tuple[int, int, int],
) -> tuple[int, ...]:
    """``width``: of each of the ``parts`` of a group. ``factors``: those split over groups, parts and inside."""
    groups, (sample, apart, factor) = len(order) // (width * parts), factors
    devices: list[int] = []
    for replica, cell in product(product(*map(range, replicas)), product(*map(range, degrees))):
        group = replica[0] if sample is None else cell[sample] * groups // degrees[sample]
        part = replica[1] if apart is None else cell[apart] // (degrees[apart] // parts)
        rank = replica[2] if factor is None else cell[factor] % width
        devices.append(order[(group * parts + part) * width + rank])
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
