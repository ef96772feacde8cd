"""``Trainer``: trains a model by a strategy, step by step, from a script that runs on every rank.

To evaluate, a batch runs as the first micro-batch of a step that never ends: no gradient is exchanged, nothing is updated, and the next
step begins with gradients of its own. So it works for every plan, and takes the time of a step's computations, backward passes included.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING, Unpack

import torch

from soap.cluster.topology import Topology
from soap.errors import RuntimeFailure, SoapWarning
from soap.model.dtypes import has_complex, is_complex, name_of, replaced
from soap.model.regions import volume
from soap.plan.plan import Plan
from soap.plan.running.order import ExecutionOrder
from soap.plan.syncs.compressed import compressed_names
from soap.runtime.checkpoint.storage import home_of, whole_buffers, whole_parameters
from soap.runtime.comm.position import HERE
from soap.runtime.comm.redistribute import Communicator, Traffic
from soap.runtime.comm.world import close_world, open_world
from soap.runtime.compression.dgc import DecayMomentum, require_correctable, wrong_momentum
from soap.runtime.inputs import Alike, Batch, BySamples, Given
from soap.runtime.planned import Asked, Planned
from soap.runtime.program.actions import MicroBatch
from soap.runtime.program.prepared import missing_compiler
from soap.runtime.sizes import BatchSizes
from soap.runtime.step.step_end import StepEnd
from soap.runtime.sync.look_ups import note_rows
from soap.runtime.sync.shards import ShardStore, gather_regions, model_in_type, run_dtype
from soap.runtime.system.memory_room import MemoryRoom, room_within, stored_bytes
from soap.runtime.trace import Event, Recorder, join_events
from soap.runtime.training_options import DEFAULT_TRAINING, StepMetrics, TrainingKeywords, TrainingOptions
from soap.runtime.updates.loss_scaling import LossScaler, require_clippable, require_scalable
from soap.runtime.updates.optimizers import Schedule
from soap.runtime.updates.parts import (
    Offloading,
    joined_names,
    other_options,
    parts_of,
    require_offloadable,
    require_possible,
    trainable_shapes,
)
from soap.runtime.updates.trial import Tried, try_optimizer
from soap.strategy.config import Strategy
from soap.tracing.calls import TileContext
from soap.tracing.execute import TracedModel

if TYPE_CHECKING:
    from soap.runtime.checkpoint.checkpoint import Training


AGREED = ("dtype", "accumulate", "clip_norm", "scaler", "compressing", "lazy_sparse", "seed")
"""Fields of ``Trainer`` that change what is computed or exchanged."""


def require_agreement(comm: Communicator, asked: str, own: Mapping[str, str]) -> None:
    """RuntimeFailure on all ranks unless these are alike on all. ``asked``: ``Asked.digest``. ``own``: this rank's options, in words."""
    digests = comm.gather((asked, dict(own)))
    for rank, (digest, options) in enumerate(digests):
        if digest != digests[0][0]:
            raise RuntimeFailure(f"rank {rank} has another model, strategy or order than rank 0; expected the same on all ranks")
        for name, first in digests[0][1].items():
            if options[name] != first:
                told = f"rank {rank} trains with {name} {options[name]}, rank 0 with {first}"
                raise RuntimeFailure(f"{told}; expected the same on all ranks")


