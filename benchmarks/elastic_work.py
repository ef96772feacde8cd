"""How long an emulated device takes for each part of a lease, measured part by part with nobody else in between.

The worker's parts are those of ``Worker.work``, between its questions, which are answered at once; an owner's are the answers of a
``Store``. Both are asked what training asks, for batches of the data. Times are the device's: processor time by its share.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.shared_processor import SharedProcessor
from soap.elastic.layout import Layout, Lookups, Place, gradient_of_rows, route
from soap.elastic.leases import Steps
from soap.elastic.messages import Kind, Message, decode, encode
from soap.elastic.simulation.design import Lane
from soap.elastic.store import Keeping
from soap.elastic.worker import Batches, Owners, Source, Worker
from soap.runtime.updates.optimizers import OptimizerFactory

LEASES = 5
"""Of which the first one does not count."""

Key = tuple[str, int]
"""Kind of work, and number of the partition in the layout's order; 0 for a worker's."""


@dataclass(frozen=True)
class MeasuredWork:
    """``Work`` as measured. ``times_ns``: by key."""

    times_ns: Mapping[Key, int]
    places: tuple[Place, ...]
    control_ns: int

    def front_ns(self, lane: Lane) -> int:
        """See ``Work``."""
        return self.times_ns["front", 0]

    def rest_ns(self, lane: Lane) -> int:
        """See ``Work``."""
        return self.times_ns["rest", 0]

    def look_up_ns(self, place: Place) -> int:
        """See ``Work``."""
        return self.times_ns["look up", self.places.index(place)]

    def gradient_ns(self, place: Place) -> int:
        """See ``Work``."""
        return self.times_ns["gradient", self.places.index(place)]

    def count_ns(self, place: Place) -> int:
        """See ``Work``."""
        return self.times_ns["count", self.places.index(place)]

    def update_ns(self, place: Place) -> int:
        """See ``Work``."""
        return self.times_ns["update", self.places.index(place)]

    def pull_ns(self, place: Place) -> int:
        """See ``Work``."""
        return self.times_ns["pull", self.places.index(place)]


class Measuring:
    """Measures on a device, in a host's process. ``steps``: which leases are one update together; None: each is one."""

    def __init__(
        self,
        device: SharedProcessor,
        source: Source,
        batches: Batches,
        layout: Layout,
        optimizer: OptimizerFactory,
        steps: Steps | None = None,
    ) -> None:
        self._device, self._source, self._batches = device, source, batches
        self._layout, self._optimizer, self._steps = layout, optimizer, steps
        self._values = source.load().parameters
        self._found: dict[Key, list[int]] = {}

    def all(self, batch: int) -> dict[Key, int]:
        """Medians in nanoseconds."""
        worker = Worker(self._source, self._batches, self._layout, _nobody, b"")
        asking = worker._owners = _Answered(self._layout, self._values)
        every = np.arange(len(self._batches))
        leases = [np.take(every, np.arange(number * batch, (number + 1) * batch), mode="wrap") for number in range(LEASES)]
        for number, lease in enumerate(leases):
            asking.begin(self._device)
            worker.work(number, lease)
            first, *others = asking.end()
            self._add("front", 0, first)
            self._add("rest", 0, sum(others))
        for server in range(self._layout.servers):
            self._owner(server, worker, leases)
        return {key: int(median(own[1:])) for key, own in self._found.items()}

    def _owner(self, server: int, worker: Worker, leases: Sequence[np.ndarray[Any, Any]]) -> None:
        places = self._layout.places
        with tempfile.TemporaryDirectory() as folder:
            keeping = Keeping(folder, self._optimizer, snapshot_every_pushes=None)
            store = keeping.store(server, self._layout, self._source, self._steps)
            own = [place for place in places if place.server == server]
            try:
                for number in range(LEASES * self._together):
                    inputs = self._batches.batch(leases[number % LEASES])
                    lookups = worker._cut(inputs).look_ups(inputs)
                    for place in own:
                        self._partition(store, places.index(place), place, number, lookups)
            finally:
                store.close()

    def _partition(self, store: Any, position: int, place: Place, lease: int, lookups: Mapping[str, Lookups]) -> None:
        table, step = place.partition.parameter, lease // self._together if self._steps is not None else 0
        if table not in lookups:
            piece = torch.rand(place.partition.cell, dtype=self._layout.joined(self._values).dtype)
            question = Message(Kind.PULL, place.number, version=step)
            self._read("pull", position, store, question, first=lease % self._together == 0)
            self._add("count", position, self._answer(store, Message.of(Kind.PUSH, place.number, [piece], lease=lease)))
            return
        places = self._layout.tables[table]
        own = route([one.partition for one in places], lookups[table])[places.index(place)]
        gradient = torch.rand(own.samples, place.partition.cell[1], dtype=self._values[table].dtype) / own.samples
        question = Message.of(Kind.LOOK_UP, place.number, own.tensors(), version=step)
        self._read("look up", position, store, question, first=lease % self._together == 0)
        before = self._device.busy_ns
        with self._device.computing():
            gradient_of_rows(own, gradient)
        alone = self._device.busy_ns - before
        whole = self._answer(store, Message.of(Kind.PUSH_OUTPUTS, place.number, (gradient, *own.tensors()), lease=lease))
        self._add("gradient", position, min(alone, whole - 1))
        self._add("count", position, max(1, whole - alone))

    @property
    def _together(self) -> int:
        """Leases of an update."""
        return 1 if self._steps is None else self._steps.workers

    def _read(self, kind: str, position: int, store: Any, question: Message, *, first: bool) -> None:
        """``first``: of a step, so that the update with the step before comes before the answer."""
        whole = self._answer(store, question)
        if self._steps is not None and first:
            alone = self._answer(store, question)
            self._add("update", position, whole - alone)
            whole = alone
        self._add(kind, position, whole)

    def _answer(self, store: Any, message: Message) -> int:
        """Device time of an answer, from a frame to a frame."""
        frame = memoryview(b"".join(bytes(part) for part in encode(message)))
        before = self._device.busy_ns
        with self._device.computing():
            answer = store.answer(decode(frame))
            encode(answer)
        assert answer.kind is not Kind.ERROR, bytes(answer.arrays[0])
        return self._device.busy_ns - before

    def _add(self, kind: str, position: int, time_ns: int) -> None:
        self._found.setdefault((kind, position), []).append(max(1, time_ns))


