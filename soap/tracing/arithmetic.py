"""In which type a call computes, if that is not plain from the types of an operator's tensors: what its price follows from.

Under autocast parameters are float32, and products compute in bfloat16. Float32 itself is rounded to TF32 on the tensor cores of GPUs: by
convolutions and recurrent layers unless ``torch.backends.cudnn.allow_tf32`` is off, by products of matrices if
``torch.set_float32_matmul_precision`` allows it. Where a device has no TF32, it computes in float32.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from soap.model.dtypes import TF32, is_differentiable, name_of
from soap.model.graph import PRODUCT_KINDS, is_rounded_by_default
from soap.tracing.autocast import Autocast
from soap.tracing.calls import Call, Value


def arithmetic_of(call: Call, values: Mapping[str, Value]) -> str:
    """The type by name; empty if no operand is a floating-point number."""
    if isinstance(call.target, Autocast):
        return name_of(call.target.dtype)
    dtype = next((values[name].dtype for name in call.operands if is_differentiable(values[name].dtype)), None)
    if dtype is torch.float32 and _rounds(call.kind):
        return TF32
    return "" if dtype is None else name_of(dtype)


def _rounds(kind: str) -> bool:
    if is_rounded_by_default(kind):
        return bool(torch.backends.cudnn.allow_tf32)
    return kind in PRODUCT_KINDS and torch.get_float32_matmul_precision() != "highest"
