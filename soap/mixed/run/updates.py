"""What a stage makes of a minibatch's gradient: the update that servers add. SGD alone, as docs/mixed_machines.md says why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from soap.errors import RuntimeFailure
from soap.runtime.updates.optimizers import OptimizerFactory, ScheduleFactory
from soap.runtime.updates.schedules import Schedule


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
