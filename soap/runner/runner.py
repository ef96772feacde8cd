"""A runner trains a module of a single-device script on all ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from math import prod
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.export import ExportedProgram

from soap import api
from soap.cluster.kinds import run_kind
from soap.cluster.topology import Topology
from soap.errors import RuntimeFailure
from soap.model.graph import OperatorGraph
from soap.model.sparse_shares import with_alphas
from soap.plan.compression.training import PlannedTraining
from soap.plan.running.order import ExecutionOrder
from soap.runner.config import RunnerConfig
from soap.runner.sharding import groups, rank_and_count
from soap.runner.tuning import served_sparse, tune
from soap.runtime.checkpoint.manifest import complete
from soap.runtime.comm.handing_out import from_first
from soap.runtime.comm.packing import plain
from soap.runtime.comm.redistribute import Communicator
from soap.runtime.comm.world import close_world, open_world
from soap.runtime.eager import eager_judge
from soap.runtime.inputs import Given, PartBatch
from soap.runtime.trainer import Trainer
from soap.runtime.updates.optimizers import OptimizerFactory
from soap.runtime.updates.trial import optimizer_states, try_optimizer
from soap.search.options import SearchOptions
from soap.simulator.reference import execution_order
from soap.simulator.simulate import Simulator
from soap.strategy.config import Strategy, SyncConfig
from soap.strategy.sync import in_one_partition
from soap.tracing.example import Example
from soap.tracing.execute import TracedModel
from soap.tracing.export import exported_program
from soap.tracing.load import load_program

if TYPE_CHECKING:
    from soap.runner.stale import StaleTraining


def joined(parts: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Join the ranks' tensors along dimension 0, on all ranks; called on all ranks at once. ``device``: where the backend communicates.

    Samples alternate between ranks, as ``soap.shard`` deals them out: the first one of each rank in the order of the ranks, then the second
    one of each, … Ranks may have different numbers of samples, or none. The most common length counts as the number of samples; a tensor of
    another length counts as shared by all samples, and rank 0's is taken. RuntimeFailure if the ranks' samples differ in dtype or shape.
    """
    size, sizes = _agreed(parts)
    order = torch.tensor([offset for _, _, offset in sorted(_places(sizes))], dtype=torch.int64)
    return [_gathered(tensor, sizes, order, device) if _counts(tensor, size) else _first(tensor, device) for tensor in parts]


def dealt(parts: Sequence[torch.Tensor], names: Sequence[str], device: torch.device, trainer: Trainer) -> PartBatch:
    """Send each sample to the ranks that read it; called on all ranks at once. The batch is that of ``joined``; what all samples share is
    rank 0's. ``names``: the model's inputs that the tensors are, in any order. RuntimeFailure as for ``joined``, or if the model cannot be
    trained on so many samples."""
    size, sizes = _agreed(parts)
    comm, total = trainer.comm, sum(sizes)
    read = trainer.sizes.of_samples(total).samples_by_rank
    order = [(rank, number) for number, rank, _ in sorted(_places(sizes))]
    found = {}
    for name, tensor in zip(names, parts, strict=True):
        if not _counts(tensor, size):
            found[name] = _first(tensor, device)
            continue
        wanted = [own[name].indices if own[name].dim == 0 else list(range(total)) for own in read]
        found[name] = _sent(tensor, order, wanted, comm)
    return PartBatch([found[name] for name in trainer.model.input_names], total)


def _sent(tensor: torch.Tensor, order: Sequence[tuple[int, int]], wanted: Sequence[Sequence[int]], comm: Communicator) -> torch.Tensor:
    """The samples that this rank wants, in the order of their numbers. ``order``: by number, (rank that has it, its place there).
    ``wanted``: by rank, the numbers that it wants."""
    leaving = [[order[number][1] for number in own if order[number][0] == comm.rank] for own in wanted]
    coming = [[number for number in wanted[comm.rank] if order[number][0] == rank] for rank in range(comm.world_size)]
    plainly = tensor.detach().resolve_conj().resolve_neg().to(comm.device).contiguous()
    each = prod(tensor.shape[1:])
    parcels = [[plainly[own].reshape(-1)] if own else [] for own in leaving]
    buffer = plainly.new_empty(each * len(wanted[comm.rank]))
    pending = comm.all_to_all(parcels, buffer, [each * len(own) for own in coming], tuple(range(comm.world_size)))
    places = {number: place for place, number in enumerate(number for own in coming for number in own)}
    rows = pending.wait().reshape(-1, *tensor.shape[1:]) if each else plainly.new_empty(len(places), *tensor.shape[1:])
    return rows[[places[number] for number in wanted[comm.rank]]]


