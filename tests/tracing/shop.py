"""Custom operators as a library defines them; tests import it where they want them known."""

from __future__ import annotations

from typing import Any

import torch


@torch.library.custom_op("soapshop::scaled", mutates_args=())
def scaled(x: torch.Tensor, by: float) -> torch.Tensor:
    """With a gradient of its own."""
    return x * by


@scaled.register_fake
def _(x: torch.Tensor, by: float) -> torch.Tensor:
    return torch.empty_like(x)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.by = inputs[1]


def _gradient(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
    return gradient * ctx.by, None


scaled.register_autograd(_gradient, setup_context=_keep)


@torch.library.custom_op("soapshop::reversed", mutates_args=())
def reversed_gradient(x: torch.Tensor) -> torch.Tensor:
    """A gradient reversal: what ``soap.export`` advises instead of ``torch.autograd.Function``."""
    return x.clone()


@reversed_gradient.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


reversed_gradient.register_autograd(lambda ctx, gradient: -0.5 * gradient)

LIBRARY = torch.library.Library("soapshop2", "DEF")
"""In the older way, of parts that autograd knows."""
LIBRARY.define("doubled(Tensor x) -> Tensor")
LIBRARY.impl("doubled", lambda x: torch.empty_like(x), "Meta")
LIBRARY.impl("doubled", lambda x: 2 * x, "CPU")


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            result: torch.Tensor = torch.ops.soapshop2.doubled(x)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return 2 * gradient


LIBRARY.impl("doubled", lambda x: _Doubled.apply(x), "Autograd")
