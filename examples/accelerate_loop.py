"""A loop with Hugging Face's accelerate, whose steps are trained by a plan (docs/howto/hugging_face.md). Needs accelerate.

    torchrun --nproc-per-node 2 -m examples.accelerate_loop --output trained.pt
"""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import soap
from examples.quickstart import Classifier


def samples(count: int = 128) -> TensorDataset:
    """Drawn, in the same order on all ranks."""
    drawn = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(count, 64, generator=drawn), torch.randint(10, (count,), generator=drawn))


# --8<-- [start:loop]
def train(module: Classifier, batch: int, epochs: int, config: soap.RunnerConfig) -> tuple[list[float], dict[str, Tensor]]:
    """The loss of each step, the same on all ranks, and the trained values, on rank 0. ``batch``: samples for each rank."""
    accelerator = Accelerator(cpu=True)  # it joins the ranks, and gives each its part of the data
    loader = accelerator.prepare(DataLoader(samples(), batch_size=batch, drop_last=True))
    losses = []
    with soap.get_runner(module, config=config) as runner:  # in the place of a prepared model and optimizer
        for _ in range(epochs):
            for own in loader:
                losses.append(runner.run(own))
        state = runner.state_dict()
    accelerator.end_training()
    return losses, state


# --8<-- [end:loop]


def planning() -> soap.RunnerConfig:
    """How the plan trains."""
    return soap.RunnerConfig(optimizer=lambda tensors: torch.optim.AdamW(tensors, lr=0.001))


def main() -> None:
    """Train, and write losses and values as torch reads them."""
    parser = argparse.ArgumentParser(description="Train a small classifier in a loop with accelerate, by a plan.")
    parser.add_argument("--output", default="trained.pt", help="where losses and values go (default %(default)s)")
    parser.add_argument("--epochs", type=int, default=2, help="how often all samples pass (default %(default)s)")
    given = parser.parse_args()
    torch.manual_seed(0)
    losses, state = train(Classifier(), 16, given.epochs, planning())
    if state:
        torch.save({"losses": losses, "state": state}, given.output)


if __name__ == "__main__":
    main()
