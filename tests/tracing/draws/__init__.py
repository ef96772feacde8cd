"""Random calls for every registered rule, by family. Importing this package fills ``drawing.DRAWS``."""

from __future__ import annotations

from tests.tracing.draws import complex, elementwise, layers, losses, moves, picks, products, reductions, state, windows

__all__ = ["complex", "elementwise", "layers", "losses", "moves", "picks", "products", "reductions", "state", "windows"]
