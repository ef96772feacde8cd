"""What the ranks of the pool run: a case trained by the runtime, compared on rank 0 with one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import torch

from soap.model.graph import OperatorGraph
from soap.plan.plan import Plan
from soap.runtime.comm.redistribute import Traffic
from soap.runtime.inputs import PartBatch
from soap.runtime.trace import Event
from soap.runtime.trainer import Trainer
from soap.tracing.calls import TileContext
from tests.runtime.handmade import HandModel


@dataclass
class Outcome:
    """Largest differences from one process over all steps, relative to max(1, largest value)."""

    losses: list[float]
    loss_error: float = 0.0
    gradient_error: float = 0.0
    parameter_error: float = 0.0
    buffer_error: float = 0.0
    traffic: Traffic | None = None
    events: Sequence[Event] = ()


def optimizer(parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01)


def error(a: torch.Tensor, b: torch.Tensor, small: float = 1.0) -> float:
    """Largest difference relative to the largest element of ``b``, or to ``small`` if that is larger. Infinite where it is no number."""
    if b.numel() == 0:
        return 0.0
    a, b = a.detach().double(), b.detach().double()
    difference = float((a - b).abs().max())
    if difference == 0:
        return 0.0
    scale = max(small, float(b.abs().max()))
    return difference / scale if scale > 0 and difference < inf else inf


def train(plan: Plan, order: Sequence[int] | None = None, steps: int = 2, trace: bool = False, by_rank: bool = False) -> Outcome:
    """Train by the plan and, on rank 0, in one process. ``by_rank``: ranks are given only the samples that they read."""
    torch.manual_seed(0)
    model = HandModel(plan.graph)
    with Trainer(model, plan, order, optimizer=optimizer, dtype=torch.float64) as trainer:
        outcome = Outcome([])
        alone = _Alone(plan.graph) if trainer.rank == 0 else None
        for step in range(steps):
            inputs = model.inputs(step)
            given = [PartBatch.cut(inputs, trainer.samples())] if by_rank else inputs
            if trace and step == steps - 1:
                outcome.events = trainer.trace(*given)
                if alone is not None:
                    alone.step(inputs, step)
            else:
                outcome.losses.append(trainer.step(*given))
                gradients = trainer.gradients()
                if alone is not None:
                    loss, expected = alone.step(inputs, step)
                    outcome.loss_error = max(outcome.loss_error, error(torch.tensor(outcome.losses[-1]), torch.tensor(loss)))
                    for name, gradient in expected.items():
                        mine = gradients.get(name, torch.zeros_like(gradient))
                        outcome.gradient_error = max(outcome.gradient_error, error(mine, gradient))
        outcome.traffic = trainer.traffic
        state = trainer.state_dict()
        if alone is not None:
            outcome.parameter_error = max([error(state[name], value.detach()) for name, value in alone.parameters.items()], default=0.0)
            outcome.buffer_error = max([error(state[name], value) for name, value in alone.buffers.items()], default=0.0)
        return outcome


class _Alone:
    """The same training in one process."""

    def __init__(self, graph: OperatorGraph) -> None:
        self.model = HandModel(graph)
        self.parameters = {
            name: value.clone().requires_grad_(graph.tensors[name].requires_grad) for name, value in self.model.parameters.items()
        }
        self.buffers = {name: value.clone() for name, value in self.model.buffers.items()}
        trainable = [value for value in self.parameters.values() if value.requires_grad]
        self.optimizer = optimizer(trainable) if trainable else None

    def step(self, inputs: Sequence[torch.Tensor], step: int) -> tuple[float, dict[str, torch.Tensor]]:
        for value in self.parameters.values():
            value.grad = None
        context = TileContext(0, step, self.buffers)
        loss = self.model.reference_loss(inputs, self.parameters, context)
        self.model.end_step(context)
        if self.optimizer is not None:
            loss.backward()
            self.optimizer.step()
        gradients = {name: value.grad.clone() for name, value in self.parameters.items() if value.grad is not None}
        return float(loss.detach()), gradients
