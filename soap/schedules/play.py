"""When each action of a table takes place, if actions and messages take given times: makespan, bubble, and micro-batches in flight.

A small exact player, in integer nanoseconds. It knows no devices, links or memory: the simulator does. A stage does its actions in order,
each as soon as what it needs is there. A message leaves when its action ends, and messages over one border in one direction go one after
the other, beside all computation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from math import ceil

from soap.errors import ScheduleError
from soap.schedules.checking import check
from soap.schedules.dependencies import Barrier, Dependencies
from soap.schedules.table import WEIGHTS, WORK, Kind, Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Durations:
    """How long things take, in nanoseconds. ``actions_ns``: by kind and chunk; kinds that a table lacks may be missing. ``forward_ns`` and
    ``backward_ns``: of a micro-batch's message over the border behind each chunk but the last, if both chunks are on different stages;
    empty: nothing."""

    actions_ns: Mapping[Kind, Sequence[int]]
    forward_ns: Sequence[int] = ()
    backward_ns: Sequence[int] = ()


def equal(chunks: int, *, forward_ns: int, input_ns: int, weight_ns: int, message_ns: int = 0) -> Durations:
    """The same for all chunks; a whole backward pass takes as long as its two parts."""
    actions: dict[Kind, list[int]] = {}
    for kind, work in WORK.items():
        own = forward_ns * ("forward" in work.shares) + input_ns * ("inputs" in work.shares) + ceil(weight_ns * work.gives_weights)
        actions[kind] = [own] * chunks
    return Durations(actions_ns=actions, forward_ns=[message_ns] * (chunks - 1), backward_ns=[message_ns] * (chunks - 1))


@dataclass(frozen=True, slots=True)
class Played:
    """A table with the start and end of each action, by stage and position, in nanoseconds from the first start."""

    table: Table
    starts_ns: tuple[tuple[int, ...], ...]
    ends_ns: tuple[tuple[int, ...], ...]

    @property
    def makespan_ns(self) -> int:
        """From the first start to the last end."""
        return max(ends[-1] for ends in self.ends_ns)

    @property
    def busy_ns(self) -> tuple[int, ...]:
        """How long each stage computes."""
        return tuple(sum(ends) - sum(starts) for starts, ends in zip(self.starts_ns, self.ends_ns, strict=True))

    @property
    def idle_ns(self) -> tuple[int, ...]:
        """How long each stage does not, between the first start of any and the last end of any."""
        makespan_ns = self.makespan_ns
        return tuple(makespan_ns - busy_ns for busy_ns in self.busy_ns)

    @property
    def bubble(self) -> Fraction:
        """Which share of the time of all stages they are idle; 0 if nothing takes time."""
        whole_ns = self.makespan_ns * len(self.table.stages)
        return Fraction(sum(self.idle_ns), whole_ns) if whole_ns else Fraction(0)

    def in_flight(self, stage: int) -> list[tuple[int, int]]:
        """(Time in ns, micro-batches from there on) of a stage, over all of its chunks: from the start of F to the end of B or I."""
        changes: dict[int, int] = {}
        for action, start_ns, end_ns in zip(self.table.stages[stage], self.starts_ns[stage], self.ends_ns[stage], strict=True):
            for share, when_ns, change in (("forward", start_ns, 1), ("inputs", end_ns, -1)):
                if share in WORK[action.kind].shares:
                    changes[when_ns] = changes.get(when_ns, 0) + change
        found, count = [], 0
        for when_ns in sorted(changes):
            count += changes[when_ns]
            if changes[when_ns]:
                found.append((when_ns, count))
        return found


def play(table: Table, durations: Durations, barriers: Sequence[Barrier] = (), known: Dependencies | None = None) -> Played:
    """When each action takes place. ScheduleError in one line if the table cannot be executed, or a time is missing or negative.
    ``known``: what ``check`` has said of the table with these barriers, if it was asked; that takes longer than all else."""
    known = check(table, barriers) if known is None else known
    _require_durations(table, durations)
    ends_ns = [0] * len(known.needs)
    starts_ns = [0] * len(known.actions)
    messages = _Messages(table, known, durations)
    gated = {node for gate in range(len(known.actions), len(known.needs)) for node in known.needs[gate]}
    for node in known.order:
        if node >= len(known.actions):
            ends_ns[node] = max(ends_ns[other] for other in known.needs[node])
            for other in sorted(known.needs[node]):  # in the order of their stage
                messages.send(other, ends_ns[node])
            continue
        kind, chunk, _ = known.actions[node]
        ready_ns = [messages.arrives_ns[o] if messages.crosses(o, node) else ends_ns[o] for o in known.needs[node]]
        starts_ns[node] = max(ready_ns, default=0)
        ends_ns[node] = starts_ns[node] + durations.actions_ns[kind][chunk]
        if node not in gated:
            messages.send(node, ends_ns[node])
    first_ns = min(starts_ns)
    return Played(table, _by_stage(table, starts_ns, first_ns), _by_stage(table, ends_ns, first_ns))


def least_ns(table: Table, durations: Durations) -> tuple[int, ...]:
    """For each stage a time in ns before which not all stages can have ended, in a table that can be executed. Much quicker than ``play``.

    A stage begins when its first chunk's first micro-batch can be there, and then has all of its actions to do. Its last input gradient
    is of its first chunk, and those of all chunks before follow.
    """
    _require_durations(table, durations)
    actions_ns, crossing = durations.actions_ns, [a != b for a, b in pairwise(table.placement)]
    counts = [Counter((kind, chunk) for kind, chunk, _ in own) for own in table.stages]
    kinds = {kind for own in counts for kind, _ in own}
    back = [kind for kind in kinds if "inputs" in WORK[kind].shares]
    back_ns = [min(actions_ns[kind][chunk] for kind in back) for chunk in range(table.chunk_count)]
    fill_ns, drain_ns = [0], [0]
    for chunk, crosses in enumerate(crossing):
        there_ns, here_ns = (own[chunk] if own and crosses else 0 for own in (durations.forward_ns, durations.backward_ns))
        fill_ns.append(fill_ns[-1] + actions_ns["F"][chunk] + there_ns)
        drain_ns.append(drain_ns[-1] + back_ns[chunk] + here_ns)
    found = []
    for stage, own in enumerate(counts):
        first = table.placement.index(stage)
        by_kind = {kind: sum(count * actions_ns[kind][chunk] for (one, chunk), count in own.items() if one == kind) for kind in kinds}
        work_ns, late_ns = sum(by_kind.values()), sum(by_kind[kind] for kind in kinds if {*WORK[kind].shares} <= {*WEIGHTS})
        found.append(fill_ns[first] + max(work_ns, work_ns - late_ns + drain_ns[first]))
    return tuple(found)


class _Messages:
    """What stages send each other. ``arrives_ns``: by the node that sends."""

    def __init__(self, table: Table, known: Dependencies, durations: Durations) -> None:
        self.arrives_ns: dict[int, int] = {}
        self._known = known
        self._forward_ns = durations.forward_ns or [0] * table.chunk_count
        self._backward_ns = durations.backward_ns or [0] * table.chunk_count
        self._free_ns: dict[tuple[int, bool], int] = {}

    def crosses(self, sender: int, receiver: int) -> bool:
        """Whether the second waits for a message of the first."""
        places = self._known.places
        return sender < len(places) and places[sender].stage != places[receiver].stage

    def send(self, node: int, ready_ns: int) -> None:
        """Note when what an action made arrives at the stage that waits for it, if there is one."""
        kind, chunk, _ = self._known.actions[node]
        forward = "forward" in WORK[kind].shares
        border = chunk if forward else chunk - 1
        if border < 0 or not (forward or "inputs" in WORK[kind].shares):
            return
        by_border_ns = self._forward_ns if forward else self._backward_ns
        takes_ns = by_border_ns[border] if border < len(by_border_ns) else 0  # nobody waits for the last chunk
        leaves_ns = max(ready_ns, self._free_ns.get((border, forward), 0))
        self.arrives_ns[node] = self._free_ns[border, forward] = leaves_ns + takes_ns


def _by_stage(table: Table, times_ns: Sequence[int], first_ns: int) -> tuple[tuple[int, ...], ...]:
    found, start = [], 0
    for actions in table.stages:
        found.append(tuple(time_ns - first_ns for time_ns in times_ns[start : start + len(actions)]))
        start += len(actions)
    return tuple(found)


def _require_durations(table: Table, durations: Durations) -> None:
    for kind in sorted({action.kind for actions in table.stages for action in actions}):
        _require_times(f"of {kind}", durations.actions_ns.get(kind, ()), table.chunk_count)
    for name, times_ns in (("forward messages", durations.forward_ns), ("backward messages", durations.backward_ns)):
        if times_ns:
            _require_times(f"of {name}", times_ns, table.chunk_count - 1)


def _require_times(what: str, times_ns: Sequence[int], count: int) -> None:
    if len(times_ns) != count:
        raise ScheduleError(f"{len(times_ns)} durations {what}; expected {count}, one for each")
    wrong = next((time_ns for time_ns in times_ns if time_ns < 0), None)
    if wrong is not None:
        raise ScheduleError(f"duration {wrong} ns {what}; expected none below 0")


def in_flight(table: Table) -> tuple[int, ...]:
    """Of each stage, the most micro-batches, over all of its chunks, that have begun F and not yet ended B or I."""
    ones, zeros = [1] * table.chunk_count, [0] * table.chunk_count
    return peaks(table, ones, zeros)


def awaiting_weights(table: Table) -> tuple[int, ...]:
    """Of each stage, the most micro-batches, over all of its chunks, that have ended I and not yet W."""
    ones, zeros = [1] * table.chunk_count, [0] * table.chunk_count
    return peaks(table, zeros, ones)


def peaks(table: Table, activation_bytes: Sequence[int], weight_bytes: Sequence[int]) -> tuple[int, ...]:
    """Of each stage, the most that it keeps at once for micro-batches.

    ``activation_bytes``: by chunk, what a micro-batch keeps from F to the end of B or I. ``weight_bytes``: by chunk, what it keeps between
    I and the end of W.
    """
    found = []
    for actions in table.stages:
        kept = most = 0
        last = {action[1:]: place for place, action in enumerate(actions) if not {*WEIGHTS}.isdisjoint(WORK[action.kind].shares)}
        for place, (kind, chunk, microbatch) in enumerate(actions):
            shares = WORK[kind].shares
            kept += (("forward" in shares) - ("inputs" in shares)) * activation_bytes[chunk]
            kept += (("inputs" in shares) - (last.get((chunk, microbatch)) == place)) * weight_bytes[chunk]
            most = max(most, kept)
        found.append(most)
    return tuple(found)
