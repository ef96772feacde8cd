"""Where searches begin: the classical strategies, a random one, or a strategy of the user's."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from types import MappingProxyType

from soap.cluster.topology import Topology
from soap.errors import StrategyError, did_you_mean
from soap.model.batch import sample_factor
from soap.model.graph import OperatorGraph
from soap.search.metropolis import Evaluator
from soap.simulator.memory.certain import certainly_lacks
from soap.simulator.simulate import is_large
from soap.strategy.classical import CLASSICAL, NAMED, SYNCHRONIZED, random_strategy, uniform_config
from soap.strategy.config import Strategy, SyncConfig, settled
from soap.strategy.named import JOIN, SHARING, SIMULATED, check_name, forms, named
from soap.strategy.recomputation import recomputed

BASELINE = "data_parallel"
"""The start that is always evaluated, since every result is compared with it."""
INITIAL = "initial"
"""Name of the user's own start."""
RANDOM = "random"
"""Name of a start drawn at random."""
DYNAMIC = "dynamic"
"""Name of the start of ``soap.search.dynamic``. It needs the costs, so the caller makes it."""


@dataclass(frozen=True, slots=True)
class Start:
    """A start with its cost. ``overflow_bytes``: bytes that the devices lack to hold it, 0 if it fits."""

    name: str
    strategy: Strategy
    cost_ns: int
    overflow_bytes: int

    @property
    def fits(self) -> bool:
        """Whether every device has enough memory."""
        return self.overflow_bytes == 0

    @property
    def score(self) -> tuple[int, int]:
        """The order of preference: fewer missing bytes first, then less time."""
        return (self.overflow_bytes, self.cost_ns)


def evaluated(evaluator: Evaluator, name: str, strategy: Strategy) -> Start:
    """A strategy as a start."""
    return Start(name, strategy, evaluator.makespan_ns(strategy), evaluator.overflow_bytes(strategy))


def starting_strategies(
    graph: OperatorGraph,
    topology: Topology,
    names: Sequence[str] | None,
    initial: Strategy | None,
    seed: int,
    syncs: Mapping[str, Sequence[SyncConfig]] = MappingProxyType({}),
    saving: Sequence[str] = (),
) -> dict[str, Strategy]:
    """Name -> strategy in the order of evaluation: data parallelism, then ``names``, then ``initial``. If no names are given: ``saving``,
    as far as ``syncs`` allows it, all classical ones, and those that synchronize parameters in the other ways that ``syncs`` allows
    (``sync.sync_choices``); of equal ones the first. Where data parallelism does not fit, so that there are some that are ``saving``,
    without those that certainly lack memory; but data parallelism that shares parameters needs only to fit if layers run again."""
    wanted = [*saving, *CLASSICAL, *_synchronized(graph, topology, syncs)] if names is None else list(names)
    for name in wanted:
        check_start(name)
    found: dict[str, Strategy] = {}
    for name in dict.fromkeys((BASELINE, *wanted)):
        if name == RANDOM:
            found[name] = random_strategy(graph, topology, random.Random(f"{seed} {RANDOM}"))
            continue
        strategy = named(name, graph, topology)
        if names is None and name in saving and (strategy in found.values() or not are_allowed(strategy.parameters, syncs)):
            continue
        least = recomputed(graph, strategy) if name in SHARING else strategy
        if names is None and saving and name != BASELINE and certainly_lacks(graph, topology, least):
            continue
        found[name] = strategy
    if initial is not None:
        initial.validate(graph, topology.device_count)
        found[INITIAL] = initial
    return found


def check_start(name: str) -> None:
    """StrategyError in one line if no start has this name."""
    try:
        if name != RANDOM:
            check_name(name)
    except StrategyError:
        near = did_you_mean(name.partition(JOIN)[0], (*NAMED, *SIMULATED, RANDOM))
        raise StrategyError(f"start {name!r}: expected one of {forms()}; or {RANDOM}{near}") from None


def _synchronized(graph: OperatorGraph, topology: Topology, syncs: Mapping[str, Sequence[SyncConfig]]) -> list[str]:
    made = {name: make(graph, topology).parameters for name, make in SYNCHRONIZED.items()} if syncs else {}
    return [name for name, own in made.items() if own and are_allowed(own, syncs)]


def are_allowed(parameters: Mapping[str, SyncConfig], syncs: Mapping[str, Sequence[SyncConfig]]) -> bool:
    """Whether each parameter may be synchronized so. ``syncs``: parameter -> its choices."""
    return all(sync in syncs.get(parameter, ()) for parameter, sync in parameters.items())


def reference_strategies(graph: OperatorGraph, topology: Topology, starts: Iterable[Strategy]) -> tuple[Strategy, ...]:
    """Strategies from which informed proposals borrow: the different starts, and data parallelism on fewer of the devices. The latter
    are not evaluated as a whole beforehand, but a small model (or a small part of one) often runs best on a few devices."""
    baseline, count = CLASSICAL[BASELINE](graph, topology), len(topology.workers)
    narrower = [narrowed(graph, topology, baseline, n) for n in range(1, count) if count % n == 0]
    return different((*starts, *narrower))


def different(strategies: Iterable[Strategy]) -> tuple[Strategy, ...]:
    """Each strategy once, in the order of first occurrence."""
    found: list[Strategy] = []
    for strategy in strategies:
        if strategy not in found:
            found.append(strategy)
    return tuple(found)


def narrowed(graph: OperatorGraph, topology: Topology, baseline: Strategy, device_count: int) -> Strategy:
    """Data parallelism on the first devices, host by host. What ``baseline`` computes on all devices is computed on all of these."""
    devices = sorted(topology.workers, key=lambda i: (topology.devices[i].host, i))[:device_count]
    configs = {}
    for op in graph.operators:
        factor = sample_factor(op)
        if factor is not None:
            degree = min(device_count, op.factors[factor].size)
            config = uniform_config(op, {op.factors[factor].name: degree}, devices)
        else:
            replicas = device_count if baseline.operators[op.name].replicas > 1 else 1
            config = uniform_config(op, {}, devices, replicas)
        configs[op.name] = baseline.operators[op.name].placed_like(config)
    return settled(graph, baseline.with_changes(configs), topology.device_count)


def memory_binds(starts: Sequence[Start]) -> bool:
    """Whether a start that does not fit is faster than all that do."""
    best_ns = min((start.cost_ns for start in starts if start.fits), default=inf)
    return any(not start.fits and start.cost_ns < best_ns for start in starts)


def starts_of_chains(starts: Sequence[Start], count: int, available_bytes: float = inf) -> list[Start]:
    """The best ``count`` starts that fit; if none does, the one that lacks least, whose descent looks for memory first. Where memory binds
    that one is among them in any case: what saves most may fit, and be far from what is fast and nearly fits. But not if it lacks more than
    there is (``available_bytes``), or is so large that each proposal takes a second, and something fits."""
    fit, lacking = (_best([start for start in starts if start.fits == fits]) for fits in (True, False))
    near = [start for start in lacking[:1] if not fit or (start.overflow_bytes <= available_bytes and not is_large(start.strategy))]
    return [*fit[: count - len(near)], *near] if memory_binds(starts) else fit[:count]


def _best(starts: Sequence[Start]) -> list[Start]:
    """Different strategies, the best first."""
    found: list[Start] = []
    for start in sorted(starts, key=lambda own: own.score):
        if all(start.strategy != other.strategy for other in found):
            found.append(start)
    return found
