"""What training with servers and workers is planned to be: who computes what, who owns what, and how far workers may be apart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from soap.strategy.consistency import Consistency


@dataclass(frozen=True)
class TableCut:
    """A table is cut along ``axis`` (0: rows, 1: columns). ``servers``: by partition, its position in ``ElasticPlan.servers``."""

    axis: int
    servers: tuple[int, ...]


@dataclass(frozen=True)
class ElasticPlan:
    """``workers``, ``servers``: by number, the device that each runs on. A device may be both (the *fully connected* cluster); in a
    *bipartite* one none is. ``dense``: positions in ``servers`` of those who own the dense variables, a piece each. ``batch``: samples of
    a lease; a step of all workers has ``batch * len(workers)``."""

    workers: tuple[int, ...]
    servers: tuple[int, ...]
    tables: Mapping[str, TableCut]
    dense: tuple[int, ...]
    batch: int
    consistency: Consistency
