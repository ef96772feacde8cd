"""Plays tasks that were played before, with other waits, by the compiled event loop. The counterpart of ``reference.play``.

An engine lowers strategies itself, in the order in which it simulates them. What ranks run in another order (``memory.rank_times``) is
played here. Each task is a slot whose successors stand in a row of their own. Passes of tiles are slots that are launched and take as long
as a device's clock says; all others are communications, which hold what they hold.
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
from soap.simulator.memory.grouped import Longs
from soap.simulator.memory.played import NONE, Played


def replayed(played: Played, topology: Topology) -> tuple[Longs, Longs]:
    """When each task starts and ends. No start or end of ``played`` is read."""
    count, first = len(played.tile), topology.device_count  # slots before that are updates of devices, of which there are none
    resources = topology.device_count + len(topology.links) + len(names_behind_links(topology))
    trial, groups = make_trial(first + count, resources, first), DeviceGroups(Communication(topology)).arrays()
    handles = handle(blank(GraphTables)), handle(_state(played, first)), handle(groups), handle(trial)
    simulate_all(*handles, handles[-1], 0, NO_BOUND)
    return trial.start[first : first + count], trial.end[first : first + count]


def _state(played: Played, first: int) -> State:
    """The tasks as slots, from slot ``first`` on."""
    count = len(played.tile)
    waiting, waits = played.waits_of(np.arange(count))
    successors = waiting[np.argsort(waits, kind="stable")] + first
    rows = np.append(0, np.cumsum(np.bincount(waits, minlength=count))) + count + 1  # where each begins, after these places
    more = played.replayable()
    arena = np.concatenate((rows, successors, more.held))
    own = make_state(2, 0, 0, first, first + count, len(arena))  # as many operators as the blank graph has
    own.arena[: len(arena)] = arena
    own.used[SLOTS], own.used[PULLS], own.pull_slot[0] = first + count, count, first
    own.waits[:first] = NEVER
    slots, passes = slice(first, first + count), played.tile != NONE
    held = np.append(more.held, NONE)[more.held_ptr[:-1]]
    own.resource[slots] = np.where(passes, held, len(more.held) - len(arena) - 1 - more.held_ptr[:-1])
    own.resource_n[slots] = np.diff(more.held_ptr)
    own.duration[slots], own.launch[slots] = more.duration, more.launch
    own.latency[slots], own.overhead[slots] = more.latency, more.overhead
    own.waits[slots] = np.bincount(waiting, minlength=count)
    own.key[slots], own.kind[slots] = more.rank, np.where(passes, WEIGHTS_TILE, OTHER)
    own.index[slots] = np.arange(count)  # the row of its successors; ``sync_row`` of operator 0, whose all slots are, is 0
    own.alive[slots] = 1
    return own
