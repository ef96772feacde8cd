"""A stage's part of its worker's values: which minibatch begins with what, and which sums go to servers when."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from soap.elastic.waves import Push, WorkerWeights
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
