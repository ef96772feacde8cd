"""Messages of RGC with alternating signs: one buffer [length, mean, positions], padded like RGC's. Half of RGC's, as float32 goes."""

from __future__ import annotations

from dataclasses import dataclass

from soap.plan.compression.rgc import LENGTH_BYTES, SparseLayout

MEAN_BYTES = 8
"""Room for the mean in float32 or float64; what follows is aligned."""


@dataclass(frozen=True, slots=True)
class MeanLayout(SparseLayout):
    """Positions of elements that all have one value."""

    @property
    def header_bytes(self) -> int:
        """The length and the mean."""
        return LENGTH_BYTES + MEAN_BYTES

    @property
    def sent_value_bytes(self) -> int:
        """No values."""
        return 0


LAYOUT = MeanLayout
