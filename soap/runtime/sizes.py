"""A trainer's programs, one per batch size: the model's own from the start, others traced and compiled when they first occur."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from soap.cluster.topology import Topology
from soap.errors import ModelError, RuntimeFailure
from soap.plan.plan import Plan
from soap.runtime.inputs import Tensors, check_types, other_shape, shapes_of
from soap.runtime.program.program import Program, compile_program
from soap.runtime.program.resizing import resized_program
from soap.runtime.run_types import run_dtype
from soap.runtime.step.gradients import Gradients
from soap.runtime.step.step import StepRunner
from soap.runtime.sync.shards import ShardStore
from soap.runtime.trace import Recorder
from soap.tracing.model import TracedModel

if TYPE_CHECKING:
    from soap.runtime.trainer import Trainer

Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class SizedProgram:
    """What executes steps on batches of one size. All sizes share the trainer's parameters and gradients."""

    trainer: Trainer
    model: TracedModel
    program: Program
    runner: StepRunner
    constants: Mapping[str, torch.Tensor]
    unread: frozenset[str]

    def tensors(self, inputs: Tensors) -> dict[str, torch.Tensor]:
        """Inputs, constants and state (held in buffers) by name, on this rank's device."""
        state = {tensor: self.trainer.buffers[name] for tensor, name in self.model.state.items()}
        return {**self.constants, **state, **{n: self.trainer.place(t) for n, t in zip(self.model.input_names, inputs, strict=True)}}

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
        self._own: Shapes = tuple(model.graph.tensors[name].shape for name in model.input_names)
        self._models: dict[Shapes, TracedModel] = {self._own: model}
        first = self._sized(model, trainer.program, trainer.shards, None)
        self._sizes = {self._own: first}
        self.gradients = first.runner.gradients

    def check(self, parts: Sequence[Tensors]) -> None:
        """Raise RuntimeFailure in one line if the model cannot be trained on these micro-batches. No other rank is needed."""
        model = self.trainer.model
        for part in parts:
            check_types(model.graph, model.input_names, part, partial(run_dtype, model.graph, dtype=self.trainer.dtype))
            self._model(part)

    def of(self, inputs: Tensors) -> SizedProgram:
        """The program for a batch. Called on all ranks at once when a size first occurs."""
        shapes = shapes_of(inputs)
        if shapes not in self._sizes:
            self._sizes[shapes] = self._compile(self._model(inputs))
        return self._sizes[shapes]

    def _model(self, inputs: Tensors) -> TracedModel:
        shapes = shapes_of(inputs)
        if shapes not in self._models:
            model = self.trainer.model
            try:
                self._models[shapes] = model.resized(shapes)
            except ModelError as error:
                raise RuntimeFailure(f"{other_shape(model.graph, model.input_names, inputs)}; {error}") from None
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


def constants_read(plan: Plan, rank: int) -> frozenset[str]:
    """Names of the tensors that a rank's tiles read, or that say which rows of sparse parameters any rank looks up."""
    graph = plan.graph
    own = {tile.operator for tile in plan.tiles if tile.device == rank}
    asked = {use.operator for access in graph.sparse.values() for use in access.lookups}
    return frozenset(operand.tensor for position in own | asked for operand in graph.operators[position].inputs)
