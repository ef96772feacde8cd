"""A public zoo of kinds of models: a small one of each kind that people train. Importing this package fills ``KINDS``."""

from __future__ import annotations

from tests.tracing.kinds import (
    contrastive,
    experts,
    foreign,
    generative,
    graphs,
    in_place,
    inputs,
    layers,
    losses,
    sequences,
    spectra,
    state,
)
from tests.tracing.kinds.registry import KINDS, Built, Kind

__all__ = [
    "KINDS", "Built", "Kind", "contrastive", "experts", "foreign", "generative", "graphs", "in_place", "inputs", "layers", "losses",
    "sequences", "spectra", "state",
]  # fmt: skip
