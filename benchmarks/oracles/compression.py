"""Training with compressed gradients on N ranks, in one process: its losses are those of a distributed run that compresses alike.

A rank's gradients are those of its samples, each weighing as much as in the whole batch; so samples may not be coupled (by batch norm over
the batch, say): a ``module`` in which they are trains here as N processes would that do not synchronize statistics.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from soap.errors import RuntimeFailure
from soap.plan.compression.policy import LEAST_BYTES, Layer, chosen
from soap.runtime.compression.dgc import Momentum, WarmUp, clip_locally, clipped
from soap.runtime.compression.peer import AS_IT_IS, CompressedTraining, Peer, in_order, synchronized
from soap.runtime.compression.seam import State
from soap.strategy.compression import Compression

Loss = Callable[[nn.Module, Sequence[torch.Tensor]], torch.Tensor]
"""(module, a part of the batch) -> the mean loss of its samples."""
OptimizerFactory = Callable[[list[torch.Tensor]], torch.optim.Optimizer]


class Peers:
    """All ranks of one parameter. They do what ``Peer`` does on real ranks."""

    def __init__(
        self, compression: Compression, shape: Sequence[int], dtype: torch.dtype, peers: int, training: CompressedTraining = AS_IT_IS
    ) -> None:
        self.ranks = [Peer(compression, shape, dtype, place, peers, training) for place in range(peers)]

    def synchronize(self, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The sum that each rank gets for the ranks' gradients."""
        return synchronized(self.ranks, gradients)

    @property
    def states(self) -> list[State]:
        """What each rank keeps."""
        return [peer.state for peer in self.ranks]

    @states.setter
    def states(self, states: Sequence[State]) -> None:
        for peer, state in zip(self.ranks, states, strict=True):
            peer.state = state


@dataclass(frozen=True, slots=True)
class Training:
    """How parameters are updated: SGD with DGC's additions, or any ``optimizer``, which then gets the summed gradients (a heuristic).

    ``clip_norm``: of the sum; ranks clip locally if anything is compressed. RuntimeFailure if momentum or weight decay are given beside an
    optimizer, which has its own.
    """

    learning_rate: float = 0.1
    momentum: Momentum | None = None
    weight_decay: float = 0.0
    clip_norm: float | None = None
    warm_up: WarmUp = WarmUp()  # noqa: RUF009 - it cannot be changed
    optimizer: OptimizerFactory | None = None

    def __post_init__(self) -> None:
        if self.optimizer is not None and (self.momentum is not None or self.weight_decay):
            raise RuntimeFailure("momentum or weight_decay beside an optimizer; expected one or the other: give them to the optimizer")


