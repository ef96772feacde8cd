"""What ranks do for tiles with marks beside running them (``plan.marks``), a file for each field (``seam``)."""

from __future__ import annotations

from soap.runtime.comm.redistribute import Communicator
from soap.runtime.marks.offload import KeptOnHost
from soap.runtime.marks.seam import OnRank
from soap.runtime.program.program import Program

ON_RANKS: dict[str, type[OnRank]] = {"offload": KeptOnHost}
"""By field of marks; ranks do nothing for others but to run tiles again."""


def on_rank(program: Program, comm: Communicator) -> dict[str, OnRank]:
    """What a rank does, by field."""
    return {field: kind(program, comm) for field, kind in ON_RANKS.items()}
