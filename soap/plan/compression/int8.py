"""Messages of whole numbers of eight bits with a float32 scale for each block; parts as with ``bf16``, of whole blocks."""

from __future__ import annotations

from dataclasses import dataclass

from soap.plan.compression.bf16 import PartsLayout
from soap.plan.compression.seam import Effort, Work, rounded_up
from soap.strategy.compression import Compression

BLOCK = 256
"""Elements that share a scale: 1.6% more bytes."""
SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class BlocksLayout(PartsLayout):
    """Every peer owns some blocks; the last ones are padded with zeros."""

    @property
    def part(self) -> int:
        """Elements that each peer owns."""
        return rounded_up(-(-self.elements // self.peers), BLOCK)

    @property
    def scale_bytes(self) -> int:
        """The scales of a part, which come first."""
        return self.part // BLOCK * SCALE_BYTES

    @property
    def part_bytes(self) -> int:
        """A part as it travels."""
        return self.scale_bytes + self.part

    def effort(self, compression: Compression, work: Work, *, on_host: bool) -> Effort:
        """As with bfloat16, with more passes: scales of blocks, divisions, rounding, and what both take from the residual."""
        whole, narrow, part = self.whole_bytes, self.peers * self.part_bytes, self.part * self.value_bytes
        if work == "select":
            return Effort(22 * whole + 2 * narrow, 0, 20)
        if work == "combine":
            return Effort((5 * self.peers + 20) * part + narrow, 0, 24 + self.peers)
        return Effort(4 * whole + narrow, 0, 6)

    def room_bytes(self, compression: Compression, *, on_host: bool) -> int:
        """The padded copy, quotients before and after they are rounded, and what is widened."""
        return 6 * self.peers * self.part * self.value_bytes


LAYOUT = BlocksLayout
