"""Gradients of all kinds, and one rank or several that compress them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from benchmarks.oracles.compression import Peers
from soap.strategy.compression import Bf16, Chunked, Compression, Int8, PowerSgd, Rgc, RgcAsq

DENSITY = 0.02
METHODS: dict[str, tuple[Compression, ...]] = {
    "rgc": (
        *(Rgc(DENSITY, selection) for selection in ("exact", "trimmed", "search", "sampled")),
        Rgc(DENSITY, "search", ragged=True),
    ),
    "rgc+asq": (
        *(RgcAsq(DENSITY, selection, ef) for selection in ("exact", "trimmed", "search") for ef in (False, True)),
        RgcAsq(DENSITY, "search", ragged=True),
    ),
    "chunked": (Chunked(DENSITY), Chunked(DENSITY, "bf16"), Chunked(DENSITY, "bf16", 1.0), Chunked(0.5, "2bit", 1.0)),
    "powersgd": (PowerSgd(1), PowerSgd(3)),
    "bf16": (Bf16(),),
    "int8": (Int8(),),
}
"""Settings of every method that the conformance suite goes through."""
SETTINGS = [own for settings in METHODS.values() for own in settings]
SHAPES: tuple[tuple[int, ...], ...] = ((40, 70), (3, 2, 5), (9000,), (1,), (), (0,), (0, 3), (5000, 3))
TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
def gradient(shape: Sequence[int], dtype: torch.dtype, seed: int, kind: str = "normal") -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if kind == "zeros":
        return torch.zeros(tuple(shape), dtype=dtype)
    if kind == "ties":
        return torch.randint(-2, 3, tuple(shape), generator=generator).to(dtype)
    if kind == "equal":
        return torch.full(tuple(shape), 0.5, dtype=dtype)
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float64).to(dtype)


def gradients(shape: Sequence[int], dtype: torch.dtype, ranks: int, step: int, kind: str = "normal") -> list[torch.Tensor]:
    return [gradient(shape, dtype, 100 * step + rank, kind) for rank in range(ranks)]


def residuals(peers: Peers) -> list[torch.Tensor]:
    """A copy of each rank's residual; zeros if the method keeps none."""
    found = []
    for compressor, state in ((peer.compressor(), peer.state) for peer in peers.ranks):
        kept = state.summed.get("residual")
        found.append(torch.zeros(compressor.layout.elements, dtype=compressor.kept_dtype) if kept is None else kept.clone())
    return found
