"""What a program does not record: backward code in Python, hooks, operators of other libraries."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.autograd_functions import Reverse
from tests.tracing.kinds.registry import Built, Lossy, kind, labels


class Rounded(torch.autograd.Function):
    """Gradients pass straight through rounding."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g


class Square(torch.autograd.Function):
    """Gradients as torch would find them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0] * g


def _around(function: Any) -> Built:
    module = Lossy(lambda m, x, y: F.cross_entropy(m.head(function(m.net(x) * 2)), y), net=nn.Linear(5, 6), head=nn.Linear(6, 3))
    return Built(module, (torch.randn(8, 5), labels(3, 8)))


@kind(refused="Reverse")
def gradient_reversal() -> Built:
    """Domain adaptation."""
    return _around(Reverse.apply)


@kind(refused="Rounded")
def straight_through_function() -> Built:
    """Quantisation-aware training."""
    return _around(Rounded.apply)


@kind()
def function_with_true_gradients() -> Built:
    """A function that only saves memory trains as it is."""
    return _around(Square.apply)


@kind(refused="hook")
def hooked_parameter() -> Built:
    """Gradients of some rows are masked by a hook."""
    built = _around(torch.tanh)
    mask = (torch.arange(6) % 2).float()[:, None]
    built.module.net.weight.register_hook(lambda g: g * mask)
    return built


@kind(refused="hook")
def hooked_activation() -> Built:
    """An activation's gradient is scaled by a hook."""

    def scaled(x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(lambda g: g * 0.1)
        return torch.tanh(x)

    return _around(scaled)


@kind(refused="hook")
def hooked_module() -> Built:
    """A module's gradient is scaled by a full backward hook."""
    built = _around(torch.tanh)
    built.module.head.register_full_backward_hook(lambda module, given, out: tuple(None if g is None else g * 0.5 for g in given))
    return built
