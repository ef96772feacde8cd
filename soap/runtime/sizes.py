"""A trainer's programs, one per batch size: the model's own from the start, others traced and compiled when they first occur."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING

import torch

from soap.errors import ModelError, RuntimeFailure
from soap.plan.plan import Plan
from soap.plan.samples import Samples, divided_inputs, looked_up_in, samples_read, with_own_labels
from soap.plan.tiling import Tile
from soap.runtime.inputs import Batch, BySamples, Given, Shapes, check_samples, check_types, micro_batches, other_shape
from soap.runtime.planned import Handed
from soap.runtime.program.prepared import OwnSamples, StepInputs
from soap.runtime.program.program import Program
from soap.runtime.step.gradients import Gradients
from soap.runtime.step.step import StepRunner
from soap.runtime.sync.shards import ShardStore, run_dtype
from soap.runtime.trace import Recorder
from soap.tracing.execute import TracedModel

if TYPE_CHECKING:
    from soap.runtime.trainer import Trainer


NO_SAMPLES = Samples(None, 0, ())
"""What is read of an input that belongs to no sample: all of it."""


@dataclass(frozen=True)
class SizedProgram:
    """What executes steps on batches of one size. All sizes share the trainer's parameters and gradients."""

    trainer: Trainer
    sizes: BatchSizes
    model: TracedModel
    program: Program
    runner: StepRunner
    """Of whole batches."""
    constants: Mapping[str, torch.Tensor]
    unread: frozenset[str]
    whole: Program | None
    """The program of all ranks, on rank 0."""

    def inputs(self, batch: Batch) -> StepInputs:
        """Inputs, constants and state by name, on this rank's device. RuntimeFailure if a part of a batch lacks what the rank reads."""
        if batch.size is not None:
            check_samples(batch, self.samples)
        state = {tensor: self.trainer.buffers[name] for tensor, name in self.model.state.items()}
        given = {name: self.trainer.place(tensor) for name, tensor in zip(self.model.input_names, batch.tensors, strict=True)}
        return StepInputs({**self.constants, **state, **given}, None if batch.size is None else self._own)

    def runner_of(self, batch: Batch) -> StepRunner:
        """What executes steps on such a batch. Of a part of one, ranks read their own labels alone, and count them together."""
        return self.runner if batch.size is None else self._runner_of_parts

    @cached_property
    def _runner_of_parts(self) -> StepRunner:
        program, whole = _for_parts(self.program), self.runner
        return whole if program is self.program else self.sizes.runner(program, self.model, whole.shards, whole.gradients)

    @cached_property
    def samples(self) -> BySamples:
        """What this rank reads of each input, in the order of the inputs."""
        sizes, rank = self.sizes, self.trainer.rank
        own = samples_read(self.program.plan, rank, sizes.divided, sizes.read_whole)
        return {name: own.get(name, NO_SAMPLES) for name in self.model.input_names}

    @property
    def all_tiles(self) -> Sequence[Tile]:
        """The tiles of all ranks, on rank 0; elsewhere the rank's own."""
        return (self.whole or self.program).plan.tiles

    @cached_property
    def samples_by_rank(self) -> list[BySamples]:
        """These sizes of all ranks; asked for on all of them at once."""
        return self.trainer.comm.gather(self.samples)

    @cached_property
    def _own(self) -> OwnSamples:
        return OwnSamples(self.samples)

    def traced(self, recorder: Recorder, batch: Batch) -> StepRunner:
        """A runner for such a batch that times every task; called on all ranks at once."""
        program = self.trainer.planned.single_tiles(self.model, self.whole)
        program = program if batch.size is None else _for_parts(program)
        runner = self.runner
        room = self.trainer.room
        return StepRunner(program, self.model, runner.comm, runner.shards, runner.dtype_of, recorder, runner.gradients, room=room)


