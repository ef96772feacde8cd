"""What ranks run to train by a schedule's CSV file with torch.distributed.pipelining, instead of our runtime."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime
from torch.distributed.pipelining.stage import PipelineStage

WIDTH = 3


def layers(chunks: int) -> list[torch.nn.Module]:
    """A model of so many chunks, the same on every rank."""
    torch.manual_seed(0)
    return [torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh()).double() for _ in range(chunks)]


def batch(microbatches: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two samples for each micro-batch, and what the model should make of them."""
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(2 * microbatches, WIDTH, dtype=torch.float64, generator=generator) for _ in range(2))  # type: ignore[return-value]


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A sum, so that those of micro-batches add up to the batch's."""
    return ((output - target) ** 2).sum()


def gradients_of(modules: Sequence[torch.nn.Module]) -> list[list[torch.Tensor]]:
    """By module and parameter."""
    return [[parameter.grad for parameter in module.parameters() if parameter.grad is not None] for module in modules]


def trained_by(path: str, placement: Sequence[int], microbatches: int) -> dict[int, list[torch.Tensor]]:
    """Gradients of this rank's chunks after a step by the file."""
    rank, stages = dist.get_rank(), dist.get_world_size()
    modules = layers(len(placement))
    own = [chunk for chunk, home in enumerate(placement) if home == rank]
    torch_stages = [PipelineStage(modules[chunk], chunk, len(placement), torch.device("cpu")) for chunk in own]
    assert stages == max(placement) + 1
    schedule = _PipelineScheduleRuntime(torch_stages, microbatches, loss_fn=loss, scale_grads=False)
    schedule._load_csv(path)
    inputs, target = batch(microbatches)
    schedule.step(*([inputs] if placement[0] == rank else []), target=target if placement[-1] == rank else None)
    return dict(zip(own, gradients_of([modules[chunk] for chunk in own]), strict=True))
