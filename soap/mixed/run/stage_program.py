"""The calls of one stage, with whole tensors: forward from what it receives to what it sends, and back."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from soap.elastic.clocks import Push, WorkerWeights
from soap.errors import RuntimeFailure
from soap.mixed.planned import Stage
from soap.runtime.updates.optimizers import OptimizerFactory, Schedule, ScheduleFactory
from soap.tracing.calls import BufferRef, Call, Program, TileContext, walk
from soap.tracing.execute import TracedModel


@dataclass(frozen=True)
class Begun:
    """A minibatch between its passes. ``values``: the stage's parameters, end to end, with which both are computed."""

    values: torch.Tensor
    leaves: Sequence[torch.Tensor]
    received: Sequence[torch.Tensor]
    sent: Sequence[torch.Tensor]
    loss: torch.Tensor | None


class StageProgram:
    """``model``: for one minibatch; ``frozen``: values not trained. ``buffers``: batch norm's, the worker's own. ``last``: has the loss."""

    def __init__(
        self,
        model: TracedModel,
        stage: Stage,
        frozen: Mapping[str, torch.Tensor],
        buffers: dict[str, torch.Tensor],
        seed: int,
        *,
        first: bool,
        last: bool,
    ) -> None:
        self._model, self._stage, self._buffers, self._seed = model, stage, buffers, seed
        graph, program = model.graph, model.program
        self._value_of = _value_names(model, (*stage.receives, *stage.sends))
        made_here = [name for name in stage.sends if name not in stage.receives]
        self._wanted = [*(self._value_of[name] for name in made_here), *([program.loss] if last else [])]
        self._program = _part(program, self._wanted, [self._value_of[name] for name in stage.receives])
        self._made_here, self._last = made_here, last
        self._counters = program.end_step if first else []
        self._buffer_names = _buffers_of([*self._program.calls, *self._counters])
        self._frozen = {name: frozen[name] for name in self._program.parameters.values() if name in frozen}
        self._shapes = {name: graph.tensors[name].shape for name in stage.parameters}
        self._differentiable = frozenset(name for name in (*stage.receives, *stage.sends) if graph.tensors[name].requires_grad)

    def own_buffers(self) -> dict[str, torch.Tensor]:
        """Batch norm's, those that this stage moves."""
        return {name: self._buffers[name] for name in self._buffer_names}

    def shapes(self, names: Sequence[str]) -> list[tuple[int, ...]]:
        """Of activations of one minibatch."""
        return [tuple(self._model.program.values[self._value_of[name]].shape) for name in names]

    def dtypes(self, names: Sequence[str]) -> list[torch.dtype]:
        """Of activations."""
        return [self._model.program.values[self._value_of[name]].dtype for name in names]

    def has_gradient(self, names: Sequence[str]) -> list[bool]:
        """Which of the activations have one."""
        return [name in self._differentiable for name in names]

    def forward(self, step: int, batch: Sequence[torch.Tensor], received: Sequence[torch.Tensor], values: torch.Tensor) -> Begun:
        """Begin a minibatch. ``step``: what the model draws follows from it. ``values``: see ``Begun``; they must stay as they are."""
        parts = torch.split(values.detach(), [prod(shape) for shape in self._shapes.values()])
        leaves = [part.view(shape).requires_grad_() for part, shape in zip(parts, self._shapes.values(), strict=True)]
        weights = {**dict(zip(self._shapes, leaves, strict=True)), **self._frozen}
        came = [own.requires_grad_() if has else own for own, has in zip(received, self.has_gradient(self._stage.receives), strict=True)]
        named = dict(zip(self._stage.receives, came, strict=True))
        context = TileContext(seed=self._seed, step=step, buffers=self._buffers)
        made = self._model.whole_values(self._program, [*batch, *came], weights, context, self._wanted)
        for call in self._counters:
            call.target(*[self._buffers[arg.name] if isinstance(arg, BufferRef) else arg for arg in call.args], **call.kwargs)
        named.update(zip(self._made_here, made, strict=False))
        return Begun(values, leaves, came, [named[name] for name in self._stage.sends], made[-1] if self._last else None)

    def backward(self, begun: Begun, gradients: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """From the gradients of what was sent to that of the parameters, end to end, and of what was received."""
        outputs = [own for own, has in zip(begun.sent, self.has_gradient(self._stage.sends), strict=True) if has]
        given = [*gradients]
        if begun.loss is not None:
            outputs, given = [*outputs, begun.loss], [*given, torch.ones_like(begun.loss)]
        pairs = [(own, gradient) for own, gradient in zip(outputs, given, strict=True) if own.requires_grad]
        wanted = [*begun.leaves, *(own for own in begun.received if own.requires_grad)]
        found: Sequence[torch.Tensor | None] = [None] * len(wanted)
        if pairs and wanted:
            found = torch.autograd.grad([own for own, _ in pairs], wanted, [gradient for _, gradient in pairs], allow_unused=True)
        whole = [torch.zeros_like(own) if gradient is None else gradient for own, gradient in zip(wanted, found, strict=True)]
        count = len(begun.leaves)
        vector = torch.cat([own.reshape(-1) for own in whole[:count]]) if count else begun.values.new_zeros(0)
        return vector, [own.contiguous() for own in whole[count:]]


def _value_names(model: TracedModel, names: Sequence[str]) -> dict[str, str]:
    """By activation of the graph, its name in the program."""
    graph = model.graph
    places = {name: graph.producers[name] for name in names}
    return {name: model.programs[graph.operators[op].name].outputs[output] for name, (op, output) in places.items()}


def _buffers_of(calls: Sequence[Call]) -> list[str]:
    leaves = [leaf for call in calls for leaf in walk((call.args, dict(call.kwargs)))]
    return sorted({leaf.name for leaf in leaves if isinstance(leaf, BufferRef)})


def _part(program: Program, wanted: Sequence[str], received: Sequence[str]) -> Program:
    """The calls that make these values from what is received. Light calls of no stage, as on constants, are made wherever needed."""
    there = {*received}
    needed, calls = {name for name in wanted if name not in there}, list[Call]()
    for call in reversed(program.calls):
        if not needed.isdisjoint(set(call.outputs) - there):
            needed.update(name for name in call.operands if name not in there)
            calls.append(call)
    parameters = {value: name for value, name in program.parameters.items() if value in needed}
    return replace(program, calls=calls[::-1], inputs=[*program.inputs, *received], parameters=parameters)


@dataclass(frozen=True)
class Sgd:
    """Options of torch.optim.SGD, with its meanings."""

    momentum: float
    dampening: float
    weight_decay: float
    nesterov: bool


class Updates:
    """Updates of one stage's parameters, as one vector. ``workers``: V, by which each is divided. ``finished``: minibatches that the worker
    had finished before, which the schedule has counted.

    RuntimeFailure in one line for an optimizer that is not linear in gradients, or a schedule that asks for the loss.
    """

    def __init__(self, make: OptimizerFactory, schedule: ScheduleFactory | None, workers: int, finished: int = 0) -> None:
        self._optimizer = make([torch.nn.Parameter(torch.zeros(1))])
        self.rule, self._workers = sgd_of(self._optimizer), workers
        self._schedule = Schedule.of(schedule, self._optimizer)
        if self._schedule.takes_loss:
            raise RuntimeFailure(f"schedule {self._schedule.name} under virtual workers; expected one that asks for no loss")
        for _ in range(finished):
            self._optimizer.step()
            self._schedule.step(0.0)
        self.momentum: torch.Tensor | None = None

    @property
    def rate(self) -> float:
        """The learning rate of the next minibatch."""
        return float(self._optimizer.param_groups[0]["lr"])

    @torch.no_grad()
    def of(self, gradient: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """The update of the next minibatch, in the order in which they end: -rate * gradient / V, weight decay at the values with which it
        began, and momentum as of the worker's own gradients. The gradient becomes the update where nothing else needs it."""
        rule = self.rule
        if rule.weight_decay:
            gradient = gradient + rule.weight_decay * values
        if rule.momentum:
            before = self.momentum
            self.momentum = gradient.clone() if before is None else rule.momentum * before + (1 - rule.dampening) * gradient
            gradient = gradient + rule.momentum * self.momentum if rule.nesterov else self.momentum
        factor = -self.rate / self._workers
        update = factor * gradient if rule.momentum else gradient.mul_(factor)
        self._optimizer.step()  # of nothing: schedules warn if they are stepped first
        self._schedule.step(0.0)
        return update


def sgd_of(optimizer: torch.optim.Optimizer) -> Sgd:
    """The optimizer's options. RuntimeFailure in one line if it is not plain SGD."""
    options: Mapping[str, Any] = optimizer.param_groups[0]
    if type(optimizer) is not torch.optim.SGD or options.get("maximize"):
        what = f"{type(optimizer).__name__}{' that maximizes' if options.get('maximize') else ''}"
        raise RuntimeFailure(f"optimizer {what} under virtual workers; expected SGD, with momentum or without: waves are sums of updates")
    return Sgd(float(options["momentum"]), float(options["dampening"]), float(options["weight_decay"]), bool(options["nesterov"]))


class StageValues:
    """``pulled``: the stage's parameters of ``version``, end to end. ``begun``: as for ``WorkerWeights``.

    A stage is done with a minibatch before those in front of it are, and the worker has finished it when the first one is. A minibatch
    begins with what the worker had finished then, which its first stage says: later updates wait here. A wave is pushed as soon as it is
    complete here.
    """

    def __init__(self, wave: int, pulled: Tensor, version: int = 0, begun: tuple[int, Tensor] | None = None) -> None:
        self._weights = WorkerWeights(wave, pulled, version, begun)
        self._ended: deque[Tensor] = deque()
        self._wave, self._done = wave, self._weights.finished_minibatches
        self._sum = None if begun is None else begun[1]
        self._whole: dict[int, Tensor] = {}
        """Sums of waves that are complete here, and that the worker has not finished."""

    @property
    def version(self) -> int:
        """Of the values last pulled."""
        return self._weights.version

    def ended(self, update: Tensor) -> Push[Tensor] | None:
        """The next minibatch is done here. Returns its wave if that is complete."""
        self._ended.append(update)
        self._sum = update if self._sum is None else self._sum + update
        self._done += 1
        if self._done % self._wave:
            return None
        push = Push(self._done // self._wave - 1, self._wave, self._sum)
        self._whole[push.wave], self._sum = self._sum, None
        return push

    def values(self, finished: int, pulled: Tensor | None, version: int) -> Tensor:
        """What a minibatch begins with, when the worker has finished so many. ``pulled``: what servers have given for it, of this version,
        which has none of the worker's own waves that are not finished; None if it goes on with what it had."""
        while (number := self._weights.finished_minibatches) < finished:
            whole = self._whole.pop(number // self._wave) if (number + 1) % self._wave == 0 else None
            self._weights.finished(self._ended.popleft(), whole)
        if pulled is not None:
            self._weights.pull(pulled, version)
        return self._weights.values()

    @property
    def incomplete(self) -> tuple[int, Tensor] | None:
        """Of the wave that is not complete: how many minibatches are done here, and the sum of their updates; None if there are none."""
        return None if self._sum is None else (self._done % self._wave, self._sum)

    def last(self) -> Push[Tensor] | None:
        """There are no more minibatches. Returns the last wave if it is incomplete and has any."""
        left = self.incomplete
        return None if left is None else Push(self._done // self._wave, *left)
