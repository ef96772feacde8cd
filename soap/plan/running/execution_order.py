"""The order in which tiles run on all devices together. Pure data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ExecutionOrder:
    """Tiles (positions in ``Plan.tiles``) in the order in which their passes begin. ``forward``: all tiles. ``backward``: the tiles that
    have a backward pass; if empty, the forward order is reversed."""

    forward: tuple[int, ...]
    backward: tuple[int, ...] = ()
