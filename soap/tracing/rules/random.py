"""Random numbers as a function of the element's global position, so that every tiling draws the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from soap.graph import DimMap
from soap.regions import Box
from soap.tracing.calls import Ref, substitute
from soap.tracing.rules.notation import Local, Maps, Scope, Tiled, View
from soap.tracing.rules.registry import pointwise, rule

NOTHING = DimMap(None, 0, 0, 0)
"""Of this dimension no element is read."""


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Torch's generators start from ``seed`` inside, and go on afterwards as if nothing had been drawn."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def _region(box: Box) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in box)


def keep_mask(local: Local, shape: Sequence[int], box: Box, probability: float, like: torch.Tensor) -> torch.Tensor:
    """The region ``box`` of a mask of 0 and 1/(1-p) over ``shape``, the same whatever region is asked for."""
    generator = torch.Generator().manual_seed(local.random_seed)
    uniform = torch.rand(tuple(shape), generator=generator)[_region(box)]
    keep = (uniform >= probability).to(like.dtype)
    return (keep if probability >= 1.0 else keep / (1.0 - probability)).to(like.device)


def run_dropout(local: Local) -> torch.Tensor:
    """Dropout of a region; whole channels at a time for feature dropout."""
    x, probability = local.tensors[0], float(local.get("p"))
    if probability == 0.0 or not local.get("train"):
        return x
    shape, box = local.output_shapes[0], local.output_boxes[0]
    if local.call.kind == "feature_dropout":
        shape, box = (*shape[:2], *(1,) * (len(shape) - 2)), (*box[:2], *((0, 1),) * (len(box) - 2))
    return x * keep_mask(local, shape, box, probability, x)


@rule("aten.dropout", "aten.feature_dropout")
def dropout(view: View) -> Tiled:
    """Pointwise with a mask of its own."""
    # The mask is kept for the backward pass, and torch's own keeps its input's product with it.
    elements = 1
    for size in view.output_shapes[0]:
        elements *= size
    return pointwise(view, run=run_dropout, saved_bytes=elements * view.itemsize)


def run_drawn(local: Local) -> torch.Tensor:
    """The local region of what the call draws for whole tensors."""
    like = local.tensors[0] if local.tensors else torch.empty(0)
    shapes = iter(local.shapes)
    with seeded(local.random_seed, torch.device("cpu")):
        blank = lambda leaf: torch.zeros(next(shapes), dtype=like.dtype) if isinstance(leaf, Ref) else leaf  # noqa: E731
        drawn: torch.Tensor = local.call.target(*substitute(local.call.args, blank), **substitute(dict(local.call.kwargs), blank))
    return drawn[_region(local.output_boxes[0])].to(like.device)


@rule(
    "aten.rand", "aten.randn", "aten.rand_like", "aten.randn_like", "aten.randint", "aten.randint_like", "aten.bernoulli.p", "aten.uniform",
    "aten.exponential", "aten.normal_functional",
)  # fmt: skip
def drawn(view: View) -> Tiled:
    """Numbers that depend on no operand's values, only on its shape: nothing of it is read."""
    scope = Scope()
    out = scope.like(view.output_shapes[0])
    nothing: list[Maps] = [(NOTHING,) * len(shape) for shape in view.shapes]
    return Tiled(tuple(scope.factors), tuple(nothing), (out,), light=True, run=run_drawn)