class _Answered(Owners):
    """Owners that answer at once; computation between questions is counted."""

    def __init__(self, layout: Layout, values: Mapping[str, Tensor]) -> None:
        super().__init__(layout, _nobody, b"")
        self._values, self._vector = values, layout.joined(values) if layout.dense else torch.zeros(0)
        self._device: SharedProcessor | None = None
        self._parts: list[int] = []

    def begin(self, device: SharedProcessor) -> None:
        """A lease begins."""
        self._device, self._parts, self._before_ns = device, [], device.busy_ns
        device.take()

    def end(self) -> list[int]:
        """Device times before, between and behind the questions."""
        assert self._device is not None
        self._device.give()
        return [*self._parts, self._device.busy_ns - self._before_ns]

    def _ask(self, asked: Sequence[tuple[Place, Message]]) -> list[Message]:
        assert self._device is not None
        self._device.give()
        self._parts.append(self._device.busy_ns - self._before_ns)
        answers = [self._to(place, message) for place, message in asked]
        self._before_ns = self._device.busy_ns
        self._device.take()
        return answers

    def _to(self, place: Place, message: Message) -> Message:
        if message.kind is Kind.LOOK_UP:
            dtype = self._values[place.partition.parameter].dtype
            sums: Tensor = torch.rand(len(message.arrays[1]) - 1, place.partition.cell[1], dtype=dtype)
            return Message.of(Kind.SUMS, place.number, [sums])
        if message.kind is Kind.PULL:
            return Message.of(Kind.VALUES, place.number, [place.partition.of(self._vector).clone()])
        return Message(Kind.VERSION, place.number)


def _nobody(server: int) -> tuple[str, int]:
    raise AssertionError(f"server {server} is asked")
