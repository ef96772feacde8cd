"""What an operator leaves on devices for its readers, and how it reaches them (compiled). The counterpart of ``planning.Delivery``."""

from __future__ import annotations

from soap.simulator.compiled.carriers import carry
from soap.simulator.compiled.fetches import cover_all
from soap.simulator.compiled.holdings import gather_reads, make_holdings
from soap.simulator.compiled.jit import compiled
from soap.simulator.compiled.scattering import scatter_sums
from soap.simulator.compiled.scratch import BOUNDS, CELL_BOXES
from soap.simulator.compiled.world import World


@compiled
def deliver(W: World, op: int) -> None:
    """Fill the scratch with an operator's holdings, reductions, fetches with their pieces, and carriers."""
    S = W.scratch
    S.count[CELL_BOXES] = S.count[BOUNDS] = 0
    make_holdings(W, op)
    gather_reads(W, op)
    scattered = scatter_sums(W, op)
    cover_all(W, op, scattered)
    carry(W, op)
