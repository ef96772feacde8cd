"""Gradients as whole numbers from -127 to 127 times a scale for each block of 256, summed in float32, with error feedback."""

from __future__ import annotations

import torch

from soap.plan.compression.int8 import BLOCK, BlocksLayout
from soap.runtime.compression import seam
from soap.runtime.compression.bf16 import NarrowParts
from soap.strategy.compression import Int8

LARGEST = 127


class Scaled(NarrowParts[Int8, BlocksLayout]):
    """See the module. State: ``residual``. Sent + kept == kept before + gradient to within rounding; over all ranks total + kept is the
    same, as owners keep what the sum's rounding takes."""

    def narrow(self, rows: torch.Tensor) -> torch.Tensor:
        """Scales, then numbers. A block's scale is its largest magnitude / 127."""
        blocks = rows.reshape(len(rows), self.layout.part // BLOCK, BLOCK)
        scales = (blocks.abs().amax(2) / LARGEST).to(torch.float32)
        wide = scales.to(rows.dtype)[:, :, None]
        numbers = torch.where(wide > 0, blocks / wide, 0).round().clamp(-LARGEST, LARGEST).to(torch.int8)
        return torch.cat([seam.as_bytes(scales), seam.as_bytes(numbers.flatten(1))], 1)

    def wide(self, rows: torch.Tensor) -> torch.Tensor:
        """Numbers times scales."""
        size = self.layout.scale_bytes
        scales = seam.from_bytes(rows[:, :size], torch.float32).to(self.kept_dtype)
        numbers = seam.from_bytes(rows[:, size:], torch.int8).to(self.kept_dtype)
        return (numbers.view(*scales.shape, BLOCK) * scales[:, :, None]).flatten(1)


COMPRESSOR = Scaled
