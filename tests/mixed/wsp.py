"""Wave synchronous training in plain loops, of starts that a real run has told: what the run must have computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from soap.mixed.run.stage import Start
from soap.tracing.calls import TileContext
from soap.tracing.execute import TracedModel

Values = dict[str, Tensor]


@dataclass
class Emulation:
    """One process. ``starts``: by worker, of each minibatch. ``batches``: by worker and minibatch (from 1). ``rates``: learning rate of
    minibatch p."""

    model: TracedModel
    starts: Sequence[Sequence[Start]]
    batches: Mapping[tuple[int, int], Sequence[Tensor]]
    wave: int
    rates: Mapping[int, float]
    momentum: float = 0.0
    decay: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        self.losses: dict[tuple[int, int], float] = {}
        self._updates: dict[tuple[int, int], Values] = {}
        self._versions: dict[int, Values] = {}
        self._velocity: dict[tuple[int, int], Values] = {}
        self._buffers = [{name: own.clone() for name, own in self.model.buffers.items()} for _ in self.starts]
        self.names = [tensor.name for tensor in self.model.graph.parameters if tensor.requires_grad]

    def update(self, worker: int, minibatch: int) -> Values:
        """Of one minibatch."""
        if (worker, minibatch) not in self._updates:
            self._updates[worker, minibatch] = self._update(worker, minibatch)
        return self._updates[worker, minibatch]

    def version(self, version: int) -> Values:
        """The servers' values with so many waves."""
        if version not in self._versions:
            self._versions[version] = self._version(version)
        return self._versions[version]

    def start(self, worker: int, minibatch: int) -> Values:
        """The values with which a minibatch begins."""
        told = self.starts[worker][minibatch - 1]
        values = dict(self.version(told.version))
        for own in range(told.version * self.wave + 1, told.finished + 1):
            values = {name: values[name] + self.update(worker, own)[name] for name in self.names}
        return values

    def final(self) -> Values:
        """When all have pushed all."""
        return self.version(-(-max(map(len, self.starts)) // self.wave))

    def buffers(self, worker: int) -> Values:
        """Batch norm's, when all is done."""
        return self._buffers[worker]

    def _version(self, version: int) -> Values:
        if version == 0:
            return {name: self.model.parameters[name].detach() for name in self.names}
        values = dict(self.version(version - 1))
        for name in self.names:
            change = torch.zeros_like(values[name])
            for worker, own in enumerate(self.starts):
                for minibatch in range((version - 1) * self.wave + 1, min(version * self.wave, len(own)) + 1):
                    change = change + self.update(worker, minibatch)[name]
            values[name] = values[name] + change
        return values

    def _update(self, worker: int, minibatch: int) -> Values:
        if minibatch > 1:
            self.update(worker, minibatch - 1)
        values = self.start(worker, minibatch)
        leaves = {name: values[name].clone().requires_grad_() for name in self.names}
        context = TileContext(seed=self.seed, step=(minibatch - 1) * len(self.starts) + worker, buffers=self._buffers[worker])
        loss = self.model.reference_loss(self.batches[worker, minibatch], {**self.model.parameters, **leaves}, context)
        self.model.end_step(context)
        self.losses[worker, minibatch] = float(loss.detach())
        gradients = torch.autograd.grad(loss, list(leaves.values()))
        found = {}
        for name, gradient in zip(leaves, gradients, strict=True):
            pulled = gradient + self.decay * values[name] if self.decay else gradient
            if self.momentum:
                before = self._velocity.get((worker, minibatch - 1))
                pulled = pulled if before is None else self.momentum * before[name] + pulled
                self._velocity.setdefault((worker, minibatch), {})[name] = pulled
            found[name] = (-self.rates[minibatch] / len(self.starts)) * pulled
        return found
