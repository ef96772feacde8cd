"""Dropout: random numbers as a function of the element's global position, so that every tiling draws the same."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from soap.regions import Box
from soap.tracing.rules.notation import Local, Tiled, View
from soap.tracing.rules.registry import pointwise, rule


def keep_mask(local: Local, shape: Sequence[int], box: Box, probability: float, like: torch.Tensor) -> torch.Tensor:
    """The region ``box`` of a mask of 0 and 1/(1-p) over ``shape``, the same whatever region is asked for."""
    generator = torch.Generator().manual_seed(local.random_seed)
    uniform = torch.rand(tuple(shape), generator=generator)[tuple(slice(a, b) for a, b in box)]
    keep = (uniform >= probability).to(like.dtype)
    return (keep if probability >= 1.0 else keep / (1.0 - probability)).to(like.device)


def _run_dropout(local: Local) -> torch.Tensor:
    x, probability = local.tensors[0], float(local.get("p"))
    if probability == 0.0 or not local.get("train"):
        return x
    return x * keep_mask(local, local.output_shapes[0], local.output_boxes[0], probability, x)


@rule("aten.dropout", "aten.dropout_")
def dropout(view: View) -> Tiled:
    """Pointwise with a mask of its own."""
    return pointwise(view, run=_run_dropout)
