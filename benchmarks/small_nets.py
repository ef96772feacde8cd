"""Nets so small that their best strategy can be found for certain."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import soap
from soap.model.graph import OperatorGraph


class LeNet(nn.Module):
    """LeNet-5 (LeCun et al. 1998) with rectifiers and maximum pooling: two convolutions with pooling, three linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 6, 5, padding=2), nn.Conv2d(6, 16, 5)
        self.fc1, self.fc2, self.fc3 = nn.Linear(400, 120), nn.Linear(120, 84), nn.Linear(84, 10)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """Mean cross-entropy."""
        hidden = F.max_pool2d(F.relu(self.conv1(images)), 2)
        hidden = F.max_pool2d(F.relu(self.conv2(hidden)), 2).flatten(1)
        return F.cross_entropy(self.fc3(F.relu(self.fc2(F.relu(self.fc1(hidden))))), labels)


@cache
def lenet(batch: int = 64) -> OperatorGraph:
    """Its operators."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "lenet.pt2"
        soap.export(LeNet(), (torch.zeros(batch, 1, 28, 28), torch.zeros(batch, dtype=torch.int64)), path=path)
        return soap.load(path, plan_only=True).graph


@cache
def rnnlm() -> OperatorGraph:
    """A language model of two LSTM layers, unrolled in chunks."""
    return soap.load("zoo:rnnlm:tiny", plan_only=True).graph
