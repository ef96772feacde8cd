"""Products of rows with the matrix of the expert to which each row belongs: mixtures of experts.

Libraries sort the rows by expert and pass the ends of each expert's rows (``aten._grouped_mm``, ``transformers::grouped_mm_fallback``).
Here each row names its expert instead. So a tile may have any rows and any experts, and rows of one sample stay together
(``soap.tracing.experts`` brings programs into this form, ``soap.tracing.forms`` single calls). The product is a registered operator of
torch's kind, because how many rows an expert has is known only when it runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
_LIBRARY.define("expert_mm_backward(Tensor grad, Tensor input, Tensor weight, Tensor ids, bool[2] needed) -> (Tensor, Tensor)")
_LIBRARY.define("grouped_mm(Tensor input, Tensor weight, Tensor offs) -> Tensor")

expert_mm: Any = torch.ops.soap.expert_mm.default
"""``out[r] = input[r] @ weight[ids[r]]`` of rows (S, k), matrices (E, k, n) and ids (S,); zero if an id belongs to no expert."""
expert_mm_backward: Any = torch.ops.soap.expert_mm_backward.default
"""Its gradients by ``input``, and by ``weight``: ``out[e] = sum over rows r of e: input[r]^T grad[r]``. One that is not needed is empty.
Both at once, because sorting the rows takes as long as some of the products."""
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
        return tensor if self._order is None else tensor.index_select(0, self._order)  # copies row by row, unlike an index

    def back(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sorted rows, put back where they were before."""
        return tensor if self._order is None else tensor.index_select(0, torch.argsort(self._order))

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        """(expert, first row, last row + 1) of every expert that has rows."""
        begin = self._counts[0]  # ids below zero
        for expert, count in enumerate(self._counts[1:-1]):
            if count:
                yield expert, begin, begin + count
            begin += count

    @property
    def outside(self) -> tuple[slice, slice]:
        """The sorted rows that belong to no expert: at the beginning, and at the end."""
        return slice(0, self._counts[0]), slice(sum(self._counts[:-1]), None)

    @property
    def idle(self) -> list[int]:
        """Experts without rows."""
        return [expert for expert, count in enumerate(self._counts[1:-1]) if not count]


def _expert_mm(input: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    groups = _Groups(ids, weight.shape[0])
    return groups.back(_products(groups, groups.of(input), weight))


def _expert_mm_backward(
    grad: torch.Tensor, input: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, needed: Sequence[bool]
) -> tuple[torch.Tensor, torch.Tensor]:
    groups = _Groups(ids, weight.shape[0])
    grads = groups.of(grad)
    by_input = groups.back(_products(groups, grads, weight.mT)) if needed[0] else input.new_empty(0)
    by_weight = _outer_products(groups, groups.of(input), grads, weight) if needed[1] else weight.new_empty(0)
    return by_input, by_weight


def _products(groups: _Groups, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Sorted rows times their experts' matrices."""
    out = rows.new_empty(rows.shape[0], weight.shape[2])
    for expert, start, stop in groups:
        torch.mm(rows[start:stop], weight[expert], out=out[start:stop])
    for part in groups.outside:
        out[part] = 0
    return out


def _outer_products(groups: _Groups, rows: torch.Tensor, grads: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(weight)  # laid out as the weight: the gradient of a transposed parameter need not be copied
    for expert, start, stop in groups:
        torch.mm(rows[start:stop].T, grads[start:stop], out=out[expert])
    for expert in groups.idle:
        out[expert] = 0
    return out


def _grouped_mm(input: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = expert_mm(input, weight, rows_of_experts(offs, torch.arange(input.shape[0], device=offs.device)))
    return made


def _keep(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    input, weight, ids = ctx.saved_tensors
    needed = ctx.needs_input_grad[:2]
    found = expert_mm_backward(grad, input, weight, ids, needed)
    return (*(own if needs else None for own, needs in zip(found, needed, strict=True)), None)


for _name, _kernel in (("expert_mm", _expert_mm), ("expert_mm_backward", _expert_mm_backward)):
    _LIBRARY.impl(_name, _kernel, "CompositeExplicitAutograd")
_LIBRARY.impl("grouped_mm", _grouped_mm, "CompositeImplicitAutograd")
torch.library.register_fake("soap::expert_mm", lambda x, weight, ids: x.new_empty(x.shape[0], weight.shape[2]), lib=_LIBRARY)
torch.library.register_fake(
    "soap::expert_mm_backward",
    lambda grad, input, weight, ids, needed: (
        input.new_empty(input.shape if needed[0] else 0),
        weight.new_empty(weight.shape if needed[1] else 0),
    ),
    lib=_LIBRARY,
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
