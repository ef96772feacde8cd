"""Operator rules, by family. Importing this package registers them all."""

from __future__ import annotations

from soap.tracing.rules import (  # isort: skip
    attention, convolution, counting, index, linear, loss, norm, pointwise, pooling, random, recurrent, reduce, scatter_views, shape,
)  # fmt: skip
from soap.tracing.rules.registry import registered, tiled

__all__ = [
    "attention", "convolution", "counting", "index", "linear", "loss", "norm", "pointwise", "pooling", "random", "recurrent", "reduce",
    "registered", "scatter_views", "shape", "tiled",
]  # fmt: skip
