"""What each action of a table waits for, beside the action before it on the same stage.

With C chunks, and for each micro-batch m:

- ``F(c, m)`` waits for ``F(c-1, m)``;
- ``B(c, m)``, or ``I(c, m)``, waits for ``F(c, m)`` and for ``B`` or ``I`` of ``(c+1, m)``;
- ``W(c, m)`` waits for ``I(c, m)``.

An operator that couples the samples of a step (batch norm over the whole batch, in-batch negatives, balance losses) is a *barrier* of its
chunk: no micro-batch leaves the chunk, forward or backward, before all have reached it. The chunk's own actions stay in the order of the
table; a runtime does what stands before the operator in each, and what stands behind it in the last. So with a barrier in chunk c

- ``F(c+1, m)``, and ``B`` or ``I`` of ``(c, m)``, wait for ``F(c, k)`` of all k;
- ``B`` or ``I`` of ``(c-1, m)``, and ``W(c, m)``, wait for ``B`` or ``I`` of ``(c, k)`` of all k.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from soap.schedules.table import WORK, Action, Table


class Barrier(NamedTuple):
    """An operator that couples the samples of a step, and the chunk that it is in."""

    chunk: int
    operator: str


class Place(NamedTuple):
    """A cell of a table."""

    stage: int
    position: int


@dataclass(frozen=True)
class Dependencies:
    """The actions of a table as nodes, row by row, and behind them a gate for each direction of each barrier, which takes no time.

    ``actions``, ``places``: of the nodes that are actions. ``needs``: of each node, the nodes that it waits for; the action before it on
    the stage comes first, if there is one. ``gates``: the barrier of each node behind the actions.
    """

    actions: tuple[Action, ...]
    places: tuple[Place, ...]
    needs: tuple[tuple[int, ...], ...]
    gates: tuple[Barrier, ...]

    @cached_property
    def order(self) -> list[int]:
        """All nodes, each behind those that it waits for; fewer if some wait for each other."""
        waiting = [len(needed) for needed in self.needs]
        followers: list[list[int]] = [[] for _ in self.needs]
        for node, needed in enumerate(self.needs):
            for other in needed:
                followers[other].append(node)
        ready = deque(node for node, count in enumerate(waiting) if not count)
        done = []
        while ready:
            node = ready.popleft()
            done.append(node)
            for other in followers[node]:
                waiting[other] -= 1
                if not waiting[other]:
                    ready.append(other)
        return done


def dependencies(table: Table, barriers: Sequence[Barrier] = ()) -> Dependencies:
    """What each action waits for. The table must be complete, and the barriers in its chunks (``checking.check``)."""
    places = tuple(Place(stage, i) for stage, actions in enumerate(table.stages) for i in range(len(actions)))
    actions = tuple(table.stages[place.stage][place.position] for place in places)
    node_of = {action: node for node, action in enumerate(actions)}
    backward = {(a.chunk, a.microbatch): node for node, a in enumerate(actions) if "inputs" in WORK[a.kind].shares}
    needs: list[list[int]] = [[] if place.position == 0 else [node - 1] for node, place in enumerate(places)]
    last = table.chunk_count - 1
    for node, (kind, chunk, microbatch) in enumerate(actions):
        shares, behind = WORK[kind]
        needs[node] += [] if behind is None else [node_of[Action(behind, chunk, microbatch)]]
        if "forward" in shares and chunk:
            needs[node].append(node_of[Action(kind, chunk - 1, microbatch)])
        if "inputs" in shares and chunk < last:
            needs[node].append(backward[chunk + 1, microbatch])
    gates = _add_gates(barriers, actions, needs)
    return Dependencies(actions, places, tuple(map(tuple, needs)), gates)


def _add_gates(barriers: Sequence[Barrier], actions: Sequence[Action], needs: list[list[int]]) -> tuple[Barrier, ...]:
    """Add a node for each direction of each chunk's barrier, and who waits for it. Several barriers of a chunk are one."""
    first = {barrier.chunk: barrier for barrier in reversed(barriers)}
    forward: dict[int, int] = {}
    backward: dict[int, int] = {}
    for gates, share in ((forward, "forward"), (backward, "inputs")):
        for chunk in first:
            gates[chunk] = len(needs)
            needs.append([node for node, action in enumerate(actions) if action.chunk == chunk and share in WORK[action.kind].shares])
    for node, (kind, chunk, _) in enumerate(actions):
        if "forward" in WORK[kind].shares:
            awaited = [forward.get(chunk - 1)]
        elif "inputs" in WORK[kind].shares:
            awaited = [forward.get(chunk), backward.get(chunk + 1)]
        else:
            awaited = [backward.get(chunk)]
        needs[node] += [gate for gate in awaited if gate is not None]
    return (*first.values(), *first.values())
