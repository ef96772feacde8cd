"""Small programs, by family. Importing this package fills ``CASES``."""

from __future__ import annotations

from tests.tracing.cases import elementwise, layers, losses, picks, products, reductions, shapes, windows
from tests.tracing.cases.layers import RECURRENT
from tests.tracing.cases.probe import CASES, Case, Probe, made, weighed

__all__ = [
    "CASES", "RECURRENT", "Case", "Probe", "elementwise", "layers", "losses", "made", "picks", "products", "reductions", "shapes",
    "weighed", "windows",
]  # fmt: skip
