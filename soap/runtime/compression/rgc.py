"""RGC: the largest elements travel with their positions, in one buffer [length, positions, values]; the others stay as a residual.

Reused thresholds (``sampled``): a threshold is searched for in every fifth step. In between it is used again, unless fewer than k / 2 or
more than 2 k elements exceed it, or k is another one (in a warm-up): then it is searched for at once. (A GPU cannot know in time how many
exceed it; it sends the first 2 k, and keeps the rest.)
"""

from __future__ import annotations

import torch

from soap.plan.compression.seam import INTERVAL
from soap.runtime.compression import device_selection, seam
from soap.runtime.compression.seam import Selected, State
from soap.runtime.compression.selection import Surveyed, reused
from soap.runtime.compression.sparse import SparseCompressor, selected_by
from soap.strategy.compression import Rgc


class LargestElements(SparseCompressor[Rgc]):
    """See the module. State: ``residual``; with ``sampled`` also a threshold, its age, and the k that it was sought for. Sent + kept ==
    kept before + gradient, bit for bit."""

    def chosen(self, state: State, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """By the selection of the settings."""
        if self.layout.kept == 0:
            return torch.zeros(0, dtype=torch.int64, device=residual.device), None
        if self.compression.selection != "sampled":
            return selected_by(self.compression.selection, residual, self.layout.kept)[:2]
        return self._again(state, residual) or self._anew(state, residual)

    def write(self, state: State, row: torch.Tensor, selected: Selected) -> None:
        """Values as they are: nothing is lost."""
        self._place(row)[: len(selected.values)] = selected.values

    def values(self, row: torch.Tensor, count: int) -> torch.Tensor:
        """As they were written."""
        return self._place(row)[:count]

    def _again(self, state: State, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """Those above the last threshold, while that is young enough and good."""
        young = 0 < state.numbers.get("age", 0) < INTERVAL
        if "threshold" not in state.own or not young or state.numbers.get("sought") != self.layout.kept:
            return None
        threshold = state.own["threshold"]
        if not seam.on_host(residual):
            state.numbers["age"] += 1
            return device_selection.above(residual, threshold, self.layout.capacity)
        positions = reused(Surveyed.of(residual, mean=False), float(threshold), self.layout.kept // 2, self.layout.capacity)
        if positions is None:
            return None
        state.numbers["age"] += 1
        return torch.from_numpy(positions), None

    def _anew(self, state: State, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        positions, count, threshold = selected_by("search", residual, self.layout.kept)
        state.own.pop("threshold", None)
        state.numbers["age"] = 0
        if threshold is not None:
            state.own["threshold"], state.numbers["age"], state.numbers["sought"] = threshold, 1, self.layout.kept
        return positions, count

    def _place(self, row: torch.Tensor) -> torch.Tensor:
        layout = self.layout
        return row[layout.values_at :][: layout.capacity * layout.value_bytes].view(self.kept_dtype)


COMPRESSOR = LargestElements
