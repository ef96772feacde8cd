"""PowerSGD: the gradient, as a matrix, is sent as a product of two thin ones; what that misses stays as a residual.

One power iteration a step, begun with the last step's right matrix (Vogels et al., 2019, algorithm 1): P = sum of M Q, orthogonalized;
Q = sum of M^T P; the sum of all ranks' matrices is approximated by P Q^T. A column of Q that has become zero would stay so; it begins anew.

Replicas are equal to the bit where their processors are: products are summed as their vector units do it.
"""

from __future__ import annotations

import torch

from soap.plan.compression.powersgd import LowRankLayout
from soap.runtime.compression.seam import Compressor, State
from soap.strategy.compression import PowerSgd

LOST = 1e-5
"""A column that has so small a part outside the others' span has none but rounding; it becomes zero."""


class LowRank(Compressor[PowerSgd, LowRankLayout]):
    """See the module. State: ``residual``, and ``right``, the right matrix, which is equal on all ranks. Sent + kept == kept before +
    gradient to within rounding, where a rank's sent part is P times its own M^T P."""

    def fresh(self, device: torch.device | str = "cpu") -> State:
        """A right matrix of random numbers that are the same everywhere."""
        state = super().fresh(device)
        state.common["right"] = self._random().to(device)
        return state

    def message(self, state: State, gradient: torch.Tensor) -> torch.Tensor:
        """M Q."""
        state.residual.add_(gradient)
        return (self._matrix(state) @ state.common["right"]).flatten()

    def answer(self, state: State, received: torch.Tensor) -> torch.Tensor:
        """M^T P. What P times that misses of M is the residual."""
        left = orthogonal(received.view(self.layout.rows, self.layout.rank))
        matrix = self._matrix(state)
        right = left.T @ matrix  # less than half the time of matrix.T @ left: torch reads the matrix along its rows
        matrix.addmm_(left, right, alpha=-1)
        state.step = {"left": left}
        return right.T.flatten()

    def total(self, state: State, received: torch.Tensor) -> torch.Tensor:
        """P Q^T."""
        right = received.view(self.layout.columns, self.layout.rank)
        total = state.step.pop("left") @ right.T
        state.common["right"] = torch.where(right.any(0), right, self._random().to(right.device))
        return self.shaped(total)

    def _matrix(self, state: State) -> torch.Tensor:
        return state.residual.view(self.layout.rows, self.layout.columns)

    def _random(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.layout.elements)
        return torch.randn(self.layout.columns, self.layout.rank, dtype=self.kept_dtype, generator=generator)


def orthogonal(columns: torch.Tensor) -> torch.Tensor:
    """The columns by Gram and Schmidt: of length one and at right angles, or zero where they depend on others."""
    rows = columns.T.clone(memory_format=torch.contiguous_format)  # one column lies in one piece: half the time
    for i, row in enumerate(rows):
        before = length = row.norm()
        if i:
            for _ in range(2):  # once more takes away what rounding has left
                row.addmv_(rows[:i].T, rows[:i].mv(row), alpha=-1)
            length = row.norm()
        row *= torch.where(length > LOST * before, 1 / length, 0)
    return rows.T


COMPRESSOR = LowRank
