"""Which communications of gradients may start while the backward pass of a segment goes on, and starting them.

A segment's gradients are complete one by one. What a rank would start right behind the segment, and what waits for nobody, starts as soon
as its gradient is there; in the order of the program, which all ranks share. Where messages are no collectives, a sum may also start before
the gradients of activations that the segment sends back.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from soap.plan.plan import Pattern, Plan
from soap.runtime.program.actions import LAST_ONLY, Action, ActionKind, part_of
from soap.runtime.program.program import Program
from soap.runtime.step.micro_batch import MicroBatch

Key = tuple[ActionKind, int]
"""An action that starts a communication: its kind and subject."""


COLLECTED = {ActionKind.PUSH_ROWS: ActionKind.COLLECT_ROWS, ActionKind.PUSH: ActionKind.COLLECT}
"""What hosts do, where they aggregate, before they push so."""


def first_exchange(push: ActionKind, aggregated: bool) -> ActionKind:
    """What is done first with gradients that are pushed so."""
    return COLLECTED[push] if aggregated else push


class SyncSchedule:
    """When a rank's gradients are complete, by one program.

    ``contributions``: what waits for them (a bucket's sum; of what servers keep and of gathered rows, the first exchange) -> how often a
    segment's backward pass may give one of its shards a gradient. ``follow``: segment -> those that are started right behind it; ``early``
    False leaves every one to its own action. ``messages_apart``: see ``Communicator``.
    """

    def __init__(self, program: Program, rank: int, early: bool = True, *, messages_apart: bool = False) -> None:
        of_shard = [_contributions(program, rank, shard.uses) for shard in program.plan.shards]
        shared = {number: bucket for number, bucket in enumerate(program.buckets) if len(bucket.devices) > 1}
        self.contributions = {(ActionKind.SYNC, number): sum(of_shard[i] for i in bucket.shards) for number, bucket in shared.items()}
        for number, table in enumerate(program.tables):
            self.contributions[first_exchange(ActionKind.PUSH_ROWS, table.aggregated), number] = _contributions(program, rank, table.uses)
        for number, own in enumerate(program.plan.served):
            if not own.sparse:
                self.contributions[first_exchange(ActionKind.PUSH, own.aggregated), number] = _contributions(program, rank, own.uses)
        self.follow = _followers(program.plan, part_of(program.backward, rank), messages_apart) if early else {}


class EarlyStart:
    """Starts communications while a segment's backward pass goes on: each as soon as its gradient is complete, in the order of the program,
    which all ranks share. Its own action finds a communication started."""

    def __init__(self) -> None:
        self._starters: dict[ActionKind, weakref.WeakMethod[Callable[[int], object]]] = {}
        self._follow: Mapping[int, Sequence[Key]] = {}
        self._missing: dict[Key, int] = {}
        self._startable: list[Key] = []

    def by(self, starter: Callable[[int], object], kind: ActionKind) -> None:
        """Have a method start communications of a kind. Its object is not kept alive."""
        self._starters[kind] = weakref.WeakMethod(starter)

    @contextmanager
    def step(self, schedule: SyncSchedule, part: MicroBatch) -> Iterator[None]:
        """A micro-batch; only in the last one anything is started, and outside of steps nothing."""
        self._follow = schedule.follow if part.last else {}
        self._missing = schedule.contributions.copy()
        try:
            yield
        finally:
            self._missing = {}

    @contextmanager
    def segment(self, number: int) -> Iterator[None]:
        """The backward pass of a segment."""
        self._startable = list(self._follow.get(number, ()))
        yield
        self._startable = []

    def arrived(self, key: Key) -> None:
        """A segment has given its part of a gradient."""
        if key not in self._missing:
            return  # a backward pass of somebody else's
        self._missing[key] -= 1
        while self._startable and self._missing[self._startable[0]] == 0:
            kind, subject = self._startable.pop(0)
            starter = self._starters[kind]()
            assert starter is not None  # its object has called
            starter(subject)


def _contributions(program: Program, rank: int, uses: Sequence[tuple[int, int]]) -> int:
    """Number of this rank's segments whose backward pass may give something a gradient that its tiles use so."""
    tiles = [tile for tile, _ in uses if tile in program.activity.tiles and program.plan.tiles[tile].device == rank]
    return len({program.segment_of[tile] for tile in tiles})


def _followers(plan: Plan, actions: Sequence[Action], messages_apart: bool) -> dict[int, tuple[Key, ...]]:
    """Segment -> what a rank starts right behind it, waiting for nobody, and passing nothing that has to come before."""
    there = {(action.kind, action.subject) for action in actions}

    def starts(action: Action) -> bool:
        return action.kind in LAST_ONLY and (COLLECTED.get(action.kind), action.subject) not in there

    def behind(following: Iterable[Action]) -> Iterator[Key]:
        passed = False
        for action in following:
            if starts(action) and (action.kind is ActionKind.SYNC or not passed):
                yield action.kind, action.subject
            elif messages_apart and _is_of_messages(plan, action):
                passed = True
            else:
                return

    segments = [(place, action.subject) for place, action in enumerate(actions) if action.kind is ActionKind.SEGMENT]
    return {number: tuple(behind(actions[place + 1 :])) for place, number in segments}


def _is_of_messages(plan: Plan, action: Action) -> bool:
    """Whether gradients of activations are returned by messages from device to device alone."""
    match action.kind:
        case ActionKind.RETURN:
            return True
        case ActionKind.RETURN_EXCHANGE:
            return plan.exchanges[action.subject].pattern is not Pattern.BROADCAST
        case ActionKind.REDUCE_GRADIENT:
            return bool(plan.reductions[action.subject].cells)
    return False
