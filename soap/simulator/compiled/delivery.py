"""What an operator leaves on devices for its readers, and how it reaches them (compiled). The counterpart of ``planning.Delivery``."""

from __future__ import annotations

from soap.simulator.compiled.carriers import carry
from soap.simulator.compiled.fetches import cover_all
from soap.simulator.compiled.holdings import gather_reads, make_holdings
from soap.simulator.compiled.jit import entry
from soap.simulator.compiled.scattering import scatter_sums
from soap.simulator.compiled.scratch import BOUNDS, CELL_BOXES, Scratch
from soap.simulator.compiled.state import State
from soap.simulator.compiled.tables import ClusterTables, GraphTables
from soap.simulator.compiled.variants import VariantTables


@entry
def deliver(G: GraphTables, V: VariantTables, K: ClusterTables, C: State, S: Scratch, op: int) -> None:
    """Holdings, reductions, fetches with their pieces, and carriers of an operator, in the scratch."""
    S.count[CELL_BOXES] = S.count[BOUNDS] = 0
    make_holdings(G, V, C, S, op)
    gather_reads(G, V, C, S, op)
    scattered = scatter_sums(V, C, S, op)
    cover_all(G, V, K, C, S, op, scattered)
    carry(G, V, C, S, op)
