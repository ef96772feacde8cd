"""The move that gathers values earlier or later before their uses (compiled)."""

from __future__ import annotations

from soap.search.compiled.candidates import below
from soap.search.compiled.edits import NO_EFFECT
from soap.search.compiled.space_arrays import SearchTables
from soap.search.space import MOST_PREFETCHED
from soap.simulator.compiled.change import PREFETCH, Edit
from soap.simulator.compiled.jit import compiled
from soap.simulator.compiled.syncs.gathering import first_gathered
from soap.simulator.compiled.world import World


@compiled
def propose_prefetch(W: World, Z: SearchTables, E: Edit) -> float:
    """Let one group of values more, or less, be gathered while an earlier one is used, as likely: symmetric. No effect where nothing is
    gathered, below 0 and above ``MOST_PREFETCHED``."""
    step = 2 * below(Z.chain, 2) - 1
    first, after = first_gathered(W), W.state.prefetch[0] + step
    if first < 0 or after < 0 or (step > 0 and after > MOST_PREFETCHED):
        return NO_EFFECT
    E.count[PREFETCH], E.parameter[0] = after, first
    return 0.0
