"""Servers of virtual workers: versions of pieces of the parameters, and, on the first server, the clocks of all workers.

A server answers in the process of a rank, each connection in a thread of its own. The clocks say which version a worker's next minibatch
has; then its stages pull just that version from all servers. They keep a version as long as somebody may ask for it.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Sequence

import torch
from torch import Tensor

from soap.elastic.clocks import Clocks
from soap.elastic.faults import ElasticError
from soap.elastic.messages import Buffer, Kind, Message, decode, encode
from soap.elastic.waves import GlobalWeights
from soap.mixed.run.plan import WavePlan
from soap.runtime.comm import signs

LATEST = -1
"""Instead of a version: the last one."""
LOOK_S = 1.0
"""How often it is asked whether other ranks live while a worker waits until it may begin."""


class Desk:
    """The clocks of all workers, asked by heads of workers from threads of the first server. ``finished``: minibatches that each worker has
    finished before, whole waves of which servers have."""

    def __init__(self, plan: WavePlan, finished: int = 0) -> None:
        self._plan, self._changed = plan, threading.Condition()
        workers = range(len(plan.workers))
        self.clocks = Clocks(workers, plan.bound, plan.in_flight, finished=finished)
        self._finished = dict.fromkeys(workers, finished)
        self._told = {worker: deque([finished // plan.in_flight]) for worker in workers}
        """By worker, the version of its last finished minibatch, and those of all behind it that may begin."""
        self._parts: Counter[tuple[int, int]] = Counter()
        self._leaving: Counter[int] = Counter()

    def start(self, worker: int, finished: int) -> tuple[int, int]:
        """Wait until the worker may begin its next minibatch, having finished so many. Returns the version that this one has, and the least
        that anybody will ask for. It waits however long others take; RankLost in one line if one of their ranks is gone."""
        with self._changed:
            self._has_finished(worker, finished)
            while not self.clocks.may_start(worker):
                if not self._changed.wait(LOOK_S):
                    signs.require_life()
            version = self._told[worker][-1]
            if version < self.clocks.needed(worker) or self._plan.bound is None:
                version = self.clocks.slowest
            self.clocks.started(worker, version)
            self._told[worker].append(version)
            return version, self._least()

    def pushed(self, worker: int, wave: int) -> int:
        """Servers have a stage's part of a wave. Returns the least version that anybody will ask for."""
        with self._changed:
            self._parts[worker, wave] += 1
            if self._parts[worker, wave] == len(self._plan.workers[worker]):
                del self._parts[worker, wave]
                self._has_finished(worker, (wave + 1) * self._plan.in_flight)
                self.clocks.pushed(worker)
                self._changed.notify_all()
            return self._least()

    def left(self, worker: int) -> int:
        """A stage of a worker has no more waves. Returns what ``pushed`` does."""
        with self._changed:
            self._leaving[worker] += 1
            if self._leaving[worker] == len(self._plan.workers[worker]):
                self.clocks.left(worker)
                self._told.pop(worker)
                self._changed.notify_all()
            return self._least()

    def _has_finished(self, worker: int, finished: int) -> None:
        for _ in range(finished - self._finished[worker]):
            self.clocks.finished(worker, pushed=False)
            self._told[worker].popleft()
        self._finished[worker] = max(finished, self._finished[worker])

    def _least(self) -> int:
        """Stages of a worker may still pull what minibatches need that are not finished."""
        return min((own[0] for own in self._told.values()), default=self.clocks.slowest)


class WaveServer:
    """Pieces of one server. ``values``: of each piece, end to end. ``version``: which they are. ``desk``: on the first server."""

    def __init__(self, plan: WavePlan, number: int, values: Sequence[Tensor], version: int = 0, desk: Desk | None = None) -> None:
        self._pieces, self._desk, self._lock = plan.held_by(number), desk, threading.Lock()
        workers = range(len(plan.workers))
        self._weights = [GlobalWeights[Tensor](own.detach().clone(), workers, version) for own in values]

    def answer(self, frame: memoryview) -> Sequence[Buffer]:
        """What ``Listener`` asks for."""
        return encode(self.reply(decode(frame)))

    def reply(self, asked: Message) -> Message:
        """The answer to one message. ElasticError in one line for what is no question of ours."""
        if asked.kind is Kind.PULL:
            return self._values(asked)
        if asked.kind is Kind.PUSH:
            return self._count(asked)
        if asked.kind is Kind.LEFT and asked.arrays:
            with self._lock:
                for number in self._numbers(asked):
                    self._weights[number].left(asked.partition)
            return Message(Kind.VERSION, asked.partition)
        if self._desk is None or asked.kind not in (Kind.START, Kind.PUSHED, Kind.LEFT):
            raise ElasticError(
                f"a server of waves was asked {asked.kind.name}; expected PULL, PUSH, or at the first server START and others"
            )
        if asked.kind is Kind.START:
            version, least = self._desk.start(asked.partition, asked.version)
            return Message(Kind.STARTED, asked.partition, least, version)
        least = self._desk.pushed(asked.partition, asked.lease) if asked.kind is Kind.PUSHED else self._desk.left(asked.partition)
        return Message(Kind.STARTED, asked.partition, least)

    def held(self, version: int) -> dict[int, Tensor]:
        """By piece, its values of a version; ``LATEST``: of the last one."""
        with self._lock:
            return {number: own.values if version == LATEST else own.at(version) for number, own in enumerate(self._weights)}

    @property
    def pushes(self) -> int:
        """How many pushes of pieces have counted."""
        return sum(own.pushes for own in self._weights)

    def _values(self, asked: Message) -> Message:
        with self._lock:
            own = [self._weights[number] for number in self._numbers(asked)]
            for weights in own:
                weights.forget(asked.lease)
            found = [weights.values if asked.version == LATEST else weights.at(asked.version) for weights in own]
        return Message.of(Kind.VALUES, asked.partition, [torch.cat(found)], version=asked.version)

    def _count(self, asked: Message) -> Message:
        """A worker's part of a wave; arrays: numbers of pieces, and their updates end to end."""
        numbers, (_, update) = self._numbers(asked), asked.tensors()
        parts = torch.split(update, [len(self._weights[number].values) for number in numbers])
        with self._lock:
            for number, part in zip(numbers, parts, strict=True):
                self._weights[number].push(asked.partition, asked.lease, part.clone())
                self._weights[number].forget(asked.version)
        return Message(Kind.VERSION, asked.partition)

    def _numbers(self, asked: Message) -> list[int]:
        numbers: list[int] = asked.tensors()[0].tolist()
        if not all(0 <= number < len(self._pieces) for number in numbers):
            raise ElasticError(f"pieces {numbers[:8]} were asked for; expected numbers from 0 to {len(self._pieces) - 1}")
        return numbers
