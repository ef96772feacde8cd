"""A trainer's programs, one per batch size: the model's own from the start, others traced and compiled when they first occur."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING

import torch

from soap.cluster.topology import Topology
from soap.errors import ModelError, RuntimeFailure
from soap.model.graph import OperatorGraph, TensorKind
from soap.plan.plan import Plan
from soap.plan.samples import Samples, divided_inputs, samples_read
from soap.runtime.inputs import Batch, BySamples, Shapes, check_samples, check_types, micro_batches, other_shape
from soap.runtime.part_batch import Given
from soap.runtime.program.program import Program, compile_program
from soap.runtime.program.resizing import resized_program
from soap.runtime.run_types import run_dtype
from soap.runtime.step.gradients import Gradients
from soap.runtime.step.step import StepRunner
from soap.runtime.step.step_inputs import OwnSamples, StepInputs
from soap.runtime.sync.shards import ShardStore
from soap.runtime.trace import Recorder
from soap.tracing.model import TracedModel

if TYPE_CHECKING:
    from soap.runtime.trainer import Trainer


NO_SAMPLES = Samples(None, 0, ())
"""What is read of an input that belongs to no sample: all of it."""


@dataclass(frozen=True)
class SizedProgram:
    """What executes steps on batches of one size. All sizes share the trainer's parameters and gradients."""

    trainer: Trainer
    model: TracedModel
    program: Program
    runner: StepRunner
    constants: Mapping[str, torch.Tensor]
    unread: frozenset[str]

    def inputs(self, batch: Batch) -> StepInputs:
        """Inputs, constants and state (held in buffers) by name, on this rank's device. RuntimeFailure if a part of a batch has not the
        samples that this rank reads."""
        if batch.size is not None:
            check_samples(batch, self.samples[self.trainer.rank])
        state = {tensor: self.trainer.buffers[name] for tensor, name in self.model.state.items()}
        given = {name: self.trainer.place(tensor) for name, tensor in zip(self.model.input_names, batch.tensors, strict=True)}
        return StepInputs({**self.constants, **state, **given}, None if batch.size is None else self._own)

    @cached_property
    def samples(self) -> list[BySamples]:
        """By rank, what it reads of each input, in the order of the inputs."""
        sizes, plan = self.trainer.sizes, self.program.plan
        found = samples_read(plan, sizes.divided, sizes.read_whole)
        idle = [{name: replace(read, intervals=()) for name, read in own.items()} for own in found[:1]]
        found += idle * (self.trainer.comm.world_size - plan.device_count)
        return [{name: own.get(name, NO_SAMPLES) for name in self.model.input_names} for own in found]

    @cached_property
    def _own(self) -> OwnSamples:
        return OwnSamples(self.samples[self.trainer.rank])

    def traced(self, recorder: Recorder) -> StepRunner:
        """A runner that times every task."""
        program = compile_program(self.program.plan, self.program.order, single_tiles=True)
        runner = self.runner
        return StepRunner(program, self.model, runner.comm, runner.shards, runner.dtype_of, recorder, runner.gradients)


