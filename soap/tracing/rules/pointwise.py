"""Pointwise calls that lack ATen's ``pointwise`` tag, and those that broadcast in a way of their own."""

from __future__ import annotations

from math import prod

import torch
import torch.nn.functional as F

from soap.model.graph import WHOLE
from soap.tracing.rules.notation import Local, Scope, Tiled, View
from soap.tracing.rules.registry import pointwise, rule

rule(
    "aten.__and__", "aten.__or__", "aten.__xor__", "aten.hardswish", "aten.log_sigmoid", "aten.where", "aten.fill", "aten.zero",
    "aten.multiply", "aten.subtract", "aten.divide", "aten.negative", "aten.absolute", "aten.fix",
    "aten.greater", "aten.less", "aten.greater_equal", "aten.less_equal", "aten.not_equal", "aten.isclose", "aten.isreal",
    "aten.arccos", "aten.arcsin", "aten.arctan", "aten.arccosh", "aten.arcsinh", "aten.arctanh", "aten.arctan2",
    "aten.special_expit", "aten.special_logit", "aten.special_erf", "aten.special_erfc", "aten.special_exp2", "aten.special_expm1",
    "aten.special_log1p", "aten.special_gammaln", "aten.special_digamma", "aten.special_ndtr", "aten.special_sinc", "aten.special_xlogy",
    "aten.special_i0", "aten.special_psi", "aten.special_multigammaln", "aten.special_polygamma", "aten.special_round",
    "aten.special_gammainc", "aten.special_gammaincc", "aten.floor_divide", "aten.rsub",
)(pointwise)  # fmt: skip


def _run_prelu(local: Local) -> torch.Tensor:
    return F.prelu(local.tensors[0], local.tensors[1])


@rule("aten.prelu")
def prelu(view: View) -> Tiled:
    """Pointwise with one slope, or one per channel (dimension 1)."""
    shape = view.shapes[0]
    scope = Scope()
    maps = scope.like(shape)
    slopes = view.shapes[1]
    slope = (maps[1],) if len(shape) > 1 and slopes == (shape[1],) else (WHOLE,) * len(slopes)
    return Tiled(tuple(scope.factors), (maps, slope), (maps,), run=_run_prelu, flops=2 * prod(shape))
