"""Operator rules, by family. Importing this package registers them all."""

from __future__ import annotations

from soap.tracing.rules import (
    along,
    attention,
    complex,
    convolution,
    embedding,
    experts,
    fourier,
    index,
    linear,
    loss,
    norm,
    pad,
    pointwise,
    pooling,
    random,
    recurrent,
    reduce,
    resample,
    scatter,
    shape,
    state,
)
from soap.tracing.rules.registry import registered, tiled

__all__ = [
    "along", "attention", "complex", "convolution", "embedding", "experts", "fourier", "index", "linear", "loss",
    "norm", "pad", "pointwise", "pooling", "random", "recurrent", "reduce", "registered", "resample", "scatter", "shape", "state",
    "tiled",
]  # fmt: skip
