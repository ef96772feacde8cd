"""Gradients in bfloat16, summed in float32: what PyTorch's hook for bfloat16 does, but for the order and precision of its sums."""

from __future__ import annotations

from typing import ClassVar

import torch

from soap.plan.compression.bf16 import PartsLayout
from soap.runtime.compression import seam
from soap.runtime.compression.parts import NarrowParts
from soap.strategy.compression import Bf16


class Rounded(NarrowParts[Bf16, PartsLayout]):
    """See the module. It keeps nothing."""

    law: ClassVar[str] = "what is sent is the gradient rounded to bfloat16, and the total the rounded sum of these; nothing is kept"

    def narrow(self, rows: torch.Tensor) -> torch.Tensor:
        """Rounded to the nearest, ties to even."""
        return seam.as_bytes(rows.to(torch.bfloat16))

    def wide(self, rows: torch.Tensor) -> torch.Tensor:
        """The same numbers."""
        return seam.from_bytes(rows, torch.bfloat16).to(self.kept_dtype)


COMPRESSOR = Rounded
