"""Regions of tensors: cut out, and put together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch

from soap.model.regions import Box, lengths, relative


class _Assemble(torch.autograd.Function):
    """Assemble disjoint pieces that cover a box into one tensor; the gradient is cut into the same pieces."""

    @staticmethod
    def forward(ctx: Any, box: Box, boxes: Sequence[Box], *pieces: torch.Tensor) -> torch.Tensor:
        ctx.box, ctx.boxes = box, boxes
        whole = pieces[0].new_empty(lengths(box))
        for own, piece in zip(boxes, pieces, strict=True):
            whole[relative(own, box)] = piece
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        needed = ctx.needs_input_grad[2:]
        parts = [gradients[0][relative(own, ctx.box)] if need else None for own, need in zip(ctx.boxes, needed, strict=True)]
        return (None, None, *parts)


def assemble(box: Box, boxes: Sequence[Box], pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    """One tensor for ``box`` from pieces with the boxes ``boxes``; differentiable. A single piece that is the box is returned as it is."""
    if len(boxes) == 1 and boxes[0] == box:
        return pieces[0]
    return cast(torch.Tensor, _Assemble.apply(box, tuple(boxes), *pieces))  # type: ignore[no-untyped-call]


def cut(tensor: torch.Tensor, held: Box, box: Box) -> torch.Tensor:
    """The part ``box`` of a tensor that holds ``held``: a view, or the tensor itself."""
    return tensor if box == held else tensor[relative(box, held)]
