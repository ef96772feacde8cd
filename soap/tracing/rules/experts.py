"""Products of rows with the matrix of the expert to which each row belongs: mixtures of experts. Each row names its expert, so a tile may
have any rows and any experts (``soap.tracing.rewriting`` brings programs into this form, ``soap.tracing.forms`` single calls). The product
is a registered operator of torch's kind, because how many rows an expert has is known only when it runs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import prod
from typing import Any

import torch

from soap.tracing.rules.notation import Local, Tiled, View, einsum, rule

LIBRARY_OPERATORS = {"transformers.grouped_mm_fallback": "soap.grouped_mm"}
"""Operators that other libraries register when they are imported -> the operator here that means the same, with the same arguments: files
that call them are read without these libraries (``soap.tracing.load``)."""

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


Rows = slice | torch.Tensor
"""Consecutive rows, or their numbers."""


class _Groups:
    """The rows of each expert. Processors read and write them expert by expert, where they are: an expert's rows stay in the cache
    meanwhile. On GPUs a launch costs more than that, so all rows are brought together by expert first, and back at the end."""

    def __init__(self, ids: torch.Tensor, experts: int) -> None:
        bounded = ids.clamp(-1, experts)
        together = bool((bounded[1:] >= bounded[:-1]).all())
        order = None if together else torch.argsort(bounded, stable=True)
        self._moved: torch.Tensor | None = order if ids.is_cuda else None
        places = None if ids.is_cuda else order
        counts = torch.bincount(bounded + 1, minlength=experts + 2).tolist()
        ends = list(accumulate(counts))
        spans = [slice(end - count, end) for end, count in zip(ends, counts, strict=True)]
        parts: list[Rows] = [span if places is None else places[span] for span in spans]
        before, *own, behind = parts
        self.of_expert: dict[int, Rows] = {expert: rows for expert, rows in enumerate(own) if counts[expert + 1]}
        """Of every expert that has rows."""
        self.outside: tuple[Rows, Rows] = (before, behind)
        """Rows of no expert."""
        self.idle = [expert for expert in range(experts) if expert not in self.of_expert]

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor of which ``of_expert`` says the rows."""
        return tensor if self._moved is None else tensor.index_select(0, self._moved)  # copies row by row, unlike an index

    def back(self, tensor: torch.Tensor) -> torch.Tensor:
        """Such a tensor's rows where they were at first."""
        return tensor if self._moved is None else tensor.index_select(0, torch.argsort(self._moved))


def _expert_mm(input: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    groups = _Groups(ids, weight.shape[0])
    rows, out = groups.of(input), input.new_empty(input.shape[0], weight.shape[2])
    for expert, own in groups.of_expert.items():
        _multiply(out, own, _read(rows, own), weight[expert])
    return groups.back(_without(groups, out))


def _expert_mm_backward(
    grad: torch.Tensor, input: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, needed: Sequence[bool]
) -> tuple[torch.Tensor, torch.Tensor]:
    groups = _Groups(ids, weight.shape[0])
    grads, rows = groups.of(grad), groups.of(input) if needed[1] else input
    by_input = input.new_empty(input.shape if needed[0] else 0)
    by_weight = torch.empty_like(weight) if needed[1] else weight.new_empty(0)  # laid out as the weight: a transposed one is not copied
    for expert, own in groups.of_expert.items():
        part = _read(grads, own)
        if needed[0]:
            _multiply(by_input, own, part, weight[expert].T)
        if needed[1]:
            torch.mm(_read(rows, own).T, part, out=by_weight[expert])
    for expert in groups.idle if needed[1] else ():
        by_weight[expert] = 0
    return (groups.back(_without(groups, by_input)) if needed[0] else by_input), by_weight


def _read(tensor: torch.Tensor, rows: Rows) -> torch.Tensor:
    return tensor[rows] if isinstance(rows, slice) else tensor.index_select(0, rows)


def _multiply(out: torch.Tensor, rows: Rows, left: torch.Tensor, right: torch.Tensor) -> None:
    """``out[rows] = left @ right``."""
    if isinstance(rows, slice):
        torch.mm(left, right, out=out[rows])
    else:
        out.index_copy_(0, rows, torch.mm(left, right))


def _without(groups: _Groups, out: torch.Tensor) -> torch.Tensor:
    """The same tensor, zero where rows belong to no expert."""
    for rows in groups.outside:
        out[rows] = 0
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
