"""Backward passes whose gradients come from outside, and are freed as soon as they have been used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch

from soap.model.dtypes import part_of


class _Given(torch.autograd.Function):
    """A number that stands for outputs whose gradients are given. Autograd then has the only reference to these gradients, and frees
    each when it has been used. What is handed to ``backward`` itself stays until the end, and so do the outputs."""

    @staticmethod
    def forward(ctx: Any, gradients: list[torch.Tensor], *outputs: torch.Tensor) -> torch.Tensor:
        ctx.gradients = gradients
        return outputs[0].new_zeros((), dtype=part_of(outputs[0].dtype))  # autograd begins with real numbers only

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        given = (None, *ctx.gradients)
        ctx.gradients.clear()
        return given


def given(gradients: list[torch.Tensor], outputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """The number with which to begin a backward pass. ``gradients``: of the outputs, in their order; the list is emptied then."""
    return cast(torch.Tensor, _Given.apply(gradients, *outputs))  # type: ignore[no-untyped-call]
