"""Operator rules, by family. Importing this package registers them all."""

from __future__ import annotations

from soap.tracing.rules import (
    attention,
    complex,
    embedding,
    experts,
    index,
    linear,
    loss,
    norm,
    random,
    recurrent,
    reduce,
    resample,
    shape,
    state,
    windows,
)
from soap.tracing.rules.notation import registered, tiled

__all__ = [
    "attention", "complex", "embedding", "experts", "index", "linear", "loss", "norm", "random", "recurrent", "reduce", "registered",
    "resample", "shape", "state", "tiled", "windows",
]  # fmt: skip
