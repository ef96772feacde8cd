"""Training with compressed gradients on four ranks, in one process, by the compressors alone: what a distributed run has to equal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from benchmarks.oracles.compression import Peers
from soap.model.regions import balanced
from soap.runtime.compression.peer import in_order
from soap.strategy.compression import Compression, Rgc
from tests.runtime.exact_modules import Batch, Trained
from tests.runtime.sparse_modules import Optimizer

LOSSY = Rgc(0.3, "exact")
RANKS, SAMPLES = 4, 6


def local_gradients(module: nn.Module, parts: Sequence[Batch]) -> tuple[float, list[dict[str, torch.Tensor]]]:
    """The loss of a step, and each rank's gradients, which carry its samples' share; micro-batches are added in their order."""
    named, total = dict(module.named_parameters()), 0.0
    found: list[dict[str, torch.Tensor]] = [{} for _ in range(RANKS)]
    for part in parts:
        for own, (start, stop) in zip(found, balanced(SAMPLES, RANKS), strict=True):
            loss = module(*(tensor[start:stop] for tensor in part)) * ((stop - start) / SAMPLES / len(parts))
            total += float(loss.detach())
            for name, gradient in zip(named, torch.autograd.grad(loss, list(named.values())), strict=True):
                own[name] = own[name] + gradient if name in own else gradient
    return total, found


def train_compressed(
    module: nn.Module, steps: Sequence[Sequence[Batch]], optimizer: Optimizer, how: Mapping[str, Compression] | None = None
) -> Trained:
    """``how``: by parameter; by default all but the table are compressed by ``LOSSY``."""
    named, losses = dict(module.named_parameters()), []
    chosen = {name: LOSSY for name in named if name != "words.weight"} if how is None else how
    peers = {name: Peers(own, named[name].shape, named[name].dtype, RANKS) for name, own in chosen.items()}
    updated = optimizer(list(named.values()))
    for parts in steps:
        loss, found = local_gradients(module, parts)
        for name, tensor in named.items():
            own = [gradients[name] for gradients in found]
            tensor.grad = peers[name].synchronize(own)[0] if name in peers else in_order(own)
        updated.step()
        losses.append(loss)
    return Trained(losses, {name: tensor.detach().clone() for name, tensor in module.state_dict().items()})
