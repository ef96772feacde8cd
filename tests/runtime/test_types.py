"""Models in float64, bfloat16 and float16 that torch.export recorded in float32, on one to four ranks: one process is the judge."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from soap.graph import OperatorGraph
from soap.presets import local_topology
from soap.strategies import CLASSICAL, random_strategy
from soap.strategy import Strategy
from soap.tracing.export import export_model
from tests.runtime.pool import Pool
from tests.runtime.traced import checked, traced

TOLERANCES = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 5e-2, "float16": 2e-2}


class Counted(nn.Module):
    """A balance loss: how often each class was chosen, made from ``torch.zeros`` and ``torch.ones``."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        counts = torch.zeros(3).scatter_add(0, chosen, torch.ones(8))
        return (self.layer(x).softmax(-1).mean(0) * counts).sum()


class Masked(nn.Module):
    """Causal attention with biases by distance, weights by position, and one-hot targets."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(4, 12), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        q, k, v = self.layer(x).unsqueeze(1).expand(-1, 5, -1).mul(torch.arange(5)[:, None] / 8 + 0.5).chunk(3, -1)
        mask = torch.triu(torch.full((5, 5), float("-inf")), diagonal=1) - torch.linspace(0, 1, 5)[:, None]
        y = self.head((q @ k.transpose(1, 2) * 0.5 + mask + torch.eye(5)).softmax(-1) @ v).mean(1)
        target = F.one_hot(chosen, 3).to(x.dtype) * torch.where(chosen > 1, 0.3, 0.7)[:, None]
        return (y - target).square().mean() + torch.scalar_tensor(0.1)


def plans(graph: OperatorGraph, randoms: int = 1) -> dict[str, Strategy]:
    """On one, two and four of four devices."""
    named = (("data_parallel", 1), ("megatron", 2), ("data_parallel", 4))
    found = {f"{name} {n}": CLASSICAL[name](graph, local_topology(n)) for name, n in named}
    return found | {f"random {i}": random_strategy(graph, local_topology(4), random.Random(i)) for i in range(randoms)}


def assert_checked(four: Pool, path: Path, dtype: str, randoms: int = 1) -> None:
    for name, strategy in plans(traced(str(path), dtype).graph, randoms).items():
        found = four.run(checked, str(path), dtype, strategy, local_topology(4))[0]
        assert found.worst.error < TOLERANCES[dtype], (dtype, name, found.worst)


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
@pytest.mark.parametrize("make", [Counted, Masked])
def test_constants_follow_the_type(four: Pool, tmp_path: Path, make: Callable[[], nn.Module], dtype: str) -> None:
    torch.manual_seed(0)
    path = tmp_path / "m.pt2"
    export_model(make(), (torch.randn(8, 4), torch.randint(3, (8,))), path=path)
    assert_checked(four, path, dtype)
