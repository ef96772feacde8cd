"""Which gradients autograd keeps as they were made, and which it copies.

The first gradient that reaches a leaf is taken as it is ("stolen") if nothing else refers to it, and if it lies in memory as the leaf does
(torch/csrc/autograd/functions/accumulate_grad.h). Else it is copied, and both are there for a moment. Leaves of parameters lie row by row,
or are views of something that does, for which autograd wants gradients that lie row by row; of leaves of what tiles have made it is known
which do. So what is stolen in a trial is stolen by ranks, as long as gradients of results come as the results lie.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import torch

FEW = 50
"""Numbers that are repeated at least so often are few."""

Found = tuple[int, torch.Tensor | None]
"""(place of an operand, the gradient of its region)."""


def stolen(found: Sequence[Found], is_held: Callable[[torch.Tensor], bool]) -> frozenset[int]:
    """The places whose gradient a leaf that lies row by row would steal. ``found``: all that one backward pass has made. ``is_held``:
    whether others hold a tensor's memory."""
    made = {place: gradient for place, gradient in found if gradient is not None and gradient.layout is torch.strided}
    uses = Counter(_memory(gradient) for gradient in made.values())
    return frozenset(
        place
        for place, gradient in made.items()
        if uses[_memory(gradient)] == 1 and _lies_apart(gradient) and not is_held(gradient)
    )


def spread(found: Sequence[Found]) -> frozenset[int]:
    """The places whose gradients are a few numbers that are repeated: that of a mean is one number for all that it is of."""
    made = ((place, gradient) for place, gradient in found if gradient is not None and gradient.layout is torch.strided)
    return frozenset(place for place, gradient in made if FEW * gradient.untyped_storage().nbytes() <= gradient.nbytes)


def _lies_apart(gradient: torch.Tensor) -> bool:
    """Whether a gradient lies row by row in memory of its own, and is what it seems: marks (of complex numbers) are resolved by a copy."""
    alone = gradient.untyped_storage().nbytes() == gradient.nbytes
    return alone and gradient.is_contiguous() and 0 not in gradient.stride() and not (gradient.is_conj() or gradient.is_neg())


def _memory(tensor: torch.Tensor) -> int:
    number: int = tensor.untyped_storage()._cdata
    return number