def _agreed(parts: Sequence[torch.Tensor]) -> tuple[int, list[int]]:
    """This rank's number of samples, and every rank's. RuntimeFailure if the ranks' samples differ in dtype or shape."""
    size = _samples(parts)
    layout = [(tensor.dtype, tuple(tensor.shape[1:]) if _counts(tensor, size) else tuple(tensor.shape)) for tensor in parts]
    found: list[tuple[int, object]] = [(0, None)] * dist.get_world_size()
    dist.all_gather_object(found, (size, layout))
    for rank, (_, other) in enumerate(found):
        if other != found[0][1]:
            raise RuntimeFailure(f"rank {rank} has a batch of {_written(other)}, rank 0 of {_written(found[0][1])}; expected equal samples")
    return size, [number for number, _ in found]


def _samples(parts: Sequence[torch.Tensor]) -> int:
    """The number of samples: the most common length of the tensors."""
    lengths = [tensor.shape[0] for tensor in parts if tensor.dim()]
    if not lengths:
        raise RuntimeFailure(f"a batch of {len(parts)} tensors, none with a dimension; expected tensors with the samples in dimension 0")
    return Counter(lengths).most_common(1)[0][0]


def _counts(tensor: torch.Tensor, size: int) -> bool:
    return tensor.dim() > 0 and tensor.shape[0] == size


def _places(sizes: Sequence[int]) -> list[tuple[int, int, int]]:
    """(number on its rank, rank, place if the parts are concatenated) of each sample."""
    found, start = [], 0
    for rank, size in enumerate(sizes):
        found += [(i, rank, start + i) for i in range(size)]
        start += size
    return found


