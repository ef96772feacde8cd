"""Operator rules, by family. Importing this package registers them all."""

from __future__ import annotations

from soap.tracing.rules import attention, convolution, linear, loss, norm, random, recurrent, reduce, shape
from soap.tracing.rules.registry import registered, tiled

__all__ = ["attention", "convolution", "linear", "loss", "norm", "random", "recurrent", "reduce", "registered", "shape", "tiled"]
