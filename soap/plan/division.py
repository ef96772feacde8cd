"""Tiles whose backward passes are in two (``strategy.division``), and whose passes belong to different actions of an order."""

from __future__ import annotations

from soap.model.graph import Operator
from soap.plan.plan import Plan, backward_name
from soap.plan.tiling import Tile


def weights_name(op: Operator, tile: Tile) -> str:
    """Task name of a tile's weight gradients, if its backward pass is in two; that of its input gradients is ``backward_name``."""
    return f"weights{backward_name(op, tile).removeprefix('backward')}"


def is_divided(plan: Plan, tile: int) -> bool:
    """Whether the backward pass of a tile (position in ``Plan.tiles``) is in two."""
    return plan.tiles[tile].operator in plan.divided