def _gathered(tensor: torch.Tensor, sizes: Sequence[int], order: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Gather a tensor's parts in the given order of samples. Shorter parts are padded to the longest for the exchange."""
    padded = torch.zeros((max(sizes), *tensor.shape[1:]), dtype=tensor.dtype, device=device)
    padded[: len(tensor)] = tensor.to(device)
    received = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather([plain(part) for part in received], plain(padded))
    together = torch.cat([part[:size] for part, size in zip(received, sizes, strict=True)]).to(tensor.device)
    return together[order.to(tensor.device)]


def _first(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    shared = tensor.to(device).contiguous().clone()
    dist.broadcast(plain(shared), 0)
    return shared.to(tensor.device)


def _written(layout: object) -> str:
    items = layout if isinstance(layout, list) else []
    return ", ".join(f"{str(dtype).removeprefix('torch.')}{list(shape)}" for dtype, shape in items) or "nothing"


def planned(
    graph: OperatorGraph, topology: Topology, config: RunnerConfig, groups: Sequence[Sequence[str]]
) -> tuple[Strategy, ExecutionOrder]:
    """The strategy, and its tiles in the order in which their forward and backward passes begin."""
    graph = with_alphas(graph, list((config.alpha or {}).items()))
    trainable = {tensor.name: tensor.shape for tensor in graph.parameters if tensor.requires_grad}
    tried = try_optimizer(config.recipe.layout(trainable), trainable)
    states = optimizer_states(tried, sparse=bool(graph.sparse))
    known, training = tried.measured, PlannedTraining(clips=config.clip_norm is not None)
    simulator = api.simulator_for(
        graph, topology, optimizer_states=states, costs=config.costs, measured_updates=known, training=training
    )
    if config.run_option == "ps":
        strategy = api.classical("parameter_server", graph, topology)
    else:
        syncs = [SyncConfig()] if config.run_option == "allreduce" else []
        options = SearchOptions(
            budget=config.budget,
            seed=config.seed,
            syncs=syncs,
            optimizer_states=states,
            measured_updates=known,
            uncut=tried.whole,
            together=tried.coupled,
            costs=config.costs,
            training=training,
        )
        strategy = api.find(graph, topology, options).strategy
    strategy = in_one_partition(alike(simulator, adapted(strategy, config), groups), tried.whole)
    simulation = simulator.run(strategy)
    return strategy, execution_order(simulation.tasks, simulation.schedule)


def adapted(strategy: Strategy, config: RunnerConfig) -> Strategy:
    """The strategy with partitions and local aggregation of parameters on servers as the configuration sets them."""
    for name, sync in _served(strategy).items():
        partitions = sync.partitions if config.search_partitions else config.partitions
        within = sync.within if config.local_aggregation else "none"
        strategy = strategy.with_parameter(name, replace(sync, partitions=partitions, within=within))
    return strategy


def alike(simulator: Simulator, strategy: Strategy, groups: Sequence[Sequence[str]]) -> Strategy:
    """The strategy with the same number of partitions for all parameters of a group on servers. Of the numbers that they have, the one that
    is predicted to be fastest is taken."""
    for group in groups:
        served = {name: sync for name, sync in _served(strategy).items() if name in group}
        counts = sorted({sync.partitions for sync in served.values()})
        if len(counts) < 2:
            continue
        candidates = []
        for partitions in counts:
            changed = strategy
            for name, sync in served.items():
                changed = changed.with_parameter(name, replace(sync, partitions=partitions))
            candidates.append((simulator.cost(changed), changed))
        strategy = min(candidates, key=lambda found: (found[0][1] > 0, found[0][0]))[1]
    return strategy


def _served(strategy: Strategy) -> dict[str, SyncConfig]:
    return {name: sync for name, sync in strategy.parameters.items() if sync.contract.has_servers}


def with_reductions(config: RunnerConfig, sparse: Collection[str], ranks: int) -> RunnerConfig:
    """The configuration with optimizers that multiply gradients as it says; itself if all are means."""
    if config.reduce_dense == config.reduce_sparse == "mean":
        return config
    given = config.optimizer if isinstance(config.optimizer, Mapping) else {"*": config.optimizer}
    wanted: dict[str, OptimizerFactory] = {}
    for name in sparse:
        make = next((make for pattern, make in given.items() if fnmatchcase(name, pattern)), None)
        if make is not None:
            wanted[name] = _times(make, ranks if config.reduce_sparse == "sum" else 1)
    for pattern, make in given.items():
        wanted.setdefault(pattern, _times(make, ranks if config.reduce_dense == "sum" else 1))
    return replace(config, optimizer=wanted)


def _times(make: OptimizerFactory, factor: int) -> OptimizerFactory:
    """Makes the same optimizer, which takes gradients ``factor`` times as large."""

    def made(tensors: Any) -> torch.optim.Optimizer:
        optimizer = make(tensors)
        if factor != 1:
            optimizer.register_step_pre_hook(_multiply(factor))
        return optimizer

    return made


def _multiply(factor: int) -> Any:
    def before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            for tensor in group["params"]:
                if tensor.grad is not None:
                    tensor.grad = tensor.grad * factor  # not in place: sums are kept in buffers

    return before


Batch = torch.Tensor | Sequence[torch.Tensor] | Mapping[str, torch.Tensor]
"""Arguments of the module's ``forward``: one tensor, several in order, or tensors by name."""


class Runner:
    """Trains a module on all ranks; made and called on all ranks alike. See ``get_runner``.

    ``strategy``, ``trainer``: None before the first batch. A context manager, like ``soap.Trainer``.
    """

    def __init__(self, model: nn.Module, topology: Topology, config: RunnerConfig) -> None:
        self.model, self.topology, self.config = model, topology, config
        self.strategy: Strategy | None = None
        self.trainer: Trainer | None = None
        self._names: Sequence[str] = ()
        kind = run_kind(topology)
        self.world = open_world(topology.device_count, kind, config.backend, config.timeout_s)
        self._wire = self.world.device if self.world.backend == "nccl" else torch.device("cpu")
        self._saved_at = 0
        self._stale: StaleTraining | None = None

    def run(self, batch: Batch) -> float:
        """One training step. Returns the loss of the whole batch, the same on all ranks; if ranks may be apart
        (``RunnerConfig.consistency``) that of this rank's part. The first call exports the model and plans.

        ``batch``: this rank's part of the batch, which may have no samples; the whole batch if the configuration has ``sharded=False``.
        SoapError in one line, the same on all ranks, if the model cannot be exported, planned or trained.
        """
        tensors = [batch] if isinstance(batch, torch.Tensor) else list(batch.values() if isinstance(batch, Mapping) else batch)
        if self.config.stale:
            return self._run_stale(tensors, dict(batch) if isinstance(batch, Mapping) else None)
        keys = list(batch) if isinstance(batch, Mapping) else None
        given: Sequence[Given] = tensors
        if self.config.sharded and self.trainer is not None:
            given = [dealt(tensors, keys or self._names, self._wire, self.trainer)]
        else:
            tensors = joined(tensors, self._wire) if self.config.sharded else tensors
            named = None if keys is None else dict(zip(keys, tensors, strict=True))
            if self.trainer is None:
                self.trainer = self._start(tensors, named)
            given = tensors if named is None else [named[name] for name in self._names]
        trainer = self.trainer
        loss = trainer.step(*given)
        if self.config.save_every is not None and trainer.steps % self.config.save_every == 0:
            self._save(trainer)
        return loss

    def over(self, batches: Iterable[Batch]) -> Iterator[float]:
        """Train on each batch in turn; yields the losses."""
        return (self.run(batch) for batch in batches)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """All trained values by the module's names, on rank 0 (empty elsewhere); called on all ranks at once. RuntimeFailure before the
        first batch."""
        if self._stale is not None:
            return self._stale.state_dict()
        if self.trainer is None:
            raise RuntimeFailure("the runner has not seen a batch yet; expected run(batch) before state_dict()")
        return self.trainer.state_dict()

    def close(self) -> None:
        """Write the last checkpoint if there is a folder for it. Leave the process group if the runner has opened it."""
        if self._stale is not None:
            self._stale.close()
        if self.trainer is not None:
            if self.config.checkpoint is not None and self.trainer.steps > self._saved_at:
                self._save(self.trainer)
            self.trainer.close()
        close_world(self.world)

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self.close()
        else:  # the other ranks may be anywhere: nothing can be saved together
            if self._stale is not None:
                self._stale.close(together=False)
            close_world(self.world)

    def _start(self, tensors: Sequence[torch.Tensor], named: Mapping[str, torch.Tensor] | None) -> Trainer:
        model, exported, example = self._traced(tensors, named)
        config = with_reductions(self.config, model.graph.sparse, self.world.size)
        self.strategy, order = self._agreed(model, exported, example, config)
        if config.tuning_iterations and served_sparse(self.strategy, model.graph):
            self.strategy = tune(
                model,
                self.topology,
                self.strategy,
                [tensors],
                order,
                config.training,
                iterations=config.tuning_iterations,
                together=groups(self.model),
            ).strategy
        trainer = Trainer(model, (self.strategy, self.topology), order, config.training)
        if config.checkpoint is not None and Path(config.checkpoint).is_dir() and complete(Path(config.checkpoint)):
            trainer.load(config.checkpoint)
        self._saved_at = trainer.steps
        return trainer

    def _traced(
        self, tensors: Sequence[torch.Tensor], named: Mapping[str, torch.Tensor] | None
    ) -> tuple[TracedModel, ExportedProgram, Example]:
        arguments = (tuple(tensors), {}) if named is None else ((), dict(named))
        exported = exported_program(self.model, *arguments, loss=self.config.loss, dynamic_batch=self.config.dynamic_batch)
        model = load_program(exported, type(self.model).__name__, run_kind(self.topology))
        self._names = model.input_names
        return model, exported, Example(self.model, *arguments, self.config.loss)

    def _run_stale(self, tensors: Sequence[torch.Tensor], named: Mapping[str, torch.Tensor] | None) -> float:
        if self._stale is None:
            from soap.runner.stale import StaleTraining

            traced = self._traced(tensors, named)
            from_first(lambda: self._judge(*traced))
            self._stale = StaleTraining(traced[0], self.world, self.config)
        return self._stale.step(tensors if named is None else [named[name] for name in self._names])

    def _agreed(
        self, model: TracedModel, exported: ExportedProgram, example: Example, config: RunnerConfig
    ) -> tuple[Strategy, ExecutionOrder]:
        """The strategy and order that rank 0 plans for all ranks, because measured costs differ between hosts. Rank 0 also compares the
        program with eager PyTorch. An error there is raised on all ranks."""

        def plan() -> tuple[Strategy, ExecutionOrder]:
            self._judge(model, exported, example)
            return planned(model.graph, self.topology, config, groups(self.model))

        return from_first(plan)

    def _judge(self, model: TracedModel, exported: ExportedProgram, example: Example) -> None:
        judge = eager_judge(example) if self.config.verify else None
        if judge is not None:
            judge(exported, model)

    def _save(self, trainer: Trainer) -> None:
        assert self.config.checkpoint is not None
        trainer.save(self.config.checkpoint, keep=self.config.keep)
        self._saved_at = trainer.steps


def get_runner(model: nn.Module, cluster: api.Cluster | None = None, config: RunnerConfig | None = None) -> Runner:
    """A runner for a module that returns its loss. It runs on the ranks that torchrun has started, one per device of the cluster.

    ``cluster``: as for ``soap.find``; None: this machine with one device per rank. Training begins with the module's own values; trained
    values are in ``state_dict()``. Before a step each rank's samples are sent to the ranks that read them; those of the first step, which
    the model is exported with, to all.
    """
    topology = cluster if isinstance(cluster, Topology) else api.load_cluster(cluster or f"local:{rank_and_count()[1]}")
    return Runner(model, topology, config or RunnerConfig())
