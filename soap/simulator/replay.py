"""Plays tasks that there are, again and again with other times, by the compiled event loop. The counterpart of ``reference.play``.

An engine lowers strategies itself. What it cannot lower (two of many equal copies whose readers own parts, ``folding``) is lowered by
``lowering`` and played here; so is what ranks run in another order (``memory.rank_times``). Each task is a slot whose successors stand in a
row of their own. Passes of tiles are slots that are launched and take as long as a device's clock says; all others are communications, which
hold what they hold.
"""

from __future__ import annotations

import numpy as np

from soap.cluster.topology import Topology
from soap.simulator.communication.offloading import names_behind_links
from soap.simulator.communication.prices import Communication
from soap.simulator.compiled.events import NO_BOUND, simulate_all
from soap.simulator.compiled.graph_arrays import GraphTables
from soap.simulator.compiled.groups import DeviceGroups
from soap.simulator.compiled.handles import blank, handle
from soap.simulator.compiled.state import NEVER, OTHER, PULLS, SLOTS, WEIGHTS_TILE, State, make_state
from soap.simulator.compiled.trial import make_trial
from soap.simulator.memory.played import NONE, Longs, Played
from soap.simulator.tasks import Times


class Replay:
    """Tasks in compiled form. ``played``: the tasks, of which no start or end is read."""

    def __init__(self, played: Played, topology: Topology) -> None:
        self._first = topology.device_count  # slots before that are updates of devices, of which there are none
        self._state = self._filled(played)
        resources = topology.device_count + len(topology.links) + len(names_behind_links(topology))
        self._trial = make_trial(self._first + len(played.tile), resources, self._first)
        self._handles = (
            handle(blank(GraphTables)), handle(self._state), handle(DeviceGroups(Communication(topology)).arrays()), handle(self._trial),
        )  # fmt: skip

    def makespan_ns(self, times: Times | Played) -> int:
        """The time of an iteration with these times."""
        own = self._state
        for name in Times._fields:
            given: Longs = getattr(times, name)
            getattr(own, name)[self._first : self._first + len(given)] = given
        graph, state, groups, trial = self._handles
        return int(simulate_all(graph, state, groups, trial, trial, 0, NO_BOUND))

    def play(self, times: Times | Played) -> tuple[Longs, Longs]:
        """When each task starts and ends with these times."""
        self.makespan_ns(times)
        own = slice(self._first, self._first + len(times.duration))
        return self._trial.start[own].copy(), self._trial.end[own].copy()

    def _filled(self, played: Played) -> State:
        count, first, counts = len(played.tile), self._first, np.diff(played.waits_ptr)
        task = np.repeat(np.arange(count), counts)
        successors = task[np.argsort(played.waits, kind="stable")] + first
        rows = np.append(0, np.cumsum(np.bincount(played.waits, minlength=count))) + count + 1  # where each begins: these first, then the rows
        arena = np.concatenate((rows, successors, played.held))
        own = make_state(2, 0, 0, first, first + count, len(arena))  # the operators are those of the blank graph
        own.arena[: len(arena)] = arena
        own.used[SLOTS], own.used[PULLS], own.pull_slot[0] = first + count, count, first
        own.waits[:first] = NEVER
        slots, passes = slice(first, first + count), played.tile != NONE
        own.key[slots] = played.rank
        own.waits[slots] = counts
        own.kind[slots] = np.where(passes, WEIGHTS_TILE, OTHER)
        held = np.append(played.held, NONE)[played.held_ptr[:-1]]
        own.resource[slots] = np.where(passes, held, len(played.held) - len(arena) - 1 - played.held_ptr[:-1])
        own.resource_n[slots] = np.diff(played.held_ptr)
        own.index[slots] = np.arange(count)  # the row of its successors; ``sync_row`` of operator 0, whose all slots are, is 0
        own.alive[slots] = 1
        return own
