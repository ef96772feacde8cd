"""A trainer's parameters and buffers in full, gathered on rank 0."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from soap.runtime.sync.shards import gather_regions

if TYPE_CHECKING:
    from soap.runtime.trainer import Trainer


def whole_parameters(trainer: Trainer) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Each parameter in full, one after the other, on rank 0 (None elsewhere); gone through on all ranks at once."""
    shards: dict[str, list[int]] = {}
    for number, shard in enumerate(trainer.plan.shards):
        shards.setdefault(shard.parameter, []).append(number)
    for name, tensor in trainer.model.parameters.items():
        full: dict[str, torch.Tensor] = {}
        if trainer.rank == 0 and tensor.is_meta:
            full[name] = torch.empty(tensor.shape, dtype=trainer.dtype_of(name), device=home_of(trainer, name))
        elif trainer.rank == 0:  # files of weights may have another type
            full[name] = trainer.own_copy(tensor.detach()).to(tensor.device, trainer.dtype_of(name))
        gather_regions(trainer.comm, trainer.plan, trainer.shards.tensors, shards.get(name, ()), full)
        yield name, full.get(name)


def whole_buffers(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Full buffers by name, on rank 0. Tiles change only their own region of their rank's copy, so each element is taken from a rank
    that has changed it. State is the same on all ranks."""
    full: dict[str, torch.Tensor] = {}
    kept = set(trainer.model.state.values())
    for tag, (name, own) in enumerate(trainer.buffers.items()):
        if name in kept:
            full[name] = own.clone()
            continue
        if trainer.rank != 0:
            trainer.comm.send(own, 0, tag)
            continue
        merged, first = own.clone(), trainer.first_buffers[name]
        for source in range(1, trainer.world.size):
            other = trainer.comm.receive(torch.empty_like(own), source, tag).wait()
            merged = torch.where(merged == first, other, merged)
        full[name] = merged
    trainer.comm.finish_sends()
    return full


def home_of(trainer: Trainer, name: str) -> torch.device:
    """Where a parameter in full is put together: where the model has it."""
    own = trainer.model.parameters[name]
    return torch.device("cpu") if own.is_meta else own.device
