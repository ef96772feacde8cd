"""RGC with alternating signs: in one step the largest elements, in the next the smallest, all as their mean: [length, mean, positions].

Whose turn it is is the same on all ranks: it is part of the state, starts with the positive ones, and changes with every step. Elements of
the other sign (and zeros) are never chosen, even if there are fewer than k of the right one: they would spoil the mean.
"""

from __future__ import annotations

import torch

from soap.plan.compression.rgc import LENGTH_BYTES
from soap.runtime.compression.seam import Selected, State
from soap.runtime.compression.sparse import SparseCompressor, selected_by
from soap.strategy.compression import RgcAsq


class AlternatingSigns(SparseCompressor[RgcAsq]):
    """See the module. State: ``residual``, and the sign whose turn it is (0: positive). Elements that are not sent are kept as they are,
    bit for bit; of sent ones the sum travels, to within rounding, and nothing is kept, or with error feedback their difference from the
    mean."""

    def chosen(self, state: State, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The largest elements of one sign; the turn passes to the other."""
        turn = state.numbers.get("turn", 0)
        state.numbers["turn"] = 1 - turn
        if self.layout.kept == 0:
            return torch.zeros(0, dtype=torch.int64, device=residual.device), None
        return selected_by(self.compression.selection, residual, self.layout.kept, -1 if turn else 1)[:2]

    def write(self, state: State, row: torch.Tensor, selected: Selected) -> None:
        """Their mean, made in float64."""
        count = torch.tensor(len(selected.values)) if selected.count is None else selected.count
        mean = (selected.values.sum(dtype=torch.float64) / count.clamp_min(1)).to(self.kept_dtype)
        self._place(row).copy_(mean)
        if self.compression.error_feedback:
            state.residual.index_add_(0, selected.positions, torch.where(selected.real, selected.values - mean, 0))

    def values(self, row: torch.Tensor, count: int) -> torch.Tensor:
        """The mean, as often as it is meant."""
        mean = self._place(row).to(self.kept_dtype)
        real = torch.arange(count, device=row.device) < row[:LENGTH_BYTES].view(torch.int64)
        return torch.where(real, mean, 0)

    def _place(self, row: torch.Tensor) -> torch.Tensor:
        return row[LENGTH_BYTES : self.layout.header_bytes].view(torch.float64)


COMPRESSOR = AlternatingSigns
