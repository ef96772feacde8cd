"""No more samples per second than this, without playing anything: from the tasks of one lease of each lane, and what they hold.

Two bounds, of which the lower one counts. A lane does its leases one after the other, each no quicker than its longest chain of tasks, and
than its phases: what is read comes before the rest, what is pushed behind it, and no device or link serves a phase quicker than what the
lease's own tasks hold it for. And where all lanes go on alike, none is quicker than the resource that their leases together hold longest.
"""

from __future__ import annotations

from collections import Counter
from math import inf

from soap.cluster.topology import Topology
from soap.elastic.simulation.traffic import Traffic
from soap.elastic.simulation.unroll import FRONT, PUSH, REST, unroll
from soap.elastic.simulation.work import Work
from soap.simulator.chunks import NO_CHUNKS


def rate_bound(topology: Topology, traffic: Traffic, work: Work, *, alike: bool) -> float:
    """Samples per second, without random delays. ``alike``: all lanes do as many leases."""
    design = traffic.design
    unrolled = unroll(topology, traffic, work, 1, shortest_chunk_ns=NO_CHUNKS)
    every, chain_ns = Counter[int](), list[int]()
    phases = [[Counter[int](), Counter[int]()] for _ in design.lanes]
    computed_ns = [2 * work.control_ns + work.front_ns(lane) + work.rest_ns(lane) for lane in design.lanes]
    for task in unrolled.tasks:
        phase, lane = task.id[0], task.id[3]
        chain_ns.append(task.duration_ns + max((chain_ns[before] for before in task.predecessors), default=0))
        held = dict.fromkeys(task.resources, task.held_ns)
        every.update(held)
        if phase not in (FRONT, REST):
            phases[lane][phase >= PUSH].update(held)
    alone = 0.0
    for lane, (end,) in enumerate(unrolled.ends):
        read, pushed = (max(own.values(), default=0) for own in phases[lane])
        alone += 1e9 * design.batch * design.in_flight / max(chain_ns[end], computed_ns[lane] + read + pushed)
    return min(alone, 1e9 * design.batch * len(design.lanes) / max(every.values()) if alike else inf)
