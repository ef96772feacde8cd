"""Products of rows with the matrix of the expert to which each row belongs: mixtures of experts. Each row names its expert, so a tile may
have any rows and any experts (``soap.tracing.rewriting`` brings programs into this form, ``soap.tracing.forms`` single calls). The product
is a registered operator of torch's kind, because how many rows an expert has is known only when it runs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import prod
from typing import Any

import torch

from soap.model.graph import DimMap
from soap.model.regions import lengths
from soap.tracing.rules.notation import Local, Scope, Tiled, View, blocks, einsum, rule

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


# Routed rows: those of one expert after those of another, in the order of their numbers


def routed_order(ids: torch.Tensor, first: int, last: int) -> torch.Tensor:
    """Places of the rows of experts ``first`` to ``last - 1``, one expert after another, in their order inside each."""
    found = torch.nonzero((ids >= first) & (ids < last)).flatten()
    return found[torch.argsort(ids[found], stable=True)]


def dispatch(rows: torch.Tensor, ids: torch.Tensor, *, experts: int, unit: int) -> torch.Tensor:
    """Routed rows: each row of an expert, once, behind those of experts before it."""
    return rows.index_select(0, routed_order(ids, 0, experts))


def expert_rows(table: torch.Tensor, ids: torch.Tensor, *, unit: int) -> torch.Tensor:
    """For each routed row, the row of its expert in a table."""
    return table.index_select(0, ids.index_select(0, routed_order(ids, 0, len(table))))


def expert_product(rows: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, *, unit: int) -> torch.Tensor:
    """The product of each routed row with its expert's matrix."""
    return _product(rows, weight, ids, 0)


def hand_over(rows: torch.Tensor, ids: torch.Tensor, *, unit: int) -> torch.Tensor:
    """The routed rows as they are. Where several devices split each expert's matrices, each receives a part of the rows from afar, and they
    give each other the rest; on the way back each adds up a part, and sends it."""
    return rows.view_as(rows)


def combine(rows: torch.Tensor, ids: torch.Tensor, *, unit: int) -> torch.Tensor:
    """Routed rows of all experts at the places of the samples that they are of; zero if an id belongs to no expert."""
    out = rows.new_zeros(ids.shape[0], *rows.shape[1:])
    return out.index_copy(0, routed_order(ids, 0, torch.iinfo(ids.dtype).max), rows)


def _product(rows: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, first: int) -> torch.Tensor:
    own = ids.index_select(0, routed_order(ids, first, first + len(weight)))
    out: torch.Tensor = expert_mm(rows, weight, own - first if first else own)
    return out


def _dispatch(local: Local) -> torch.Tensor:
    rows, ids = local.tensors
    experts, *_ = shape = lengths(local.output_boxes[0])
    if is_evenly_routed(ids):
        return rows.index_select(0, ids[: shape[0] * shape[1]]).view(shape)
    first = local.output_boxes[0][0][0]
    return rows.index_select(0, routed_order(ids, first, first + experts))


def _expert_rows(local: Local) -> torch.Tensor:
    table, ids = local.tensors
    first = local.boxes[0][0][0]
    if is_evenly_routed(ids):
        return table.unsqueeze(1).expand(local.output_lengths).contiguous()
    return table.index_select(0, ids.index_select(0, routed_order(ids, first, first + len(table))) - first)


def _expert_product(local: Local) -> torch.Tensor:
    rows, weight, ids = local.tensors
    return torch.bmm(rows, weight) if rows.dim() == 3 else _product(rows, weight, ids, local.boxes[1][0][0])


def _combine(local: Local) -> torch.Tensor:
    rows, ids = local.tensors
    if rows.dim() == 3:  # as many rows of each expert
        return rows.flatten(0, 1).index_select(0, ids)
    return combine(rows, ids, unit=1)


def is_evenly_routed(ids: torch.Tensor) -> bool:
    """Whether these stand for numbers that nobody knows: then every expert has equally many rows, in three dimensions."""
    return ids.is_meta or isinstance(ids, torch._subclasses.FakeTensor)


@rule("soap.dispatch")
def dispatched(view: View) -> Tiled:
    """Rows of all experts follow the samples, in units of which each expert has as many rows; any experts may be left out."""
    (rows, width), (experts, _, _) = view.shapes[0], view.output_shapes[0]
    scope, unit = Scope(), view.get("unit")
    s, e, k = scope.factor("s", rows // unit), scope.factor("e", experts), scope.factor("k", width)
    samples = blocks(s, unit)
    operands = ((samples, k), (samples,))
    return Tiled(tuple(scope.factors), operands, ((e, blocks(s, unit // experts), k),), run=_dispatch, saved_bytes=8 * rows)


@rule("soap.expert_rows")
def rows_of_table(view: View) -> Tiled:
    """Rows and columns are free."""
    (experts, width), (rows,) = view.shapes
    scope, unit = Scope(), view.get("unit")
    s, e, n = scope.factor("s", rows // unit), scope.factor("e", experts), scope.factor("n", width)
    out = (e, blocks(s, unit // experts), n)
    return Tiled(tuple(scope.factors), ((e, n), (blocks(s, unit),)), (out,), run=_expert_rows, saved_bytes=8 * rows)


@rule("soap.expert_product")
def routed_product(view: View) -> Tiled:
    """Rows, experts and columns are free; what each row has is summed over."""
    (experts, _, inner), (_, _, width), (rows,) = view.shapes
    scope, unit = Scope(), view.get("unit")
    s, e, k, n = (scope.factor(*own) for own in (("s", rows // unit), ("e", experts), ("k", inner), ("n", width)))
    of_expert, summed = blocks(s, unit // experts), () if k.factor is None else (k.factor,)
    operands = ((e, of_expert, k), (e, k, n), (blocks(s, unit),))
    flops = 2 * rows * inner * width
    return Tiled(
        tuple(scope.factors), operands, ((e, of_expert, n),), summed=summed, run=_expert_product, flops=flops, saved_bytes=8 * rows
    )


@rule("soap.hand_over")
def handed_over(view: View) -> Tiled:
    """All is free."""
    (experts, _, width), (rows,) = view.shapes
    scope, unit = Scope(), view.get("unit")
    s, e, k = scope.factor("s", rows // unit), scope.factor("e", experts), scope.factor("k", width)
    whole = (e, blocks(s, unit // experts), k)
    return Tiled(tuple(scope.factors), (whole, (blocks(s, unit),)), (whole,), run=lambda local: local.tensors[0].view_as(local.tensors[0]))


@rule("soap.combine")
def combined(view: View) -> Tiled:
    """Rows of samples need those of all experts."""
    (experts, _, width), (rows,) = view.shapes
    scope, unit = Scope(), view.get("unit")
    s, n = scope.factor("s", rows // unit), scope.factor("n", width)
    operands = ((DimMap(), blocks(s, unit // experts), n), (blocks(s, unit),))
    return Tiled(tuple(scope.factors), operands, ((blocks(s, unit), n),), run=_combine, saved_bytes=8 * rows)
