"""What ranks do for tiles with marks beside running them (``plan.marks``), a file for each field (``seam``)."""

from __future__ import annotations

from soap.runtime.marks.offload import KeptOnHost
from soap.runtime.marks.seam import OnRank

ON_RANKS: dict[str, type[OnRank]] = {"offload": KeptOnHost}
"""By field of marks; ranks do nothing for others but to run tiles again."""
