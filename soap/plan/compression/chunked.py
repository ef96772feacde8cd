"""Messages of chunked top-k: positions of twelve bits and short values, as many from each chunk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from soap.plan.compression.seam import Effort, Exchange, Layout, Work, kept_count
from soap.strategy.compression import Chunked, Codes, Compression

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

    def effort(self, compression: Compression, work: Work, *, on_host: bool) -> Effort:
        """``select``: the residual decays and takes the gradient; its magnitudes are sorted chunk by chunk, marked and counted (a count
        takes eight bytes an element), and coded. ``restore``: zeros are written, and each peer's elements are decoded and added."""
        whole, sent = self.whole_bytes, self.chunks * self.kept
        if work == "restore":
            return Effort(whole + self.peers * (self.exchanges[0].message_bytes + 40 * sent), self.peers * sent, 1 + 24 * self.peers)
        sorting = 12 if on_host else 3
        return Effort((9 + sorting) * whole + 20 * self.elements + 100 * sent, 3 * sent, 60)

    def room_bytes(self, compression: Compression, *, on_host: bool) -> int:
        """Magnitudes and their padded copy, marks, and a count of marks."""
        return 3 * self.whole_bytes + 12 * self.elements + 200 * self.chunks * self.kept


LAYOUT = ChunkedLayout
