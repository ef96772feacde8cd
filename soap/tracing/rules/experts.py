"""Products of rows with the matrix of the expert to which each row belongs: mixtures of experts.

Libraries sort the rows by expert and pass the ends of each expert's rows (``aten._grouped_mm``, ``transformers::grouped_mm_fallback``).
Here each row names its expert instead. So a tile may have any rows and any experts, and rows of one sample stay together
(``soap.tracing.experts`` brings programs into this form, ``soap.tracing.forms`` single calls). The product is a registered operator of
torch's kind, because how many rows an expert has is known only when it runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import torch

from soap.tracing.rules.notation import Local, Tiled, View, einsum
from soap.tracing.rules.registry import rule

LIBRARY_OPERATORS = {"transformers.grouped_mm_fallback": "soap.grouped_mm"}
"""Operators that other libraries register when they are imported -> the operator here that means the same, with the same arguments: files
that call them are read without these libraries (``soap.tracing.archive``)."""

_LIBRARY: Any = torch.library.Library("soap", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("expert_mm(Tensor input, Tensor weight, Tensor ids) -> Tensor")
_LIBRARY.define("expert_outer(Tensor input, Tensor grad, Tensor ids, int experts) -> Tensor")
_LIBRARY.define("grouped_mm(Tensor input, Tensor weight, Tensor offs) -> Tensor")

expert_mm: Any = torch.ops.soap.expert_mm.default
"""``out[r] = input[r] @ weight[ids[r]]`` of rows (S, k), matrices (E, k, n) and ids (S,); zero if an id belongs to no expert."""
expert_outer: Any = torch.ops.soap.expert_outer.default
"""``out[e] = sum over rows r of e: input[r]^T grad[r]``: the gradient of ``weight`` above, (E, k, n)."""
grouped_mm: Any = torch.ops.soap.grouped_mm.default
"""The same product for rows that lie one expert after another: those of expert e end before row ``offs[e]``."""


def rows_of_experts(offs: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The expert of each of these rows, where those of expert e end before row ``offs[e]``; the number of experts behind the last."""
    return torch.searchsorted(offs, rows.to(offs.dtype), right=True)


class _Groups:
    """Rows brought together by expert. If they are in that order already they stay where they are."""

    def __init__(self, ids: torch.Tensor, experts: int) -> None:
        bounded = ids.clamp(-1, experts)
        together = bool((bounded[1:] >= bounded[:-1]).all())
        self._order = None if together else torch.argsort(bounded, stable=True)
        self._counts = torch.bincount(bounded + 1, minlength=experts + 2).tolist()

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sorted rows, by expert."""
        return tensor if self._order is None else tensor[self._order]

    def back(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sorted rows, put back where they were before."""
        return tensor if self._order is None else torch.empty_like(tensor).index_copy_(0, self._order, tensor)

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        """(expert, first row, last row + 1) of every expert that has rows."""
        begin = self._counts[0]  # ids below zero
        for expert, count in enumerate(self._counts[1:-1]):
            if count:
                yield expert, begin, begin + count
            begin += count


def _expert_mm(input: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    groups = _Groups(ids, weight.shape[0])
    rows = groups.of(input)
    out = input.new_zeros(input.shape[0], weight.shape[2])
    for expert, start, stop in groups:
        torch.mm(rows[start:stop], weight[expert], out=out[start:stop])
    return groups.back(out)


def _expert_outer(input: torch.Tensor, grad: torch.Tensor, ids: torch.Tensor, experts: int) -> torch.Tensor:
    groups = _Groups(ids, experts)
    rows, grads = groups.of(input), groups.of(grad)
    out = input.new_zeros(experts, input.shape[1], grad.shape[1])
    for expert, start, stop in groups:
        torch.mm(rows[start:stop].T, grads[start:stop], out=out[expert])
    return out


def _grouped_mm(input: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = expert_mm(input, weight, rows_of_experts(offs, torch.arange(input.shape[0], device=offs.device)))
    return made


def _keep(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    input, weight, ids = ctx.saved_tensors
    by_input = expert_mm(grad, weight.mT, ids) if ctx.needs_input_grad[0] else None
    by_weight = expert_outer(input, grad, ids, weight.shape[0]) if ctx.needs_input_grad[1] else None
    return by_input, by_weight, None


for _name, _kernel in (("expert_mm", _expert_mm), ("expert_outer", _expert_outer)):
    _LIBRARY.impl(_name, _kernel, "CompositeExplicitAutograd")
_LIBRARY.impl("grouped_mm", _grouped_mm, "CompositeImplicitAutograd")
torch.library.register_fake("soap::expert_mm", lambda x, weight, ids: x.new_empty(x.shape[0], weight.shape[2]), lib=_LIBRARY)
torch.library.register_fake(
    "soap::expert_outer", lambda x, grad, ids, experts: x.new_empty(experts, x.shape[1], grad.shape[1]), lib=_LIBRARY
)
torch.library.register_autograd("soap::expert_mm", _backward, setup_context=_keep, lib=_LIBRARY)


def _run(local: Local) -> torch.Tensor:
    x, weight, ids = local.tensors
    first = local.boxes[1][0][0]
    out: torch.Tensor = expert_mm(x, weight, ids - first if first else ids)
    return out


@rule("soap.expert_mm")
def experts(view: View) -> Tiled:
    """Rows s are samples or an attribute, n is a parameter; e (experts) and k are sums: rows of other tiles' experts give zero here."""
    saved = 16 * view.shapes[2][0] + 2 * view.itemsize * prod(view.shapes[0])
    flops = 2 * prod(view.output_shapes[0]) * view.shapes[0][1]
    return einsum(view, "s k, e k n, s -> s n", run=_run, flops=flops, saved_bytes=saved)