class BatchSizes:
    """The programs of a model, by the shapes of their inputs; ``handed``: the first one. ``gradients``: shared by all of them.
    ``take_over``: the first one uses the model's own constants, and those that this rank does not read are freed. ``other``: what evaluates
    in place of the trainer's model, with its parameters and gradients."""

    def __init__(self, trainer: Trainer, handed: Handed, take_over: bool = False, other: TracedModel | None = None) -> None:
        self.trainer, self._take_over = trainer, take_over
        self.model = model = other or trainer.model
        self.divided = divided_inputs(model.graph)
        self.read_whole = looked_up_in(model.graph, trainer.plan) if trainer.lazy_sparse else frozenset()
        self._own: Shapes = tuple(model.graph.tensors[name].shape for name in model.input_names)
        self._models: dict[Shapes, TracedModel] = {self._own: model}
        if other is None:
            first = self._sized(model, handed, trainer.shards, None)
        else:
            first = self._sized(model, handed, self._own_shards(handed), trainer.sizes.gradients)
        self._sizes = {self._own: first}
        self.gradients: Gradients = first.runner.gradients

    def batches(self, inputs: Sequence[Given]) -> list[Batch]:
        """The micro-batches of what a step is given."""
        return micro_batches(inputs, self.model.input_names, self.trainer.accumulate, self.divided)

    def check(self, parts: Sequence[Batch]) -> None:
        """Raise RuntimeFailure in one line if the model cannot be trained on these micro-batches. No other rank is needed."""
        model = self.model
        for part in parts:
            check_types(model.graph, model.input_names, part.tensors, partial(run_dtype, model.graph, dtype=self.trainer.dtype))
            self._model(part.shapes)

    def of(self, shapes: Shapes | None = None) -> SizedProgram:
        """The program for inputs of these shapes; None: the model's own. Called on all ranks at once when a size first occurs."""
        shapes = self._own if shapes is None else shapes
        if shapes not in self._sizes:
            self._sizes[shapes] = self._compile(self._model(shapes))
        return self._sizes[shapes]

    def of_samples(self, size: int | None) -> SizedProgram:
        """The same for a batch of so many samples; None: the model's own number."""
        given = zip(self.model.input_names, self._own, strict=True)
        dims = ((self.divided.get(name), shape) for name, shape in given)
        return self.of(None if size is None else tuple(s if d is None else (*s[:d], size, *s[d + 1 :]) for d, s in dims))

    def _model(self, shapes: Shapes) -> TracedModel:
        if shapes not in self._models:
            model = self.model
            try:
                self._models[shapes] = model.resized(shapes)
            except ModelError as error:
                raise RuntimeFailure(f"{other_shape(model.graph, model.input_names, shapes)}; {error}") from None
        return self._models[shapes]

    def _compile(self, model: TracedModel) -> SizedProgram:
        comm = self.trainer.comm
        if len(set(comm.gather(model.graph.hash))) > 1:
            raise RuntimeFailure("ranks were given batches of different sizes: every rank gets the whole global batch")
        handed = self.trainer.planned.resized(model, self._sizes[self._own].whole)
        comm.open_numbered(handed.groups, handed.group_count)
        return self._sized(model, handed, self._own_shards(handed), self.gradients)

    def _own_shards(self, handed: Handed) -> ShardStore:
        """The trainer's shards, as tiles of another program read them."""
        shards = ShardStore(handed.program.plan, self.trainer.rank)
        shards.share_with(self.trainer.shards)
        return shards

    def _sized(self, model: TracedModel, handed: Handed, shards: ShardStore, gradients: Gradients | None) -> SizedProgram:
        program = handed.program
        runner, constants = self.runner(program, model, shards, gradients), self._constants(model, program.plan)
        return SizedProgram(self.trainer, self, model, program, runner, constants, handed.unread, handed.whole)

    def runner(self, program: Program, model: TracedModel, shards: ShardStore, gradients: Gradients | None) -> StepRunner:
        """What executes a program's steps. ``gradients``: of another one with the same shards."""
        trainer = self.trainer
        dtype_of = partial(run_dtype, model.graph, dtype=trainer.dtype)
        options = trainer.compiled, trainer.compressing, trainer.room
        return StepRunner(program, model, trainer.comm, shards, dtype_of, None, gradients, *options)

    def _constants(self, model: TracedModel, plan: Plan) -> dict[str, torch.Tensor]:
        """The constants that this rank reads, in full, on its device. Where nobody else uses the model they are its own."""
        trainer, read = self.trainer, constants_read(plan, self.trainer.rank)
        fixed = {name: trainer.place(tensor) for name, tensor in model.constants.items() if name in read and name not in model.state}
        if model is self.model and not self._take_over:  # whose tensors are the user's
            return {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in fixed.items()}
        model.let_go([name for name in model.constants if name not in read])
        return {name: tensor.contiguous() for name, tensor in fixed.items()}


def _for_parts(program: Program) -> Program:
    """The same program for parts of batches; itself if that makes no difference."""
    plan = program.plan
    if not any(plan.operator(tile).own_inputs for tile in plan.tiles):
        return program
    return replace(program, plan=replace(plan, tiles=tuple([with_own_labels(plan.graph, tile) for tile in plan.tiles])))


def constants_read(plan: Plan, rank: int) -> frozenset[str]:
    """Names of the tensors that a rank's tiles read, or that say which rows of sparse parameters any rank looks up."""
    graph = plan.graph
    own = {tile.operator for tile in plan.tiles if tile.device == rank}
    asked = {use.operator for access in graph.sparse.values() for use in access.lookups}
    return frozenset(operand.tensor for position in own | asked for operand in graph.operators[position].inputs)
