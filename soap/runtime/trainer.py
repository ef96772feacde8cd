"""``Trainer``: a model trained by a strategy, step by step, from a script that runs on every rank."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch

from soap.errors import RuntimeFailure, SoapWarning
from soap.runtime.program import compile_program
from soap.runtime.redistribute import Communicator, Traffic
from soap.runtime.segment import StepRunner
from soap.runtime.shards import ShardStore, gather_regions
from soap.runtime.trace import Event, Recorder, join_events
from soap.runtime.world import TIMEOUT_S, close_world, open_world
from soap.simulator.lowering import build_plan
from soap.simulator.plan import Plan, update_name
from soap.simulator.tasks import TaskKind
from soap.strategy import Strategy
from soap.topology import DeviceKind, Topology
from soap.tracing.model import TileContext, TracedModel

OptimizerFactory = Callable[[list[torch.Tensor]], torch.optim.Optimizer]
"""Makes an optimizer whose update is elementwise from the tensors of one rank's shards."""


def plain_sgd(parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    """The optimizer if none is given: SGD with learning rate 0.01."""
    return torch.optim.SGD(parameters, lr=0.01)


class Trainer:
    """Trains a traced model by a plan; made on all ranks at once, with equal arguments.

    ``plan``: a plan, or (strategy, topology). ``order``: all tiles in the order in which they start, from the simulator; the graph's
    order if None. ``optimizer``: makes any torch optimizer with an elementwise update from a list of tensors. ``seed`` is that of
    dropout. ``dtype``: compute in this floating-point type instead of the model's own. Copies of a parameter start equal to their
    first device's, buffers equal to rank 0's. ``take_over``: train in the model's own memory where a rank keeps a parameter whole;
    ``model.parameters`` then follow the training.

    Use as a context manager, or call ``close``, to leave the process group that it has opened.
    """

    def __init__(
        self,
        model: TracedModel,
        plan: Plan | tuple[Strategy, Topology],
        order: Sequence[int] | None = None,
        *,
        optimizer: OptimizerFactory = plain_sgd,
        backend: str = "auto",
        device_kind: DeviceKind | None = None,
        seed: int = 0,
        dtype: torch.dtype | None = None,
        timeout_s: float = TIMEOUT_S,
        take_over: bool = False,
    ) -> None:
        if not isinstance(plan, Plan):
            strategy, topology = plan
            device_kind = device_kind or topology.devices[0].type.kind
            plan = build_plan(model.graph, strategy, topology)
        if plan.graph.hash != model.graph.hash:
            ours, theirs = f"{model.graph.name!r} ({model.graph.hash})", f"{plan.graph.name!r} ({plan.graph.hash})"
            raise RuntimeFailure(f"plan is for model {theirs}, not {ours}; build it for this model")
        self.model, self.seed, self.dtype = model, seed, dtype
        self.program = compile_program(plan, order)
        self.plan = plan = self.program.plan
        self.world = open_world(plan.device_count, device_kind or "cpu", backend, timeout_s)
        self.rank, self.device = self.world.rank, self.world.device
        self.comm = Communicator(self.device, self.program.device_groups(), self.world.timeout)
        self._check_agreement()
        self.shards = ShardStore(plan, self.rank)
        self.shards.load(model.parameters, self.device, dtype, share=take_over)
        self.shards.agree(self.comm)
        self.buffers = {name: self._own(tensor) for name, tensor in model.buffers.items()}
        for tensor in self.buffers.values():
            self.comm.broadcast(tensor, 0).wait()
        self._first_buffers = {name: tensor.clone() for name, tensor in self.buffers.items()}
        self._constants = {name: self._own(tensor) for name, tensor in model.constants.items()}
        self.steps = 0
        self._batch_compared = False
        self._runner = StepRunner(self.program, model, self.comm, self.shards, self._dtype_of)
        self.optimizer_factory = optimizer
        trainable = [self.shards.tensors[i] for i in self.shards.tensors if plan.shards[i].trainable]
        self.optimizer = optimizer(trainable) if trainable else None

    def step(self, *inputs: torch.Tensor) -> float:
        """One training iteration on a global batch, which every rank gets in full. Returns the loss, the same on all ranks."""
        loss = self._run(self._runner, inputs)
        self._set_gradients(self._runner.gradients.gradients)
        if self.optimizer is not None:
            self.optimizer.step()
        self.steps += 1
        return loss

    def trace(self, *inputs: torch.Tensor) -> list[Event]:
        """One training iteration in which every task is timed on its own; the events of all ranks, on all ranks.

        Slower than ``step``: nothing is joined into segments and buckets.
        """
        program = compile_program(self.plan, self.program.order, single_tiles=True)
        recorder = Recorder(self.comm)
        runner = StepRunner(program, self.model, self.comm, self.shards, self._dtype_of, recorder)
        recorder.align()
        self._run(runner, inputs)
        self._update_one_by_one(runner.gradients.gradients, recorder)
        self.steps += 1
        return join_events(self.comm.gather(recorder.close()))

    def gradients(self) -> dict[str, torch.Tensor]:
        """Full gradients of the last step by canonical name, on rank 0 (empty elsewhere). Parameters without gradient are left out."""
        wanted = sorted(shard for bucket in self.program.buckets for shard in bucket.shards)
        full: dict[str, torch.Tensor] = {}
        for name in dict.fromkeys(self.plan.shards[shard].parameter for shard in wanted):
            full[name] = torch.zeros(self.plan.graph.tensors[name].shape, dtype=self._dtype_of(name), device=self._home(name))
        gather_regions(self.comm, self.plan, self._runner.gradients.gradients, wanted, full)
        return full if self.rank == 0 else {}

    def state_dict(self) -> dict[str, torch.Tensor]:
        """All parameters and buffers in full by the names of the user's model, on rank 0 (empty elsewhere).

        It has every entry of the exported model's state dict: the model itself can load it.
        """
        full: dict[str, torch.Tensor] = {}
        for name, tensor in (*self.model.parameters.items(), *self.model.unchanged.items()) if self.rank == 0 else ():
            full[name] = self._own(tensor.detach()).to(tensor.device)
        wanted = list(range(len(self.plan.shards)))
        gather_regions(self.comm, self.plan, self.shards.tensors, wanted, full)
        buffers = self._gather_buffers()
        if self.rank != 0:
            return {}
        aliases = {alias: full[name] for alias, name in self.plan.graph.aliases.items() if name in full}
        return {**full, **aliases, **buffers}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Take parameters and buffers from full tensors, given on every rank."""
        missing = [name for name in (*self.model.parameters, *self.buffers) if name not in state]
        if missing:
            raise RuntimeFailure(f"state lacks {missing[0]!r} (and {len(missing) - 1} more): expected every parameter and buffer by name")
        self.shards.load(state, self.device, self.dtype)
        for name, tensor in self.buffers.items():
            tensor.copy_(state[name])
            self._first_buffers[name].copy_(state[name])
        self._warn_of_unchanged(state)

    @property
    def traffic(self) -> Traffic:
        """Payload bytes that this rank has moved so far in steps."""
        return replace(self.comm.traffic)

    def close(self) -> None:
        """Leave the process group, if this trainer has opened it."""
        self.comm.close()
        close_world(self.world)

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _run(self, runner: StepRunner, inputs: Sequence[torch.Tensor]) -> float:
        context = TileContext(self.seed, self.steps, self.buffers)
        self._compare_batches(inputs)
        loss = runner.run({**self._constants, **self._check_inputs(inputs)}, context)
        self.model.end_step(context)
        return loss

    def _check_inputs(self, inputs: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        names = self.model.input_names
        if len(inputs) != len(names):
            raise RuntimeFailure(f"{len(inputs)} tensors given to a step: expected {len(names)} ({', '.join(names)})")
        for name, tensor in zip(names, inputs, strict=True):
            self._check_type(name, tensor)
            expected = self.plan.graph.tensors[name].shape
            if tuple(tensor.shape) != expected:
                raise RuntimeFailure(f"input {name!r} has shape {tuple(tensor.shape)}: expected {expected}, the whole batch, on every rank")
        return {name: self.place(tensor) for name, tensor in zip(names, inputs, strict=True)}

    def _check_type(self, name: str, tensor: object) -> None:
        """A tensor of the dtype that the model was exported with, or of the one that replaces it."""
        own = self.plan.graph.tensors[name].dtype
        allowed = dict.fromkeys((own, _dtype_name(self._dtype_of(name))))
        found = _dtype_name(tensor.dtype) if isinstance(tensor, torch.Tensor) else None
        if found not in allowed:
            what = f"is a {type(tensor).__name__}" if found is None else f"has dtype {found}"
            raise RuntimeFailure(f"input {name!r} {what}: expected a tensor of dtype {' or '.join(allowed)}; convert it first")

    def _compare_batches(self, inputs: Sequence[torch.Tensor]) -> None:
        """Before the first step: ranks that load different data would train on silently. A rank's failure is raised on all of them."""
        if self._batch_compared:
            return
        try:
            self._check_inputs(inputs)
            outcome = ("", _digest(inputs))
        except RuntimeFailure as error:
            outcome = (str(error), "")
        outcomes = self.comm.gather(outcome)
        if outcome[0]:
            raise RuntimeFailure(outcome[0])
        for rank, (failure, digest) in enumerate(outcomes):
            if failure:
                raise RuntimeFailure(f"rank {rank}: {failure}")
            if digest != outcomes[0][1]:
                raise RuntimeFailure(
                    f"rank {rank} was given another batch than rank 0: every rank gets the whole global batch; seed the loader equally"
                )
        self._batch_compared = True

    def _warn_of_unchanged(self, state: Mapping[str, torch.Tensor]) -> None:
        """What the program only reads was fixed when it was imported."""
        for name, tensor in self.model.unchanged.items():
            if name in state and not torch.equal(state[name].detach().to(tensor.device, tensor.dtype), tensor):
                warnings.warn(
                    f"{name!r} keeps the value that was exported: training does not change it, and loading another has no effect; "
                    "export the model with that value",
                    SoapWarning,
                    stacklevel=3,
                )

    def _set_gradients(self, gradients: Mapping[int, torch.Tensor]) -> None:
        for number, tensor in self.shards.tensors.items():
            tensor.grad = gradients.get(number)

    def _update_one_by_one(self, gradients: Mapping[int, torch.Tensor], recorder: Recorder) -> None:
        """Optimizers leave alone what has no gradient, so that each shard can be updated, and timed, by itself."""
        for number, gradient in gradients.items():
            self._set_gradients({number: gradient})
            if self.optimizer is not None:
                with recorder.task(update_name(self.plan.shards[number], self.rank), TaskKind.UPDATE):
                    self.optimizer.step()

    def _gather_buffers(self) -> dict[str, torch.Tensor]:
        """Each element from the rank that has updated it: tiles change their own region of their rank's copy only."""
        full: dict[str, torch.Tensor] = {}
        for tag, (name, own) in enumerate(self.buffers.items()):
            if self.rank != 0:
                self.comm.send(own, 0, tag)
                continue
            merged, first = own.clone(), self._first_buffers[name]
            for source in range(1, self.world.size):
                other = self.comm.receive(torch.empty_like(own), source, tag).wait()
                merged = torch.where(merged == first, other, merged)
            full[name] = merged
        self.comm.finish_sends()
        return full

    def _check_agreement(self) -> None:
        """Ranks with different programs would wait for each other forever."""
        text = repr((self.plan.graph.hash, self.program.order, self.program.transfers, self.program.buckets, self.dtype))
        digests = self.comm.gather(hashlib.sha256(text.encode()).hexdigest())
        for rank, digest in enumerate(digests):
            if digest != digests[0]:
                raise RuntimeFailure(f"rank {rank} has another model, strategy or order than rank 0; expected the same on all ranks")

    def _own(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy on this rank's device, in the type that is computed in."""
        return self.place(tensor).clone(memory_format=torch.contiguous_format)

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor on this rank's device, in the type that is computed in; itself if it is so already."""
        if self.dtype is not None and tensor.is_floating_point():
            return tensor.to(self.device, self.dtype)
        return tensor.to(self.device)

    def _dtype_of(self, name: str) -> torch.dtype:
        own: Any = getattr(torch, self.plan.graph.tensors[name].dtype)
        assert isinstance(own, torch.dtype)
        return self.dtype if self.dtype is not None and own.is_floating_point else own

    def _home(self, name: str) -> torch.device:
        return self.model.parameters[name].device


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _digest(tensors: Sequence[torch.Tensor]) -> str:
    """What tells batches apart: dtype, shape and bytes of each tensor."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(repr((tensor.dtype, tuple(tensor.shape))).encode())
        found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
