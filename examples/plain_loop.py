"""A plain PyTorch loop, and the same loop by a plan (docs/howto/training_loop.md). In the folder with ``model.pt2`` and ``strategy.json``:

    python -m examples.quickstart
    torchrun --nproc-per-node 2 -m examples.plain_loop
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
from torch import Tensor

import soap
from examples.quickstart import Classifier

Batch = tuple[Tensor, Tensor]


def batches(steps: int) -> Iterator[Batch]:
    """Whole batches, the same on every rank."""
    drawn = torch.Generator().manual_seed(0)
    for _ in range(steps):
        yield torch.randn(32, 64, generator=drawn), torch.randint(10, (32,), generator=drawn)


# --8<-- [start:before]
def plain(module: Classifier, steps: int) -> list[float]:
    """One process, as PyTorch has it."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.001)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
    losses = []
    for inputs, labels in batches(steps):
        loss = module(inputs, labels)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses


# --8<-- [end:before]


# --8<-- [start:after]
def planned(module: Classifier, steps: int, cluster: str = "local:2") -> list[float]:
    """One process per device. The module gets the trained values on rank 0."""
    model = soap.load("model.pt2")
    strategy = soap.load_strategy("strategy.json", model, cluster)
    plan = strategy, soap.load_cluster(cluster)
    losses = []
    with soap.Trainer(
        model,
        plan,
        optimizer=lambda tensors: torch.optim.AdamW(tensors, lr=0.001),
        schedule=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100),
        clip_norm=1.0,
    ) as trainer:
        trainer.load_state_dict(module.state_dict())  # else training begins with the values of model.pt2
        for inputs, labels in batches(steps):
            losses.append(trainer.step(inputs, labels))  # the loss of the whole batch, the same on all ranks
        if state := trainer.state_dict():  # called on all ranks; empty on all but rank 0
            module.load_state_dict(state)
    return losses


# --8<-- [end:after]


if __name__ == "__main__":
    torch.manual_seed(0)
    print(*(f"{loss:.4f}" for loss in planned(Classifier(), 10, *sys.argv[1:])))
