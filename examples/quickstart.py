"""From a PyTorch module to a strategy, as docs/quickstart.md has it.

    python -m examples.quickstart
"""

from __future__ import annotations

import sys

# --8<-- [start:model]
import torch
from torch import Tensor, nn

import soap


class Classifier(nn.Module):
    """A module whose ``forward`` returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 4096), nn.ReLU(), nn.Linear(4096, 10))

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Mean cross-entropy of a batch: inputs (samples, 64), labels (samples)."""
        return nn.functional.cross_entropy(self.layers(inputs), labels)


def export() -> None:
    """Write ``model.pt2``: the module's training step on batches of this shape."""
    soap.export(Classifier(), (torch.randn(32, 64), torch.randint(10, (32,))), path="model.pt2")


# --8<-- [end:model]


# --8<-- [start:search]
def search(cluster: str = "local:2") -> None:
    """Find the fastest strategy, say how it compares, and write ``strategy.json``."""
    found = soap.find("model.pt2", cluster, soap.SearchOptions(budget=500))
    print(f"predicted: {found.time_ns / 1e6:.3f} ms an iteration, {found.speedup:.2f} times as fast as data parallelism")
    found.save("strategy.json")


# --8<-- [end:search]


if __name__ == "__main__":
    export()
    search(*sys.argv[1:])
