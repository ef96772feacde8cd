"""The same training step in one process: runs the whole exported program, call by call, from the state that the ranks had."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from soap.model.dtypes import replaced
from soap.runtime.trainer import Trainer
from soap.tracing.model import TileContext, TracedModel


@dataclass(frozen=True)
class Alone:
    """What one process computed: the mean loss, gradients (clipped, if the trainer clips) and buffers by name."""

    loss: torch.Tensor
    gradients: Mapping[str, torch.Tensor]
    buffers: Mapping[str, torch.Tensor]


def step_alone(
    trainer: Trainer, step: int, inputs: Sequence[torch.Tensor], before: Mapping[str, torch.Tensor], *, wide: bool = False
) -> Alone | None:
    """Run one step's forward and backward pass in this process, from the state ``before``. Called after the ranks' own step; needs no other
    rank.

    ``wide``: compute in float64, whatever the trainer computes in. Returns None if the model cannot be traced again for that.
    """
    parts = trainer.sizes.batches(inputs)
    sized = [trainer.sizes.of(part.shapes) for part in parts]
    models: list[TracedModel | None] = [s.model.widened() if wide else s.model for s in sized]
    graph = trainer.model.graph

    def own(tensor: torch.Tensor) -> torch.Tensor:
        placed = trainer.place(tensor)
        return placed.to(replaced(placed.dtype, torch.float64)) if wide else placed

    parameters = {n: own(before[n]).clone().requires_grad_(graph.tensors[n].requires_grad) for n in trainer.model.parameters}
    trainable = {name: tensor for name, tensor in parameters.items() if tensor.requires_grad}
    buffers = {name: own(before[name]).clone() for name in trainer.model.buffers}
    losses, scale = [], 1.0 if trainer.scaler is None else trainer.scaler.used
    for number, (part, size, model) in enumerate(zip(parts, sized, models, strict=True)):
        if model is None:
            return None
        context = TileContext(trainer.seed, step * trainer.accumulate + number, buffers, tiles=size.all_tiles)
        loss = model.reference_loss([own(tensor) for tensor in part.tensors], parameters, context)
        model.end_step(context)
        if loss.requires_grad:
            (loss / len(parts) * scale).backward()  # type: ignore[no-untyped-call]
        losses.append(loss.detach())
    for tensor in trainable.values():
        if tensor.grad is not None and tensor.grad.is_sparse:  # of an embedding with sparse=True; the ranks' gradients are dense
            tensor.grad = tensor.grad.to_dense()
    for tensor in trainable.values():
        if trainer.scaler is not None and tensor.grad is not None:
            tensor.grad.mul_(1.0 / scale)
    if trainer.clip_norm is not None:
        torch.nn.utils.clip_grad_norm_(trainable.values(), trainer.clip_norm)
    gradients = {name: tensor.grad for name, tensor in trainable.items() if tensor.grad is not None}
    return Alone(torch.stack(losses).double().mean(), gradients, buffers)
