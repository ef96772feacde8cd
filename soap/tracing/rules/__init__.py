"""Operator rules, by family. Importing this package registers them all."""

from __future__ import annotations

from soap.tracing.rules import (
    attention,
    complex,
    convolution,
    embedding,
    experts,
    index,
    linear,
    loss,
    norm,
    pad,
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
    "attention", "complex", "convolution", "embedding", "experts", "index", "linear", "loss",
    "norm", "pad", "pooling", "random", "recurrent", "reduce", "registered", "resample", "scatter", "shape", "state",
    "tiled",
]  # fmt: skip
