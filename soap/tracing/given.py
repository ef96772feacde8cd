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


class _Stand(torch.autograd.Function):
    """A number that stands for one output. What it is worth is known when the backward pass begins."""

    @staticmethod
    def forward(ctx: Any, answers: list[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
        ctx.answers = answers
        return output.new_zeros((), dtype=part_of(output.dtype))

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, ctx.answers.pop()


class Awaited:
    """An output that is answered by a gradient later, and need not be there until then. ``stand``: what ``given`` takes in its place."""

    def __init__(self, output: torch.Tensor) -> None:
        self.dtype = output.dtype
        self._answers: list[torch.Tensor] = []
        self.stand = cast(torch.Tensor, _Stand.apply(self._answers, output))  # type: ignore[no-untyped-call]

    def answer(self, gradient: torch.Tensor, passes: int = 1) -> torch.Tensor:
        """Give the output's gradient, for so many backward passes; returns that of ``stand``."""
        self._answers.extend([gradient] * passes)
        return torch.ones_like(self.stand)


def given(gradients: list[torch.Tensor], outputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """The number with which to begin a backward pass. ``gradients``: of the outputs, in their order; the list is emptied then."""
    return cast(torch.Tensor, _Given.apply(gradients, *outputs))  # type: ignore[no-untyped-call]
