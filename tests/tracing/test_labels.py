"""Which parameters are also read without a gradient."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from soap.tracing.export import export_model
from soap.tracing.load import load_model


class Reading(nn.Module):
    """``how``: takes the input and the weight, and gives what the loss is made of."""

    def __init__(self, how: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.weight, self.how = nn.Parameter(torch.randn(4, 4)), how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.how(F.linear(x, self.weight), self.weight).square().mean()


@pytest.mark.parametrize(
    ("apart", "how"),
    [
        (False, lambda y, w: y),
        (False, lambda y, w: y @ w.t()),
        (False, lambda y, w: y + y.detach()),
        (False, lambda y, w: y * (w + 1).detach()[0]),  # of what was made of it
        (True, lambda y, w: y @ w.detach()),
        (True, lambda y, w: y @ w.t().detach()),
        (True, lambda y, w: y * w.view(2, 8)[:, :4].reshape(-1)[:4].detach()),
        (True, lambda y, w: torch.where(w[0] > 0, y, -y)),
        (True, lambda y, w: y * w[0].argmax()),
    ],
)
def test_who_reads_a_parameter_without_a_gradient(
    tmp_path: Path, apart: bool, how: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> None:
    export_model(Reading(how), (torch.randn(3, 4),), path=tmp_path / "model.pt2")
    model = load_model(tmp_path / "model.pt2")
    assert model.read_apart == ({"weight"} if apart else set())
