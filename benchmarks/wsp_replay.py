"""Wave synchronous training in one process, by given minibatches: when each begins and ends, and with which version of the values.

What servers and workers do with values is ``soap.elastic.clocks``, as in simulations and runs; gradients are the module's own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.convergence_tasks import TASKS
from soap.elastic.clocks import GlobalWeights, WorkerWeights

WORKERS = 2


@dataclass(frozen=True)
class Rule:
    """SGD with Nesterov's momentum, if there is any."""

    rate: float
    momentum: float = 0.0


RULES = {"digits": Rule(0.1), "lstm": Rule(1.0)}
"""Not as in ``benchmarks.convergence``: workers do not clip, so the LSTM has half the rate; and staleness acts like momentum, so digits
have none."""


@dataclass(frozen=True)
class Minibatch:
    """Of a worker, from 0 on. ``version``: waves of all workers in its values; ``finished``: minibatches of its own worker before it that
    are finished when it begins."""

    worker: int
    number: int
    begin_ns: float
    end_ns: float
    version: int
    finished: int


@dataclass(frozen=True)
class TaskBatches:
    """The same batches for all ways: samples drawn by step, half of them for each worker. See ``soap.elastic.worker.Batches``."""

    task: str
    seed: int

    def __len__(self) -> int:
        return 2**40

    def batch(self, indices: Sequence[int]) -> Sequence[Tensor]:
        """The part of one worker in one step."""
        step, worker = divmod(int(indices[0]), WORKERS)
        task = TASKS[self.task]
        known = task.data().train
        drawing = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        chosen = torch.randint(len(known[0]), (task.batch,), generator=drawing).chunk(WORKERS)[worker]
        return [tensor[chosen] for tensor in known]


class Replay:
    """Trains by given minibatches in one process. ``wave``: minibatches of a wave."""

    def __init__(self, module: nn.Module, rule: Rule, batches: TaskBatches, wave: int) -> None:
        self._module, self._rule, self._batches = module, rule, batches
        self._parameters = [own for own in module.parameters() if own.requires_grad]
        values = torch.cat([own.detach().reshape(-1) for own in self._parameters])
        self._global = GlobalWeights[Tensor](values, range(WORKERS))
        self._workers = [WorkerWeights[Tensor](wave, values) for _ in range(WORKERS)]
        self._wave, self._sums = wave, [torch.zeros_like(values) for _ in range(WORKERS)]
        self._ended: list[deque[Tensor]] = [deque() for _ in range(WORKERS)]
        self._velocity = [torch.zeros_like(values) for _ in range(WORKERS)]

    def losses(self, minibatches: Sequence[Minibatch]) -> list[float]:
        """In the order of the ends of all minibatches. Whoever begins later may know what has ended before."""
        found = {own: self._train(own) for own in sorted(minibatches, key=lambda own: (own.begin_ns, own.worker))}
        return [found[own] for own in sorted(minibatches, key=lambda own: (own.end_ns, own.worker))]

    def _train(self, own: Minibatch) -> float:
        weights, ended = self._workers[own.worker], self._ended[own.worker]
        while weights.finished_minibatches < own.finished:
            weights.finished(ended.popleft())
        if own.version > weights.version:
            weights.pull(self._global.at(own.version), own.version)
            self._global.forget(min(worker.version for worker in self._workers))
        loss, gradient = self._gradient(weights.values(), own)
        velocity, momentum = self._velocity[own.worker], self._rule.momentum
        if momentum:
            velocity.mul_(momentum).add_(gradient)
            gradient = gradient + momentum * velocity
        update = (-self._rule.rate / WORKERS) * gradient
        ended.append(update)
        wave, place = divmod(own.number, self._wave)
        self._sums[own.worker] = self._sums[own.worker] + update if place else update
        if place == self._wave - 1:  # at once: a version's values do not depend on when waves come
            self._global.push(own.worker, wave, self._sums[own.worker])
        return loss

    def _gradient(self, values: Tensor, own: Minibatch) -> tuple[float, Tensor]:
        with torch.no_grad():
            parts = torch.split(values, [parameter.numel() for parameter in self._parameters])
            for parameter, part in zip(self._parameters, parts, strict=True):
                parameter.copy_(part.view_as(parameter))
        loss = self._module(*self._batches.batch([own.number * WORKERS + own.worker]))
        found = torch.autograd.grad(loss, self._parameters)
        return float(loss.detach()), torch.cat([part.reshape(-1) for part in found])