class BatchSizes:
    """The programs, by the shapes of their inputs. ``gradients``: shared by all of them. ``take_over``: the first one uses the model's own
    constants, and those that this rank does not read are freed."""

    def __init__(self, trainer: Trainer, topology: Topology, take_over: bool = False) -> None:
        self.trainer, self._topology, self._take_over = trainer, topology, take_over
        model = trainer.model
        self.divided = divided_inputs(model.graph)
        self.read_whole = looked_up_in(model.graph, trainer.plan) if trainer.lazy_sparse else frozenset()
        self._own: Shapes = tuple(model.graph.tensors[name].shape for name in model.input_names)
        self._models: dict[Shapes, TracedModel] = {self._own: model}
        first = self._sized(model, trainer.program, trainer.shards, None)
        self._sizes = {self._own: first}
        self.gradients = first.runner.gradients

    def batches(self, inputs: Sequence[Given]) -> list[Batch]:
        """The micro-batches of what a step is given."""
        trainer = self.trainer
        return micro_batches(inputs, trainer.model.input_names, trainer.accumulate, self.divided)

    def check(self, parts: Sequence[Batch]) -> None:
        """Raise RuntimeFailure in one line if the model cannot be trained on these micro-batches. No other rank is needed."""
        model = self.trainer.model
        for part in parts:
            check_types(model.graph, model.input_names, part.tensors, partial(run_dtype, model.graph, dtype=self.trainer.dtype))
            self._model(part.shapes)

    def of(self, shapes: Shapes | None = None) -> SizedProgram:
        """The program for a batch whose inputs have these shapes; None: the model's own. Called on all ranks at once when a size first
        occurs."""
        shapes = self._own if shapes is None else shapes
        if shapes not in self._sizes:
            self._sizes[shapes] = self._compile(self._model(shapes))
        return self._sizes[shapes]

    def of_samples(self, size: int | None) -> SizedProgram:
        """The same for a batch of so many samples; None: the model's own number."""
        given = zip(self.trainer.model.input_names, self._own, strict=True)
        dims = ((self.divided.get(name), shape) for name, shape in given)
        return self.of(None if size is None else tuple(s if d is None else (*s[:d], size, *s[d + 1 :]) for d, s in dims))

    def _model(self, shapes: Shapes) -> TracedModel:
        if shapes not in self._models:
            model = self.trainer.model
            try:
                self._models[shapes] = model.resized(shapes)
            except ModelError as error:
                raise RuntimeFailure(f"{other_shape(model.graph, model.input_names, shapes)}; {error}") from None
        return self._models[shapes]

    def _compile(self, model: TracedModel) -> SizedProgram:
        comm = self.trainer.comm
        program = resized_program(self.trainer.program, model.graph, self._topology)
        text = repr((model.graph.hash, program.order, program.plan.messages, program.plan.exchanges, program.plan.syncs))
        if len(set(comm.gather(hashlib.sha256(text.encode()).hexdigest()))) > 1:
            raise RuntimeFailure("ranks were given batches of different sizes: every rank gets the whole global batch")
        comm.open_groups(program.device_groups())
        shards = ShardStore(program.plan, self.trainer.rank)
        shards.share_with(self.trainer.shards)
        return self._sized(model, program, shards, self.gradients)

    def _sized(self, model: TracedModel, program: Program, shards: ShardStore, gradients: Gradients | None) -> SizedProgram:
        trainer = self.trainer
        dtype_of = partial(run_dtype, model.graph, dtype=trainer.dtype)
        runner = StepRunner(program, model, trainer.comm, shards, dtype_of, None, gradients, trainer.compiled, trainer.compressing)
        return SizedProgram(trainer, model, program, runner, self._constants(model, program.plan), model.unread(program.plan.tiles))

    def _constants(self, model: TracedModel, plan: Plan) -> dict[str, torch.Tensor]:
        """The constants that this rank reads, in full, on its device. Where nobody else uses the model they are its own."""
        trainer, read = self.trainer, constants_read(plan, self.trainer.rank)
        fixed = {name: trainer.place(tensor) for name, tensor in model.constants.items() if name in read and name not in model.state}
        if model is trainer.model and not self._take_over:  # whose tensors are the user's
            return {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in fixed.items()}
        model.let_go([name for name in model.constants if name not in read])
        return {name: tensor.contiguous() for name, tensor in fixed.items()}


def looked_up_in(graph: OperatorGraph, plan: Plan) -> frozenset[str]:
    """Inputs with the rows that sparse parameters look up. A rank that updates such rows alone needs those of all samples (``note_rows``),
    unless they come by rows."""
    by_rows = {sync.parameter for sync in plan.syncs if sync.contract.by_rows}
    uses = [use for name, access in graph.sparse.items() if name not in by_rows for use in access.lookups]
    read = {operand.tensor for use in uses for operand in graph.operators[use.operator].inputs}
    return frozenset(name for name in read if graph.tensors[name].kind is TensorKind.INPUT)


def constants_read(plan: Plan, rank: int) -> frozenset[str]:
    """Names of the tensors that a rank's tiles read, or that say which rows of sparse parameters any rank looks up."""
    graph = plan.graph
    own = {tile.operator for tile in plan.tiles if tile.device == rank}
    asked = {use.operator for access in graph.sparse.values() for use in access.lookups}
    return frozenset(operand.tensor for position in own | asked for operand in graph.operators[position].inputs)
