"""The classical strategies, and a random one: functions of a graph and a topology that return a legal ``Strategy``.

All of them place operators on the same grid of devices, host by host, so that neighbours meet on one device: the i-th part of the
batch of one operator lies where the i-th part of its neighbour's batch does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from math import gcd, prod
from types import MappingProxyType
from typing import Protocol

from soap.chains import dense, find_chains, table
from soap.errors import StrategyError
from soap.graph import FactorKind, Operator, OperatorGraph, TensorKind
from soap.strategy import OpConfig, Strategy, check_config
from soap.topology import Topology

CHEAP_FLOPS_PER_ELEMENT = 64
"""Up to this many operations per element of its outputs, an operator is repeated rather than split and gathered again.

Norms, residual sums and activations need 1 to 20, matrix products and convolutions twice their inner size: hundreds and more.
"""


class Randomness(Protocol):
    """What ``random.Random`` and ``numpy.random.Generator`` have in common."""

    def random(self) -> float:
        """A number drawn uniformly from [0, 1)."""


def sample_factor(op: Operator) -> int | None:
    """Index of the factor along which the batch is split, or None if the operator has none (or must be kept whole)."""
    samples = [i for i, factor in enumerate(op.factors) if factor.kind is FactorKind.SAMPLE and op.partitionable]
    return min(samples, key=lambda i: (op.factors[i].size == 1, op.factors[i].summed, i), default=None)


def uniform_config(op: Operator, degrees: Mapping[str, int], devices: Sequence[int], replicas: int = 1) -> OpConfig:
    """A configuration by factor names; factors that are not named are not split.

    The tiles go to ``devices`` in order, in equal shares: with fewer tiles than devices evenly spaced ones are used.
    """
    names = [factor.name for factor in op.factors]
    for name in degrees:
        if name not in names:
            raise StrategyError(f"operator {op.name!r} has no factor {name!r}; expected one of {', '.join(names) or '(none)'}")
    if not devices:
        raise StrategyError(f"operator {op.name!r}: no devices given; expected at least one")
    split = tuple(degrees.get(name, 1) for name in names)
    tiles = prod(split) * replicas
    config = OpConfig(split, tuple(devices[i * len(devices) // tiles] for i in range(tiles)), replicas)
    check_config(op, config, max(devices) + 1)
    return config


def single_device(graph: OperatorGraph, topology: Topology, device: int = 0) -> Strategy:
    """Everything on one device."""
    strategy = Strategy({op.name: uniform_config(op, {}, (device,)) for op in graph.operators})
    strategy.validate(graph, topology.device_count)
    return strategy


def data_parallel(graph: OperatorGraph, topology: Topology) -> Strategy:
    """The batch split over all devices, parameters on each: what DistributedDataParallel does.

    Operators without batch (position embeddings, what follows a summed loss) are computed by every device that has their inputs anyway;
    one that needs the batch as a whole runs on a single device.
    """
    return _fill(graph, _device_order(topology), {})


def model_parallel(graph: OperatorGraph, topology: Topology) -> Strategy:
    """Contiguous blocks of operators, one block per device, balanced by floating-point operations."""
    order = _device_order(topology)
    # An operator without counted operations still touches every point of its iteration space once.
    work = [max(op.flops, prod(factor.size for factor in op.factors)) for op in graph.operators]
    blocks = _balanced_blocks(work, len(order))
    return Strategy({op.name: uniform_config(op, {}, (order[block],)) for op, block in zip(graph.operators, blocks, strict=True)})


def one_weird_trick(graph: OperatorGraph, topology: Topology) -> Strategy:
    """Data parallelism, but dense layers split by their outputs (Krizhevsky 2014): their many parameters need no synchronization."""
    order = _device_order(topology)
    chosen: dict[int, OpConfig] = {}
    for i, op in enumerate(graph.operators):
        matrix = dense(graph, op)
        if matrix is not None:
            width = _largest_divisor(len(order), op.factors[matrix.column].size)
            chosen[i] = _grouped(op, order, width, matrix.column)
    return _fill(graph, order, chosen)


def megatron(graph: OperatorGraph, topology: Topology) -> Strategy:
    """Tensor parallelism inside each host, data parallelism across hosts (Shoeybi et al. 2019).

    Pairs of matrices are split by columns, then by rows, with what lies between them; large tables and output layers by vocabulary;
    cheap operators between such parts are repeated on every device of the group. All the rest is data parallel.
    """
    order = _device_order(topology)
    most = _tensor_parallel_width(topology)
    chains = [(chain, chain.width(graph, most)) for chain in find_chains(graph)] if most > 1 else []
    width = max((width for _, width in chains if width > 1), default=most)
    chosen: dict[int, OpConfig] = {}
    gathered: set[int] = set()
    for chain, own in chains:
        if own > 1:
            gathered.update(chain.rows)
            for i, factor in chain.factors.items():
                chosen[i] = _grouped(graph.operators[i], order, own, factor, chain.periods.get(i, 1))
    _split_vocabularies(graph, order, width, chosen, gathered)
    _repeat_between(graph, order, width, chosen, gathered)
    return _fill(graph, order, chosen)


CLASSICAL: Mapping[str, Callable[[OperatorGraph, Topology], Strategy]] = MappingProxyType(
    {
        "single_device": single_device,
        "data_parallel": data_parallel,
        "model_parallel": model_parallel,
        "one_weird_trick": one_weird_trick,
        "megatron": megatron,
    }
)
"""The classical strategies by name."""


def random_config(op: Operator, device_count: int, rng: Randomness, max_tiles: int | None = None) -> OpConfig:
    """A legal configuration drawn at random, of at most ``max_tiles`` tiles (default: twice the number of devices)."""
    room = 2 * device_count if max_tiles is None else max_tiles
    degrees = [1] * len(op.factors)
    for i in sorted(range(len(degrees)), key=lambda _: rng.random()) if op.partitionable else ():
        if rng.random() < 0.6:
            degrees[i] = 1 + _below(min(op.factors[i].size, room), rng)
            room //= degrees[i]
    replicas = 1 + _below(room, rng) if rng.random() < 0.25 else 1
    tiles = prod(degrees) * replicas
    if rng.random() < 0.5:
        devices = tuple(_below(device_count, rng) for _ in range(tiles))
    else:
        devices = tuple(i * device_count // max(tiles, device_count) for i in range(tiles))
    return OpConfig(tuple(degrees), devices, replicas)


def random_strategy(graph: OperatorGraph, topology: Topology, rng: Randomness) -> Strategy:
    """A legal configuration drawn at random for every operator."""
    return Strategy({op.name: random_config(op, topology.device_count, rng) for op in graph.operators})


def _below(limit: int, rng: Randomness) -> int:
    return int(rng.random() * max(limit, 1))


def _device_order(topology: Topology) -> tuple[int, ...]:
    """Device numbers host by host, so that neighbours in this order share a host wherever possible."""
    hosts = {host: i for i, host in enumerate(dict.fromkeys(device.host for device in topology.devices))}
    return tuple(device.index for device in sorted(topology.devices, key=lambda d: (hosts[d.host], d.index)))


def _tensor_parallel_width(topology: Topology) -> int:
    """Devices per group: those of a host (a divisor if hosts differ), or all of them if each host has a single one."""
    counts = Counter(device.host for device in topology.devices)
    return topology.device_count if max(counts.values()) == 1 else gcd(*counts.values())


def _largest_divisor(number: int, limit: int) -> int:
    return max(d for d in range(1, min(number, limit) + 1) if number % d == 0)


def _grouped(op: Operator, order: Sequence[int], width: int, factor: int | None = None, periods: int = 1) -> OpConfig:
    """Samples over groups of ``width`` neighbouring devices; inside a group ``factor`` over its devices, or the same on each.

    With ``periods`` blocks side by side in ``factor``, each device gets its part of every block.
    """
    groups, sample = len(order) // width, sample_factor(op)
    degrees = [1] * len(op.factors)
    if sample is not None:
        degrees[sample] = min(groups, op.factors[sample].size)
    if factor is not None:
        degrees[factor] = periods * width
    inside, across = width if factor is None else 1, groups if sample is None else 1
    devices: list[int] = []
    for replica, cell in product(range(inside * across), product(*map(range, degrees))):
        group = replica // inside if sample is None else cell[sample] * groups // degrees[sample]
        rank = replica % inside if factor is None else cell[factor] % width
        devices.append(order[group * width + rank])
    return OpConfig(tuple(degrees), tuple(devices), inside * across)


def _fill(graph: OperatorGraph, order: Sequence[int], chosen: Mapping[int, OpConfig]) -> Strategy:
    """The chosen configurations, and data parallelism for every other operator."""
    configs: dict[str, OpConfig] = {}
    whole: dict[str, frozenset[int]] = {}
    for i, op in enumerate(graph.operators):
        config = chosen.get(i)
        if config is None:
            config = _grouped(op, order, 1) if sample_factor(op) is not None else _unsplit(graph, op, order, whole)
        configs[op.name] = config
        complete = all(degree == 1 or factor.summed for factor, degree in zip(op.factors, config.degrees, strict=True))
        whole.update({out.tensor: frozenset(config.devices if complete else ()) for out in op.outputs})
    return Strategy(configs)


def _unsplit(graph: OperatorGraph, op: Operator, order: Sequence[int], whole: Mapping[str, frozenset[int]]) -> OpConfig:
    """An operator without samples: repeated on the devices that have all it reads, else on one."""
    devices = set(order)
    for operand in op.inputs:
        if graph.tensors[operand.tensor].kind is TensorKind.ACTIVATION:
            devices &= whole[operand.tensor]
    homes = [device for device in order if device in devices] or [order[0]]
    return uniform_config(op, {}, homes, replicas=len(homes))


def _split_vocabularies(
    graph: OperatorGraph, order: Sequence[int], width: int, chosen: dict[int, OpConfig], gathered: set[int]
) -> None:
    """Split tables by entries and output layers by columns where the vocabulary is larger than the features."""
    last = _last_matrices(graph)
    for i, op in enumerate(graph.operators):
        if i in chosen or sample_factor(op) is None or width == 1:
            continue
        entries, matrix = table(graph, op), dense(graph, op) if i in last else None
        if entries is not None and entries.entries > entries.width and op.factors[entries.factor].size >= width:
            chosen[i] = _grouped(op, order, width, entries.factor)
            gathered.add(i)
        elif matrix is not None and matrix.outputs > matrix.inputs and op.factors[matrix.column].size >= width:
            chosen[i] = _grouped(op, order, width, matrix.column)


def _last_matrices(graph: OperatorGraph) -> set[int]:
    """Positions of the operators behind which no weight matrix follows: output layers are among them."""
    before: set[int] = set()
    for i in reversed(range(len(graph.operators))):
        op = graph.operators[i]
        if i in before or dense(graph, op) is not None:
            before.update(graph.producers[operand.tensor][0] for operand in op.inputs if operand.tensor in graph.producers)
    return set(range(len(graph.operators))) - before


def _repeat_between(
    graph: OperatorGraph, order: Sequence[int], width: int, chosen: dict[int, OpConfig], gathered: set[int]
) -> None:
    """Repeat cheap operators on all devices of a group where they read a gathered result and lead to another split part."""
    leads: set[int] = set()
    for i in reversed(range(len(graph.operators))):
        readers = {reader for out in graph.operators[i].outputs for reader, _ in graph.consumers.get(out.tensor, ())}
        if any(reader in chosen or reader in leads for reader in readers):
            leads.add(i)
    for i, op in enumerate(graph.operators):
        sources = {graph.producers[o.tensor][0] for o in op.inputs if o.tensor in graph.producers}
        if i in chosen or i not in leads or sample_factor(op) is None or not sources & gathered:
            continue
        if op.flops <= CHEAP_FLOPS_PER_ELEMENT * sum(prod(graph.tensors[out.tensor].shape) for out in op.outputs):
            chosen[i] = _grouped(op, order, width)
            gathered.add(i)


def _balanced_blocks(work: Sequence[int], blocks: int) -> list[int]:
    """Block number per operator: contiguous, with the least possible work in the fullest block, the others filled evenly."""
    low, high = max(work, default=0), sum(work)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _blocks_needed(work, middle) <= blocks else (middle + 1, high)
    result: list[int] = []
    block, load, rest = 0, 0, sum(work)
    for i, amount in enumerate(work):
        left = blocks - block - 1
        full = load + amount > low
        # Closing a block early, at its fair share, must leave room for the rest in the remaining blocks.
        fair = load > 0 and (2 * load + amount) * (left + 1) >= 2 * (load + rest)
        if full or (left > 0 and fair and _blocks_needed(work[i:], low) <= left):
            block, load = block + 1, 0
        result.append(block)
        load, rest = load + amount, rest - amount
    return result


def _blocks_needed(work: Sequence[int], capacity: int) -> int:
    """How many contiguous blocks of at most ``capacity`` the work fills."""
    count, load = 1, 0
    for amount in work:
        if load + amount > capacity:
            count, load = count + 1, 0
        load += amount
    return count
