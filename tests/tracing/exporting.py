"""What tests of exports against eager PyTorch share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from soap.tracing.execute import TracedModel

Exports = Callable[..., TracedModel]


def mean_square(output: Tensor) -> Tensor:
    return output.square().mean()


class Applied(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.function.apply(x)
        return result


def around(middle: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), middle, nn.Linear(6, 3))


X = torch.linspace(-1, 1, 32).reshape(8, 4)
