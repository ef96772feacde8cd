"""Which gradients autograd keeps as they were made, and which it copies.

The first gradient that reaches a leaf is taken as it is ("stolen") if nothing else refers to it, and if it lies in memory as the leaf does
(torch/csrc/autograd/functions/accumulate_grad.h). Else it is copied, and both are there for a moment. Ranks' leaves lie row by row, or are
views of something that does, for which autograd wants gradients that lie row by row: so what is stolen in a trial is stolen by ranks, as
long as gradients of results come as the results lie.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import torch

Found = tuple[int, torch.Tensor | None]
"""(place of an operand, the gradient of its region)."""


def stolen(found: Sequence[Found], places: Iterable[int], is_held: Callable[[torch.Tensor], bool]) -> frozenset[int]:
    """Those of these places whose gradient a leaf that lies row by row would steal. ``found``: all that one backward pass has made.
    ``is_held``: whether others hold a tensor's memory."""
    made = {place: gradient for place, gradient in found if gradient is not None and gradient.layout is torch.strided}
    uses = Counter(_memory(gradient) for gradient in made.values())
    return frozenset(
        place
        for place in places
        if place in made and uses[_memory(made[place])] == 1 and _lies_apart(made[place]) and not is_held(made[place])
    )


def _lies_apart(gradient: torch.Tensor) -> bool:
    """Whether a gradient lies row by row in memory of its own, and is what it seems: marks (of complex numbers) are resolved by a copy."""
    alone = gradient.untyped_storage().nbytes() == gradient.nbytes
    return alone and gradient.is_contiguous() and 0 not in gradient.stride() and not (gradient.is_conj() or gradient.is_neg())


def _memory(tensor: torch.Tensor) -> int:
    number: int = tensor.untyped_storage()._cdata
    return number
