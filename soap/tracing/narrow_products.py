"""Parts of sums of matrix products on GPUs: operands stay in their 16-bit type, what tensor cores add up in float32 is not rounded.

A part of a sum is made in float32, because it may be far larger than the sum. To multiply in float32 for that takes a GPU many times as
long as to multiply 16-bit operands: tensor cores add up in float32 anyway, and cuBLAS gives that out. CPUs have no such product; there
operands are widened (``types.wide``). The results are the same but for the order of additions: products of 16-bit numbers are exact in
float32. The gradient of a part is that of the rounded sum, in the type of the operands, so nothing is lost when it is narrowed again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from soap.tracing.rules.linear import added_to_bias, first_bias
from soap.tracing.rules.notation import Local
from soap.tracing.trial_device import is_on_gpu, stands_for_gpu
from soap.tracing.types import LOWER_TYPES


def can_stay_narrow(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether these are operands of one 16-bit type on a GPU."""
    return is_on_gpu(tensors[0]) and tensors[0].dtype in LOWER_TYPES and len({tensor.dtype for tensor in tensors}) == 1


def multiply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Product of two 16-bit matrices, or two batches of as many, in float32."""
    if stands_for_gpu():
        return a.new_empty((*a.shape[:-1], b.shape[-1]), dtype=torch.float32)
    return (torch.mm if a.dim() == 2 else torch.bmm)(a, b, out_dtype=torch.float32)


class _Product(torch.autograd.Function):
    """``multiply``, which autograd does not know."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(a, b)
        return multiply(a, b)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        a, b = ctx.saved_tensors
        narrow = gradient.to(a.dtype)
        return (
            narrow @ b.mT if ctx.needs_input_grad[0] else None,
            a.mT @ narrow if ctx.needs_input_grad[1] else None,
        )


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``a @ b`` of 16-bit tensors in float32, as ``torch.matmul`` broadcasts. Both have two dimensions at least."""
    if b.dim() == 2:
        found: torch.Tensor = _Product.apply(a.reshape(-1, a.shape[-1]), b)  # type: ignore[no-untyped-call]
        return found.view(*a.shape[:-1], b.shape[-1])
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])  # type: ignore[no-untyped-call]
    wide_a, wide_b = (own.expand(*batch, *own.shape[-2:]).reshape(-1, *own.shape[-2:]) for own in (a, b))
    found = _Product.apply(wide_a, wide_b)  # type: ignore[no-untyped-call]
    return found.view(*batch, a.shape[-2], b.shape[-1])


def _linear(local: Local) -> torch.Tensor:
    (x, weight), bias = local.tensors[:2], first_bias(local)
    found = product(x, weight.t())
    return found if bias is None else found + bias


def _matmul(local: Local) -> torch.Tensor | None:
    a, b = local.tensors
    return product(a, b) if min(a.dim(), b.dim()) > 1 else None


def _addmm(local: Local) -> torch.Tensor:
    _, a, b = local.tensors
    return added_to_bias(local, product(a, b))


PRODUCTS: Mapping[str, Callable[[Local], torch.Tensor | None]] = MappingProxyType(
    {"linear": _linear, "matmul": _matmul, "mm": _matmul, "bmm": _matmul, "addmm": _addmm, "baddbmm": _addmm}
)
"""By kind of call: a part of a sum from operands that ``can_stay_narrow``; None if it has to be widened after all."""
