"""Operator rules, by family. Importing this package registers them all."""

from __future__ import annotations

from soap.tracing.rules import attention, convolution, index, linear, loss, norm, pointwise, pooling, random, recurrent, reduce, shape
from soap.tracing.rules.registry import registered, tiled

__all__ = [
    "attention", "convolution", "index", "linear", "loss", "norm", "pointwise", "pooling", "random", "recurrent", "reduce", "registered",
    "shape", "tiled",
]  # fmt: skip
