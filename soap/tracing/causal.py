"""Causal masks that programs compute: attention that is given one is told ``is_causal`` instead.

Libraries build the mask from ranges and comparisons, or keep it as a buffer; ``transformers`` does so whenever a model is exported, where
its eager modules say ``is_causal``. What depends on constants alone is evaluated, and replaced if it is the lower triangle, exactly.
A mask that depends on inputs (padding), or that is another one (windows, prefixes), stays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import torch

from soap.tracing.calls import Call, Program, Ref, argument, with_argument
from soap.tracing.fold import is_computable, needed, results_of

LARGEST = 2**28
"""Elements of the largest value that is evaluated to know a mask: 16,384 words, for which each call takes 256 MiB for a moment."""


def find_causal_masks(program: Program) -> None:
    """Replace the masks of attention that are causal by ``is_causal``, in place, and drop calls that made nothing else."""
    masks = _Masks(program)
    changed = False
    for position, call in enumerate(program.calls):
        mask = argument(call, "attn_mask") if call.kind == "scaled_dot_product_attention" else None
        if isinstance(mask, Ref) and not argument(call, "is_causal") and masks.is_causal(mask.name, _scores(program, call)):
            program.calls[position] = with_argument(with_argument(call, "attn_mask", None), "is_causal", True)
            changed = True
    if changed:
        program.calls = needed(program.calls, {program.loss, *program.kept})


def _scores(program: Program, call: Call) -> tuple[int, int]:
    """(queries, keys) of a call."""
    query, key = (program.values[argument(call, name).name].shape for name in ("query", "key"))
    return query[-2], key[-2]


@dataclass
class _Masks:
    """What masks of a program are. ``found``: by the mask's name and the numbers of queries and keys."""

    program: Program
    found: dict[tuple[str, tuple[int, int]], bool] = field(default_factory=dict)

    def is_causal(self, name: str, scores: tuple[int, int]) -> bool:
        """Whether a mask lets each of as many queries as keys see the keys up to its own, and says nothing else."""
        if (name, scores) not in self.found:
            self.found[name, scores] = self._can_be(name, scores) and self._is_triangle(name, scores[0])
        return self.found[name, scores]

    def _can_be(self, name: str, scores: tuple[int, int]) -> bool:
        value, (queries, keys) = self.program.values[name], scores
        is_mask = value.dtype is torch.bool or value.dtype.is_floating_point
        return is_mask and queries == keys and tuple(value.shape[-2:]) == scores

    def _is_triangle(self, name: str, size: int) -> bool:
        mask = self._evaluated(name)
        if mask is None or _is_empty(mask):  # programs that were exported on the meta device ask for ranges there
            return False
        for dim in range(mask.dim() - 2):
            mask = mask.narrow(dim, 0, 1) if mask.stride(dim) == 0 else mask  # copies of one mask
        if mask.dtype.is_floating_point:  # it is added to the scores
            seen = mask == 0.0
            if not bool((seen | (mask == float("-inf"))).all()):
                return False
            mask = seen
        return torch.equal(mask, torch.ones(size, size, dtype=torch.bool).tril().expand_as(mask))

    def _evaluated(self, name: str) -> torch.Tensor | None:
        """A value; None if it depends on inputs, on random numbers or on tensors without values, or takes too much to know."""
        program = self.program
        calls = needed(program.calls, {name})
        made = {output for call in calls for output in call.outputs}
        read = {operand for call in calls for operand in call.operands} | {name}
        known = {leaf: program.constants[leaf] for leaf in read - made if leaf in program.constants}
        if read - made - known.keys() or any(_is_empty(tensor) for tensor in known.values()):
            return None
        if not all(map(is_computable, calls)) or any(map(self._is_large, calls)):
            return None
        try:
            return _run(calls, known)[name]
        except RuntimeError:  # folding says which call it is
            return None

    def _is_large(self, call: Call) -> bool:
        """Whether a call takes much memory; ``expand`` takes none."""
        sizes = (prod(self.program.values[output].shape) for output in call.outputs)
        return call.kind != "expand" and any(size > LARGEST for size in sizes)


def _is_empty(tensor: torch.Tensor) -> bool:
    return tensor.is_meta or isinstance(tensor, torch._subclasses.FakeTensor)


def _run(calls: Sequence[Call], known: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    values = dict(known)
    for call in calls:
        values.update(zip(call.outputs, results_of(call, values), strict=True))
    return values
