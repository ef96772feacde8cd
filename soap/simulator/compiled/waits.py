"""What the tasks of a simulation have waited for (compiled)."""

from __future__ import annotations

from typing import NamedTuple

from soap.simulator.compiled.events import tell_successors
from soap.simulator.compiled.graph_arrays import GraphTables, Ints, Longs
from soap.simulator.compiled.handles import arrays_of
from soap.simulator.compiled.jit import inlined
from soap.simulator.compiled.machine_code import entry
from soap.simulator.compiled.state import State
from soap.simulator.compiled.trial import TAKEN, Trial


class Waits(NamedTuple):
    """Tasks that wait for others. ``place``: by slot, its place among those that were taken, or -1. ``at``: by place, where the next task
    that it waits for is noted in ``waits``: places, too."""

    place: Ints
    at: Longs
    waits: Longs


@entry
def note_waits(graph: GraphTables, state: State, trial: Trial, waits: Waits) -> None:
    """Fill ``waits`` for all tasks of a simulation, in the order in which they were taken. ``at`` then says where each task's end."""
    G, C, T, L = arrays_of(graph), arrays_of(state), arrays_of(trial), arrays_of(waits)
    for place in range(T.size[TAKEN]):
        tell_successors(G, C, _note, L, T.order[place], place)


@inlined
def _note(L, slot, before):  # type: ignore[no-untyped-def]
    """Note that a slot waits for the task at the place ``before``."""
    place = L.place[slot]
    if place >= 0:
        L.waits[L.at[place]] = before
        L.at[place] += 1
