"""Counting labels on the ranks that share them out (``plan.own_labels``), when a step begins on parts of a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from soap.model.graph import TensorKind
from soap.plan.own_labels import label_counts
from soap.plan.plan import Plan
from soap.runtime.comm.redistribute import Pending
from soap.runtime.program.prepared import PreparedTile, PreparedTiles
from soap.runtime.step.state import StepState
from soap.runtime.step.step_inputs import StepInputs
from soap.tracing.model import TracedModel


class LabelCounts:
    """What one rank counts, in the order of the plan's sums, which is the same on all ranks."""

    def __init__(self, prepared: PreparedTiles, plan: Plan, rank: int) -> None:
        self._plan = plan
        self._counts = [own for own in label_counts(plan) if rank in own.devices]
        self._tiles = [[prepared.tiles[tile] for tile in own.tiles if tile in prepared.tiles] for own in self._counts]

    def begin(self, model: TracedModel, given: StepInputs, state: StepState) -> Callable[[str], torch.Tensor | None]:
        """Count this rank's labels, and begin to sum the counts. Returns ``TileContext.counts``, which waits for a sum."""
        found: dict[str, Pending] = {}
        for own, tiles in zip(self._counts, self._tiles, strict=True):
            total = torch.zeros((), dtype=torch.float64, device=state.comm.device)
            names = [self._count(total, model, tile, given) for tile in tiles if not tile.empty]
            pending = state.sum_over(total, own.devices, own.name)
            found.update(dict.fromkeys(names, pending))
            if not names:  # fewer samples than tiles: no tile here will ask
                state.comm.leave(pending)
        return lambda call: found[call].wait() if call in found else None

    def _count(self, total: torch.Tensor, model: TracedModel, tile: PreparedTile, given: StepInputs) -> str:
        """Add what a tile counts. Returns the call that divides."""
        with torch.no_grad():
            name, count = model.labels_counted(tile.tile, self._labels(tile, given))
            total.add_(count)
        return name

    def _labels(self, tile: PreparedTile, given: StepInputs) -> Sequence[torch.Tensor | None]:
        tensors = self._plan.graph.tensors
        return [None if tensors[source.tensor].kind is TensorKind.ACTIVATION else given.read(source) for source in tile.inputs]
