"""Messages of whole numbers of eight bits with a float32 scale for each block; parts as with ``bf16``, of whole blocks."""

from __future__ import annotations

from dataclasses import dataclass

from soap.plan.compression.bf16 import PartsLayout
from soap.plan.compression.seam import rounded_up

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


LAYOUT = BlocksLayout
