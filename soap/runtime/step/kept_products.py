"""What products of ``light`` tiles, which keep their outputs and run again, have made, from their first runs to their second ones
(``tracing.products``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from soap.plan.plan import recompute_name
from soap.runtime.program.prepared import PreparedTile
from soap.runtime.step.state import StepState, leaf
from soap.simulator.tasks import TaskKind
from soap.strategy.recomputation import has_product
from soap.tracing.products import Made, first_run, second_run

Outputs = Sequence[torch.Tensor]
Run = Callable[[Sequence[torch.Tensor]], Outputs]
"""Computes a tile from its inputs."""


class KeptProducts:
    """Of one micro-batch."""

    def __init__(self, state: StepState) -> None:
        self._state = state
        self._made: dict[int, Made | None] = {}

    def first(self, tile: PreparedTile, inputs: Sequence[torch.Tensor], run: Run) -> Outputs:
        """Run a tile, and keep of its products what its second run needs."""
        needed = [self._state.graph.tensors[own.tensor].requires_grad for own in tile.inputs]
        leaves = [leaf(own, takes) for own, takes in zip(inputs, needed, strict=True)]
        with self._state.task(tile.name, TaskKind.FORWARD):
            outputs, self._made[tile.number] = first_run(lambda: run(leaves), whole=not has_product(tile.operator))
        return outputs

    def second(self, tile: PreparedTile, inputs: Sequence[torch.Tensor], run: Run) -> Outputs:
        """Run a tile again, if it has products without these."""
        with self._state.task(recompute_name(tile.operator, tile.tile), TaskKind.RECOMPUTE):
            return second_run(lambda: run(inputs), self._made.pop(tile.number))
