"""Messages of chunked top-k: positions of twelve bits and short values, as many from each chunk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from soap.plan.compression.seam import Exchange, Layout, kept_count
from soap.strategy.compression import Chunked, Codes

CHUNK = 4096
"""Elements whose positions take twelve bits."""
LEVELS_BYTES = 4
"""Two magnitudes in bfloat16."""


@dataclass(frozen=True, slots=True)
class ChunkedLayout(Layout):
    """``kept`` elements of each of ``chunks`` chunks. The last chunk may be shorter; what it has too few of is padding."""

    kept: int
    codes: Codes

    @classmethod
    def of(cls, compression: Chunked, shape: tuple[int, ...], value_bytes: int, peers: int) -> Self:
        """The density is that of a full chunk."""
        bare = cls(shape, value_bytes, peers, 0, compression.codes)
        kept = min(kept_count(CHUNK, compression.density), max(1, bare.elements))
        return cls(shape, value_bytes, peers, kept, compression.codes)

    @property
    def chunks(self) -> int:
        """Chunks of the parameter."""
        return -(-self.elements // CHUNK)

    @property
    def index_bytes(self) -> int:
        """Positions of a chunk: three bytes for two."""
        return 3 * -(-self.kept // 2)

    @property
    def code_bytes(self) -> int:
        """Values of a chunk, with what they are relative to."""
        return 2 * self.kept if self.codes == "bf16" else LEVELS_BYTES + -(-self.kept // 4)

    @property
    def exchanges(self) -> tuple[Exchange, ...]:
        """One all-gather."""
        return (Exchange("all_gather", self.chunks * (self.index_bytes + self.code_bytes)),)


LAYOUT = ChunkedLayout