class Trainer:
    """Trains a traced model by a plan. Made on all ranks at once, with equal arguments.

    ``plan``: a plan, or (strategy, topology). ``order``: all tiles in the order in which they start, from the simulator; None for the
    graph's order. Without a backward order, the backward pass runs in reverse. ``options``: see ``TrainingOptions``; its fields may also be
    given by name, and these win. Copies of a parameter start equal to the first device's copy, buffers equal to rank 0's.
    Rank 0 makes the plan; ``Trainer.plan`` and ``program`` are the rank's own part of it (``plan.own_part``).

    RuntimeFailure in one line if the model, plan and options do not fit together. Use it as a context manager, or call ``close``, to leave
    the process group that it has opened.
    """

    def __init__(
        self,
        model: TracedModel,
        plan: Plan | tuple[Strategy, Topology],
        order: ExecutionOrder | Sequence[int] | None = None,
        options: TrainingOptions = DEFAULT_TRAINING,
        **named: Unpack[TrainingKeywords],
    ) -> None:
        options = options.with_changes(**named)
        _refuse_impossible(model, options)
        model = model_in_type(model, plan, options.dtype)
        asked = Asked.of(model, plan, order, options.device_kind)
        self.model, self.seed, self.dtype = model, options.seed, options.dtype
        self.accumulate, self.clip_norm, self.compressing = options.accumulate, options.clip_norm, options.compressing
        self.compiled, self.lazy_sparse = options.compiled, options.lazy_sparse
        self.recipe, self.on_step = options.recipe, options.on_step
        self.scaler = LossScaler.of(model, options.loss_scaling)
        self.gradient_norm: float | None = None
        self.steps = self.input_bytes = 0  # bytes of all batches that this rank was given
        self.world = open_world(asked.topology.device_count, asked.kind, options.backend, options.timeout_s)
        self.rank, self.device = self.world.rank, self.world.device
        self.comm = Communicator(self.device, (), self.world.timeout)
        require_agreement(self.comm, asked.digest, {name: str(getattr(self, name)) for name in AGREED})
        shapes = trainable_shapes(model.graph)
        self.layout = self.recipe.layout(shapes)
        tried = try_optimizer(self.layout, shapes, self.device)
        self.planned = Planned(self.comm, asked)
        handed = self.planned.first(partial(self._require_possible, tried))
        self.comm.open_numbered(handed.groups, handed.group_count)
        self.program, self.plan = handed.program, handed.program.plan
        if self.clip_norm is not None and compressed_names(self.plan):
            self.compressing = replace(self.compressing, clip_norm=self.clip_norm)
        self.room: MemoryRoom | None = None
        if self.device.type == "cpu" and self.rank < asked.topology.device_count:
            there = stored_bytes(self.model.parameters.values()) if options.take_over else 0
            self.room = room_within(asked.topology.memory_limits[self.rank], there)
        self._place_values(joined_names(self.plan, tried), options.take_over)
        self.alike = Alike(self.comm)
        self.sizes = BatchSizes(self, handed, options.take_over)
        self._prepare_updates(tuple(tried.scopes))
        self._refresh_copies()

    def _require_possible(self, tried: Tried, plan: Plan) -> None:
        """RuntimeFailure if the options do not go with the whole plan."""
        if self.clip_norm is not None and compressed_names(plan):
            require_clippable(plan, self.clip_norm)
        require_scalable(plan, self.scaler)
        require_possible(plan, tried, self.lazy_sparse)
        require_offloadable(plan, tried, lazy_sparse=self.lazy_sparse)

    def _place_values(self, joined: Sequence[str], take_over: bool) -> None:
        """Load this rank's parts of parameters and its copy of the buffers; make them equal on all ranks that have them."""
        self.shards = ShardStore(self.plan, self.rank, joined)
        self.shards.load(self.model.parameters, self.device, self.dtype, share=take_over)
        if take_over:
            self._forget_values()
        self.shards.agree(self.comm)
        self.buffers = {name: self.own_copy(tensor) for name, tensor in self.model.buffers.items()}
        for tensor in self.buffers.values():
            self.comm.broadcast(tensor, 0).wait()
        self.first_buffers = {name: tensor.clone() for name, tensor in self.buffers.items() if name not in self.model.state.values()}

    def _prepare_updates(self, trained: Sequence[str]) -> None:
        """Make the optimizer of this rank's parts, the schedule and the end of a step. RuntimeFailure, the same on all ranks, if the
        optimizer's factory treats parts of a parameter differently, or if corrected momentum is not all parameters' momentum."""
        plan, self._offloading = self.plan, Offloading(self.plan, parts_of(self.shards), self.device)
        self.parts = self._offloading.parts
        compressed = compressed_names(plan)
        self.optimizer = self.layout.optimizer({name: [p.tensor for p in self.parts.values() if p.parameter == name] for name in trained})
        line = other_options(self.layout, trainable_shapes(plan.graph), self.parts, self.optimizer)
        if compressed and self.compressing.momentum is not None:
            require_correctable(plan)
            line = line or wrong_momentum(plan, self.compressing.momentum, self.optimizer, self.parts.values())
        found = self.comm.gather(line)
        if any(found):
            raise RuntimeFailure(next(filter(None, found)))
        self.schedule = Schedule.of(self.recipe.schedule, self.optimizer)
        rule, updated = self.compressing.momentum, {n: p.tensor for n, p in self.parts.items() if p.parameter in compressed}
        decay = None if rule is None else DecayMomentum(rule, self.optimizer, updated)
        clip_norm = None if compressed else self.clip_norm  # else each rank has clipped already
        lazy = self.lazy_sparse
        self._ending = StepEnd(plan, self.comm, self.sizes.gradients, self._offloading, self.optimizer, clip_norm, lazy, decay, self.scaler)
        by_rows = {sync.parameter for sync in plan.syncs if sync.contract.by_rows}
        kept = {plan.shards[number].parameter for number in self.shards.tensors}
        self._to_look_up = [name for name in plan.graph.sparse if name in kept and name not in by_rows] if self.lazy_sparse else []

    def samples(self, size: int | None = None) -> BySamples:
        """Input -> the samples that this rank reads of a batch of ``size``, None: as many as the model was traced with; see ``PartBatch``.
        Called on all ranks at once when a size first occurs. With ``lazy_sparse`` every rank reads all samples of inputs that name rows of
        tables, unless these come by rows."""
        return self.sizes.of_samples(size).samples

    def step(self, *inputs: Given) -> float:
        """One training iteration on a global batch, which every rank is given in full, or as a ``PartBatch``: the samples that it reads.
        Returns the loss, the same on all ranks.

        With ``accumulate``, ``inputs`` are the tensors of several micro-batches, one after the other. The loss is the mean of theirs: a
        mean of means if they count different numbers of tokens. A batch of another size than the model's trains by the same strategy, if
        the model can be traced at that size. RuntimeFailure in one line for a batch that does not fit.
        """
        return self._iterate(inputs, None)

    def trace(self, *inputs: Given) -> list[Event]:
        """One training iteration in which every task of the last micro-batch is timed on its own. Returns all ranks' events, on all ranks.

        Slower than ``step``: every tile is a segment of its own. Rank 0 orders them, each time.
        """
        recorder = Recorder(self.comm)
        self._iterate(inputs, recorder)
        return join_events(self.comm.gather(recorder.close()))

    def _iterate(self, inputs: Sequence[Given], recorder: Recorder | None) -> float:
        """Run all micro-batches of a step and the update. A recorder traces the last micro-batch. Returns the loss."""
        HERE.enter(self.steps + 1)
        begin = perf_counter()
        parts = self.given_batches(self.sizes, inputs, "training")
        losses = []
        looked_up: dict[str, torch.Tensor] = {}
        for number, part in enumerate(parts):
            sized = self.sizes.of(part.shapes)
            runner, last = sized.runner_of(part), number == len(parts) - 1
            if recorder is not None and last:
                runner = sized.traced(recorder, part)
                recorder.align()
            context = TileContext(self.seed, self.steps * self.accumulate + number, self.buffers, unread=sized.unread)
            own = sized.inputs(part)
            note_rows(looked_up, self._to_look_up, sized.model, own.named, context)
            losses.append(runner.run(own, context, MicroBatch(number, len(parts), self.scaler.scale if self.scaler else 1.0)))
            sized.model.end_step(context)
        if self.room is not None:
            self.room.begin("end of a step")
        self.gradient_norm = self._ending.run(looked_up, recorder)
        self.steps += 1
        mean = sum(loss() for loss in losses) / len(losses)
        self.alike.require()
        HERE.enter(0)
        on_step = self.on_step if self.rank == 0 else None
        rates = self._rates() if on_step is not None else ()  # of this step: the schedule changes them
        if self.scaler is None or self.scaler.finite:
            self.schedule.step(mean)
        if on_step is not None:
            on_step(StepMetrics(self.steps, mean, perf_counter() - begin, rates, self.gradient_norm))
        return mean

    def _rates(self) -> tuple[float, ...]:
        return () if self.optimizer is None else tuple(float(group["lr"]) for group in self.optimizer.param_groups)

    def given_batches(self, sizes: BatchSizes, inputs: Sequence[Given], purpose: str) -> list[Batch]:
        """The micro-batches of what a step is given, checked and compared with other ranks'; ``require`` waits for later hashes."""
        parts = sizes.batches(inputs)
        self.alike.begin(parts, sizes, purpose)
        self.input_bytes += sum(tensor.nbytes for part in parts for tensor in part.tensors)
        return parts

    def evaluate(self, *inputs: Given) -> float:
        """The loss of a batch, as for ``step``, without training on it; the last step's ``gradients`` are gone then. RuntimeFailure in one
        line if the program has dropout or batch norm's statistics: it cannot leave the mode that it was exported in (``evaluation``)."""
        require_evaluable(self.model, "soap.Trainer.evaluation of one that was exported in evaluation mode")
        return mean_loss(self, self.sizes, self.given_batches(self.sizes, inputs, "evaluation"))

    def evaluation(self, model: TracedModel) -> Evaluation:
        """Evaluation by another program of the same parameters, such as the module's in evaluation mode; called on all ranks at once.
        RuntimeFailure in one line if its parameters are not the trainer's, or cannot be read where the plan keeps them."""
        return Evaluation(self, model)

    def rows_looked_up(self, step: int, *inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        """Sparse parameter -> rows that the step with this number looks up, ascending. No other rank is needed."""
        found: dict[str, torch.Tensor] = {}
        for number, part in enumerate(self.sizes.batches(inputs)):
            sized = self.sizes.of(part.shapes)
            context = TileContext(self.seed, step * self.accumulate + number, self.buffers)
            note_rows(found, self.plan.graph.sparse, sized.model, sized.inputs(part).named, context)
        return found

    def _forget_values(self) -> None:
        """Free the model's values of parameters of which this rank has parts elsewhere, or none. What no shard covers stays."""
        parameters, kept = self.model.parameters, {leaf.untyped_storage().data_ptr() for leaf in self.shards.leaves.values()}
        covered = dict.fromkeys(parameters, 0)
        for shard in self.plan.shards:
            covered[shard.parameter] += volume(shard.box)
        elsewhere = [name for name, full in parameters.items() if full.untyped_storage().data_ptr() not in kept]
        self.model.let_go([name for name in elsewhere if covered[name] == parameters[name].numel()])

    def _refresh_copies(self) -> None:
        """Send loaded values from owners to readers, and to hosts that update them. This does not count as traffic of a step."""
        self._offloading.refresh()
        counted = replace(self.comm.traffic)
        self.sizes.gradients.refresh()
        self.comm.traffic = counted

    def gradients(self) -> dict[str, torch.Tensor]:
        """Full gradients of the last step by canonical name, those that there are, on rank 0 (else empty); called on all ranks at once."""
        wanted = sorted(self.plan.synchronized)
        full: dict[str, torch.Tensor] = {}
        for name in dict.fromkeys(self.plan.shards[shard].parameter for shard in wanted):
            full[name] = torch.zeros(self.plan.graph.tensors[name].shape, dtype=self.dtype_of(name), device=home_of(self, name))
        gather_regions(self.comm, self.plan, self.sizes.gradients.whole(self.plan), wanted, full)
        return full if self.rank == 0 else {}

    def state_dict(self) -> dict[str, torch.Tensor]:
        """All parameters and buffers in full by the names of the user's model, on rank 0 (empty elsewhere); called on all ranks at once.

        It has exactly the entries of the exported model's state dict, so the model itself can load it.
        """
        return {name: tensor for name, tensor in self.whole_state().items() if name not in self.model.transient}

    def whole_state(self) -> dict[str, torch.Tensor]:
        """``state_dict``, plus the buffers that the model's own state dict leaves out."""
        full = {name: tensor for name, tensor in whole_parameters(self) if tensor is not None}
        buffers = whole_buffers(self)
        if self.rank != 0:
            return {}
        full |= {name: self.own_copy(tensor.detach()).to(tensor.device) for name, tensor in self.model.unchanged.items()}
        full |= buffers
        return full | {alias: full[name] for alias, name in self.plan.graph.aliases.items() if name in full}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Load parameters and buffers from full tensors by name, given on every rank. RuntimeFailure if one is missing."""
        missing = [name for name in (*self.model.parameters, *self.buffers) if name not in state and name not in self.model.transient]
        if missing:
            raise RuntimeFailure(f"state lacks {missing[0]!r} (and {len(missing) - 1} more): expected every parameter and buffer by name")
        self.shards.load(state, self.device, self.dtype)
        self._refresh_copies()
        for name in self.buffers:
            if name in state:
                self._set_buffer(name, state[name])
        self._warn_of_unchanged(state)

    def save(self, folder: str | Path, *, keep: int | None = None) -> Path:
        """Write a checkpoint ``step-…`` into a folder, on all ranks at once. Returns its path. See ``runtime.checkpoint.checkpoint``.

        ``keep``: how many steps' checkpoints stay in the folder, this one included; None for all. An earlier checkpoint of the same step is
        replaced. CheckpointError if it cannot be written.
        """
        from soap.runtime.checkpoint.checkpoint import save_checkpoint  # loads much of torch that training does not need

        return save_checkpoint(folder, self._training(), self.steps, self.seed, whole_buffers(self), keep)

    def save_weights(self, folder: str | Path, names: Mapping[str, str] | None = None) -> Path:
        """Write all parameters and buffers as safetensors into a folder, on all ranks at once; rank 0 has one at a time. ``names``: other
        names to write. RuntimeFailure if they cannot be written, or the folder has weights already."""
        from soap.runtime.checkpoint.storage import save_weights

        return save_weights(self, Path(folder), names or {})

    def load(self, path: str | Path) -> None:
        """Go on from a checkpoint, or the latest in a folder; called on all ranks at once. It may come from any plan and number of ranks.

        Parameters, buffers, the optimizer's state and hyperparameters, ``steps`` and ``seed`` become those of the checkpoint.
        CheckpointError if it is damaged or does not fit.
        """
        from soap.runtime.checkpoint.checkpoint import load_checkpoint

        found = load_checkpoint(path, self._training(), self.buffers)
        self._refresh_copies()
        self.steps, self.seed = found.step, found.seed
        if self.scaler is not None and found.loss_scaling is not None:
            self.scaler.restore(found.loss_scaling)
        for name, tensor in found.buffers.items():
            self._set_buffer(name, tensor)
        self._warn_of_unchanged(found.unchanged)

    @property
    def traffic(self) -> Traffic:
        """Payload bytes that this rank has moved so far in steps."""
        return replace(self.comm.traffic)

    def close(self) -> None:
        """Leave the process group if this trainer has opened it."""
        self.comm.close()
        close_world(self.world)

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _training(self) -> Training:
        from soap.runtime.checkpoint.checkpoint import Training

        own = self.shards, self.parts, self.optimizer, self.schedule, self.place, self.sizes.gradients
        return Training(self.model, self.plan, self.comm, *own, self.compressing, self.scaler)

    def _warn_of_unchanged(self, state: Mapping[str, torch.Tensor]) -> None:
        """Warn of loaded values that have no effect: what the program only reads keeps its exported value."""
        for name, tensor in self.model.unchanged.items():
            if name in state and not torch.equal(state[name].detach().to(tensor.device, tensor.dtype), tensor):
                warnings.warn(
                    f"{name!r} keeps the value that was exported: training does not change it, and loading another has no effect; "
                    "export the model with that value",
                    SoapWarning,
                    stacklevel=3,
                )

    def _set_buffer(self, name: str, value: torch.Tensor) -> None:
        self.buffers[name].copy_(value)
        if name in self.first_buffers:
            self.first_buffers[name].copy_(value)

    def own_copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of the tensor on this rank's device, in the dtype that is computed in."""
        return self.place(tensor).clone(memory_format=torch.contiguous_format)

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor on this rank's device, in the dtype that is computed in; the tensor itself if it is so already."""
        return tensor.resolve_conj().resolve_neg().to(self.device, replaced(tensor.dtype, self.dtype))

    def dtype_of(self, name: str) -> torch.dtype:
        """The dtype that a tensor of the graph is computed in."""
        return run_dtype(self.plan.graph, name, self.dtype)


def _refuse_impossible(model: TracedModel, options: TrainingOptions) -> None:
    """RuntimeFailure if the options do not work with this model or on this machine."""
    if options.compiled and (missing := missing_compiler()):
        raise RuntimeFailure(f"compiled steps: expected what torch.compile needs, but there is {missing}; train without")
    dtype = options.dtype
    if dtype is not None and not has_complex(dtype) and any(is_complex(t.dtype) for t in model.graph.tensors.values()):
        raise RuntimeFailure(f"dtype {name_of(dtype)}: the model has complex tensors, for which torch has float32 and float64 alone")


UNFINISHED = MicroBatch(0, 2)
TOLD = 5


def mean_loss(trainer: Trainer, sizes: BatchSizes, batches: Sequence[Batch]) -> float:
    """The mean of the losses of some batches, the same on all ranks."""
    losses = []
    for batch in batches:
        sized = sizes.of(batch.shapes)
        context = TileContext(trainer.seed, 0, trainer.buffers, update_buffers=False, unread=sized.unread)
        losses.append(sized.runner_of(batch).run(sized.inputs(batch), context, UNFINISHED))
    mean = sum(loss() for loss in losses) / len(losses)
    trainer.alike.require()
    return mean


class Evaluation:
    """Evaluates by another program than the one that trains, of the same parameters: those that the trainer has at the time. Buffers are
    those that it had when this was made. Made on all ranks at once. RuntimeFailure in one line if that cannot be."""

    def __init__(self, trainer: Trainer, model: TracedModel) -> None:
        require_same(trainer.model, model)
        own = model.with_state({**trainer.model.unchanged, **_buffers(trainer)})
        handed = trainer.planned.evaluation(own, trainer.sizes.of().whole)
        trainer.comm.open_numbered(handed.groups, handed.group_count)
        self._trainer, self.sizes = trainer, BatchSizes(trainer, handed, other=own)
        self._purpose = f"evaluation by {id(self)}"

    def samples(self, size: int | None = None) -> BySamples:
        """As ``Trainer.samples``."""
        return self.sizes.of_samples(size).samples

    def loss(self, *inputs: Given) -> float:
        """The loss of a batch, given as to ``Trainer.evaluate``, the same on all ranks."""
        return mean_loss(self._trainer, self.sizes, self._trainer.given_batches(self.sizes, inputs, self._purpose))


def _buffers(trainer: Trainer) -> dict[str, torch.Tensor]:
    """The buffers in full, by name, on every rank. A rank's own copies are up to date only where its tiles change them."""
    whole = whole_buffers(trainer)
    found = {name: whole.get(name, torch.empty_like(own)).contiguous() for name, own in trainer.buffers.items()}
    for tensor in found.values():
        trainer.comm.broadcast(tensor, 0).wait()
    return {name: tensor.cpu() for name, tensor in found.items()}


def require_same(trained: TracedModel, other: TracedModel) -> None:
    """RuntimeFailure in one line unless the other program can evaluate, and has the same parameters: names and shapes."""
    require_evaluable(other, "one that was exported in evaluation mode")
    own, theirs = ({t.name: tuple(t.shape) for t in model.graph.parameters} for model in (trained, other))
    lacking = sorted(own.keys() ^ theirs.keys())
    wrong = [f"{name} {[*theirs[name]]} instead of {[*shape]}" for name, shape in own.items() if theirs.get(name, shape) != shape]
    if lacking or wrong:
        told = [*wrong, *(f"{name} in {'the one that trains' if name in own else 'the other'} alone" for name in lacking)]
        more = f" and {len(told) - TOLD} more" if len(told) > TOLD else ""
        raise RuntimeFailure(
            f"evaluation by {other.graph.name!r}: {', '.join(told[:TOLD])}{more}; expected the parameters of {trained.graph.name!r}: "
            "export the same module, in evaluation mode"
        )


def require_evaluable(model: TracedModel, instead: str) -> None:
    """RuntimeFailure in one line if the program does other things in training than outside of it: random numbers, or buffers that a step
    changes, as batch norm's statistics. A program cannot leave the mode in which it was exported. ``instead``: what to use."""
    apart = [op.name for position, op in enumerate(model.graph.operators) if not model.is_pure(position)]
    if apart or model.state:
        what = f"{apart[0]!r} (and {len(apart) - 1} more)" if apart else f"buffer {next(iter(model.state.values()))!r}"
        raise RuntimeFailure(
            f"evaluation: {model.graph.name!r} was exported in training mode, and {what} is not the same outside of it; "
            f"expected a program without dropout and batch norm's statistics: {instead}"
        )
