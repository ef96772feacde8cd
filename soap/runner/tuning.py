"""Choosing the number of partitions of sparse parameters on servers by a few short runs on all ranks.

``soap.search.partition_tuning`` decides which numbers to try and which one to choose. All runs take the same few batches in the same order,
and each begins with the model's own values. So the runs use up no data and change no weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Unpack

import torch

from soap import api
from soap.cluster.kinds import run_kind
from soap.cluster.topology import Topology
from soap.errors import RuntimeFailure, StrategyError
from soap.measure.iteration import measure_steps
from soap.model.graph import OperatorGraph
from soap.plan.running.order import ExecutionOrder
from soap.runtime.comm.world import close_world, open_world
from soap.runtime.trainer import Trainer
from soap.runtime.training_options import DEFAULT_TRAINING, TrainingKeywords, TrainingOptions
from soap.search.partition_tuning import BATCHES, ITERATIONS, Sample, Tuning, choose, next_partitions, settled_ns
from soap.strategy.config import Strategy
from soap.strategy.sync import server_count
from soap.strategy.sync_contracts import MAX_PARTITIONS
from soap.tracing.execute import TracedModel

Batches = Callable[[int], Sequence[torch.Tensor]]


@dataclass(frozen=True)
class Range:
    """What is tuned: the number of partitions of these parameters together, from the number of ``servers`` up to ``most``."""

    parameters: tuple[str, ...]
    servers: int
    most: int


@dataclass(frozen=True)
class Tuned:
    """The strategy with the chosen numbers of partitions, and the runs that led to them: ``tunings`` by the parameters that have the same
    number, in the order in which they were tuned."""

    strategy: Strategy
    parameters: tuple[str, ...]
    tunings: Mapping[tuple[str, ...], Tuning]

    @property
    def tuning(self) -> Tuning:
        """Of the first of them; all there is without groups."""
        return next(iter(self.tunings.values()))


@dataclass(frozen=True)
class Observer:
    """Callbacks during the runs, on every rank. ``begun``: before a run, with its number of partitions. ``stepped``: after each iteration.
    ``ended``: after a run, with its result."""

    begun: Callable[[int], None] = lambda partitions: None
    stepped: Callable[[], None] = lambda: None
    ended: Callable[[Sample], None] = lambda sample: None


def tune(
    model: TracedModel,
    cluster: api.Cluster,
    strategy: Strategy,
    batches: Iterable[Sequence[torch.Tensor]],
    order: ExecutionOrder | Sequence[int] | None = None,
    options: TrainingOptions = DEFAULT_TRAINING,
    *,
    iterations: int = ITERATIONS,
    together: Sequence[Sequence[str]] = (),
    **named: Unpack[TrainingKeywords],
) -> Tuned:
    """Choose the number of partitions of the strategy's sparse parameters on servers by at most five short runs.

    ``together``: groups of parameters that get a number of their own (``soap.partitioner``), each by at most five runs, one group after
    the other; first come those in no group, together.

    Called on all ranks at once, under torchrun, with equal arguments. ``batches``: whole batches, as for ``Trainer.step``; at most
    ``BATCHES`` are taken. ``order``, ``options`` and its fields by name: as for ``Trainer``, but the model keeps its values (no
    ``take_over``). ``iterations``: per run. StrategyError if no sparse parameter is on servers.
    """
    options = options.with_changes(**named).with_changes(take_over=False)
    topology = cluster if isinstance(cluster, Topology) else api.load_cluster(cluster)
    wanted = tuned_range(strategy, model.graph, topology)
    kept = [list(batch) for batch in islice(batches, BATCHES)]
    if not kept:
        raise RuntimeFailure("no batches to tune with; expected at least one")

    def trainer_for(chosen: Strategy) -> Trainer:
        return Trainer(model, (chosen, topology), order, options)

    kind = options.device_kind or run_kind(topology)
    world = open_world(topology.device_count, kind, options.backend, options.timeout_s)  # once for all trainers
    try:
        found: dict[tuple[str, ...], Tuning] = {}
        for own in divided(wanted, together):
            found[own.parameters] = sample_runs(strategy, own, trainer_for, lambda step: kept[step % len(kept)], iterations)
            strategy = with_partitions(strategy, own.parameters, found[own.parameters].partitions)
    finally:
        close_world(world)
    return Tuned(strategy, wanted.parameters, found)


def divided(wanted: Range, groups: Sequence[Sequence[str]]) -> list[Range]:
    """What is tuned, by groups: those parameters that are in none, and each group's."""
    own = [tuple(name for name in wanted.parameters if name in group) for group in groups]
    rest = tuple(name for name in wanted.parameters if not any(name in group for group in own))
    return [replace(wanted, parameters=names) for names in (rest, *own) if names]


def served_sparse(strategy: Strategy, graph: OperatorGraph) -> tuple[str, ...]:
    """The sparse parameters that the strategy keeps on servers."""
    return tuple(name for name in graph.sparse if strategy.sync(name).contract.has_servers)


def tuned_range(strategy: Strategy, graph: OperatorGraph, topology: Topology) -> Range:
    """The sparse parameters that the strategy keeps on servers, and how many partitions they may have. StrategyError if there are none."""
    names = served_sparse(strategy, graph)
    if not names:
        some = "the model has no sparse parameter" if not graph.sparse else f"sparse are {', '.join(list(graph.sparse)[:3])}"
        raise StrategyError(
            f"the strategy has no sparse parameter on servers, so there are no partitions to tune ({some}); "
            "expected one that has: search with soap-search --start hybrid, or --sync parameter_server:4"
        )
    return Range(names, server_count(topology), min(MAX_PARTITIONS, max(graph.tensors[name].shape[0] for name in names)))


def with_partitions(strategy: Strategy, parameters: Sequence[str], partitions: int) -> Strategy:
    """The strategy with these parameters, which must be on servers, in so many partitions."""
    changed = {name: replace(strategy.sync(name), partitions=partitions) for name in parameters}
    return strategy.with_changes(parameters=changed)


def first_batches(batches: Batches, count: int) -> Batches:
    """Batches that repeat those of the first ``count`` steps; these are read now, once."""
    kept = [list(batches(step)) for step in range(count)]
    return lambda step: kept[step % count]


def sample_runs(
    strategy: Strategy,
    wanted: Range,
    trainer_for: Callable[[Strategy], Trainer],
    batches: Batches,
    iterations: int,
    known: Sequence[Sample] = (),
    observer: Observer | None = None,
) -> Tuning:
    """Run, fit, choose; on all ranks at once. All ranks decide alike because they all know the slowest rank's times. ``known``: samples to
    go on from."""
    samples, observer = list(known), observer or Observer()
    while (partitions := next_partitions(samples, wanted.servers, wanted.most)) is not None:
        observer.begun(partitions)
        chosen = with_partitions(strategy, wanted.parameters, partitions)
        samples.append(Sample(partitions, _time_ns(partial(trainer_for, chosen), batches, iterations, observer)))
        observer.ended(samples[-1])
    return choose(samples)


def _time_ns(make: Callable[[], Trainer], batches: Batches, iterations: int, observer: Observer) -> float:
    """Measured time of an iteration, ns. The trainer's memory is freed before the next trainer is made."""
    trainer = make()
    found = measure_steps(trainer, batches, iterations, 0, on_step=lambda step, loss: observer.stepped())
    trainer.close()
    return settled_ns(found.times_ns)