class Emulation:
    """A module that is trained by several ranks. ``compressions``: parameter's name -> how it is compressed; others are not. ``per_host``:
    so many ranks, one after the other, add up their gradients first, and compress their sum as one peer; the last host may have fewer."""

    def __init__(
        self,
        module: nn.Module,
        loss: Loss,
        compressions: Mapping[str, Compression | None],
        ranks: int,
        training: Training,
        per_host: int = 1,
    ) -> None:
        self.module, self.training, self.ranks, self.steps = module, training, ranks, 0
        self._hosts = [range(first, min(first + per_host, ranks)) for first in range(0, ranks, per_host)]
        self._loss = loss
        self.parameters = {name: tensor for name, tensor in module.named_parameters() if tensor.requires_grad}
        if unknown := [name for name in compressions if name not in self.parameters]:
            known = ", ".join(self.parameters)
            raise RuntimeFailure(f"compression for {unknown[0]!r}, which the module does not train; expected one of {known}")
        self.compressions = {name: own for name, own in compressions.items() if own is not None}
        common = CompressedTraining(training.momentum, training.warm_up)
        self.peers = {
            name: Peers(own, self.parameters[name].shape, self.parameters[name].dtype, len(self._hosts), common)
            for name, own in self.compressions.items()
        }
        self.momenta: dict[str, torch.Tensor] = {}
        self.decay_momenta: dict[str, torch.Tensor] = {}
        self._optimizer = None if training.optimizer is None else training.optimizer(list(self.parameters.values()))

    def step(self, parts: Sequence[Sequence[torch.Tensor]]) -> float:
        """One step. ``parts``: each rank's part of the batch, samples along the first dimension. Returns the batch's mean loss."""
        loss, gradients = self._gradients(parts)
        totals = self.totals(gradients)
        with torch.no_grad():
            self._update(totals)
        self.steps += 1
        return loss

    def totals(self, gradients: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """The sum that reaches every rank, for each rank's local gradients."""
        norm = self.training.clip_norm
        gradients = [{name: in_order([gradients[rank][name] for rank in host]) for name in self.parameters} for host in self._hosts]
        if norm is not None and self.compressions:
            gradients = [dict(zip(own, clip_locally(list(own.values()), norm, len(gradients)), strict=True)) for own in gradients]
        found = {name: self._total(name, [own[name] for own in gradients]) for name in self.parameters}
        if norm is not None and not self.compressions:
            found = dict(zip(found, clipped(list(found.values()), norm), strict=True))
        return found

    def _gradients(self, parts: Sequence[Sequence[torch.Tensor]]) -> tuple[float, list[dict[str, torch.Tensor]]]:
        if len(parts) != self.ranks:
            raise RuntimeFailure(f"{len(parts)} parts of a batch; expected one for each of {self.ranks} ranks")
        samples, total, gradients = sum(len(part[0]) for part in parts), 0.0, []
        for part in parts:
            loss = self._loss(self.module, part) * (len(part[0]) / samples)
            own = torch.autograd.grad(loss, list(self.parameters.values()), allow_unused=True, materialize_grads=True)
            total += float(loss.detach())
            gradients.append(dict(zip(self.parameters, own, strict=True)))
        return total, gradients

    def _total(self, name: str, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """Compressed: of gradients with local momentum; dense: of gradients, which ``_update`` gives momentum."""
        return self.peers[name].synchronize(gradients)[0] if name in self.peers else in_order(gradients)

    def _update(self, totals: Mapping[str, torch.Tensor]) -> None:
        if self._optimizer is not None:
            for name, parameter in self.parameters.items():
                parameter.grad = totals[name]
            self._optimizer.step()
            return
        for name, parameter in self.parameters.items():
            parameter.sub_(self.training.learning_rate * self._with_momentum(name, parameter, totals[name]))

    def _with_momentum(self, name: str, parameter: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        rule, decay = self.training.momentum, self.training.weight_decay
        if name not in self.peers:
            total = total + decay * parameter
            if rule is None:
                return total
            kept = self.momenta.setdefault(name, torch.zeros_like(parameter))
            kept.mul_(rule.factor).add_(total)
            return total + rule.factor * kept if rule.nesterov else kept
        if not decay:
            return total
        total = total + decay * parameter
        if rule is None:
            return total
        return total + rule.decayed(self.decay_momenta.setdefault(name, torch.zeros_like(parameter)), parameter, decay)


def layers_of(module: nn.Module) -> dict[str, Layer]:
    """Parameter's name -> what it is: by the module that it belongs to. The output layer is the last linear one, and whatever shares its
    weight (a tied encoder)."""
    linear = [own for own in module.modules() if isinstance(own, nn.Linear)]
    output = {id(tensor) for tensor in linear[-1].parameters()} if linear else set()
    convolutions = {id(tensor) for own in module.modules() if isinstance(own, nn.modules.conv._ConvNd) for tensor in own.parameters()}
    found = {}
    for name, tensor in module.named_parameters():
        kind = "output" if id(tensor) in output else "convolution" if id(tensor) in convolutions else "hidden"
        found[name] = Layer(kind, tuple(tensor.shape), tensor.element_size())  # type: ignore[arg-type]
    return found


def by_policy(module: nn.Module, compression: Compression, least_bytes: int = LEAST_BYTES) -> dict[str, Compression | None]:
    """Parameter's name -> how it is compressed by a method under the policy, see ``soap.plan.compression.policy``."""
    return {name: chosen(compression, layer, least_bytes) for name, layer in layers_of(module).items()}
