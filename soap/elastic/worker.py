"""A worker: takes a lease's batch, asks the owners for what it needs, computes the rest, and gives the gradients back. It holds no state:
what it knows besides the lease is the model's program and the data, so any other worker may do the same lease instead.

What a worker asks of the owners of partitions: sums of rows, values of dense variables, and to count its gradients.

Each partition has a connection of its own, so that those of one server are worked on at the same time; all are asked before any answer is
read. An owner that is lost is asked again where it comes back: look-ups change nothing, and a push that has counted counts no second time.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from soap.elastic.cut import Cut
from soap.elastic.faults import ElasticError
from soap.elastic.layout import Layout, Lookups, Place, combine, divide, route
from soap.elastic.messages import Kind, Message, checked, decode, encode
from soap.elastic.transport import Connection, PeerLost, connect
from soap.runtime.system import clock
from soap.tracing.execute import TracedModel
from soap.tracing.load import load_model

PATIENCE_S = 120.0
"""How long a server may be away before its workers give up."""
PAUSE_S = 0.05

Address = Callable[[int], tuple[str, int]]
"""Where a server listens now; waits while it is being started anew."""
Routed = Mapping[str, Sequence[Lookups]]
"""By table, the look-ups of each of its partitions."""
ANSWERS = {Kind.LOOK_UP: Kind.SUMS, Kind.PULL: Kind.VALUES, Kind.PUSH_OUTPUTS: Kind.VERSION, Kind.PUSH: Kind.VERSION}
"""Question -> what answers it."""


class Owners:
    """The owners of a layout's partitions, as one worker sees them. ``addresses``: asked whenever a connection is made."""

    def __init__(self, layout: Layout, addresses: Address, secret: bytes) -> None:
        self._layout, self._addresses, self._secret = layout, addresses, secret
        self._connections: dict[tuple[int, int], Connection] = {}
        self._sent = self._received = 0

    @property
    def sent_bytes(self) -> int:
        """Bytes of all frames sent."""
        return self._sent + sum(peer.sent_bytes for peer in self._connections.values())

    @property
    def received_bytes(self) -> int:
        """Bytes of all frames received."""
        return self._received + sum(peer.received_bytes for peer in self._connections.values())

    def route(self, lookups: Mapping[str, Lookups]) -> Routed:
        """By table, what each of its partitions is asked for."""
        return {table: route([place.partition for place in self._layout.tables[table]], whole) for table, whole in lookups.items()}

    def read(self, lookups: Routed, step: int = 0) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """By table, (samples, columns): what its rows add up to; and the dense variables. All owners are asked together: neither waits for
        the other. ``step``: of the lease, where updates are those of steps."""
        asked = [
            (place, Message.of(Kind.LOOK_UP, place.number, own.tensors(), version=step))
            for table, parts in lookups.items()
            for place, own in zip(self._layout.tables[table], parts, strict=True)
        ]
        answers = (answer.tensors()[0] for answer in self._ask([*asked, *self._pulling(self._layout.dense, step)]))
        sums = {}
        for table in lookups:
            places = self._layout.tables[table]
            sums[table] = combine([place.partition for place in places], [next(answers) for _ in places])
        return sums, self._dense([*answers])

    def pull(self, step: int = 0) -> dict[str, Tensor]:
        """The dense variables, as they are now; ``step``: of the lease."""
        return self._dense(self.values(self._layout.dense, step))

    def push(self, lease: int, lookups: Routed, sums: Mapping[str, Tensor], dense: Mapping[str, Tensor]) -> None:
        """Count a lease's gradients, of the sums and of the dense variables, everywhere. Returns when all owners have written them down."""
        asked = []
        for table, routed in lookups.items():
            places = self._layout.tables[table]
            parts = divide([place.partition for place in places], sums[table])
            for place, own, part in zip(places, routed, parts, strict=True):
                asked.append((place, Message.of(Kind.PUSH_OUTPUTS, place.number, (part, *own.tensors()), lease=lease)))
        vector = self._layout.joined(dense) if self._layout.dense else None
        for place in self._layout.dense:
            assert vector is not None
            asked.append((place, Message.of(Kind.PUSH, place.number, [place.partition.of(vector)], lease=lease)))
        self._ask(asked)

    def values(self, places: Sequence[Place], step: int = 0) -> list[Tensor]:
        """The values of these partitions. Those of tables are asked for at the end of training alone."""
        return [answer.tensors()[0] for answer in self._ask(self._pulling(places, step))]

    def parameters(self, step: int = 0) -> dict[str, Tensor]:
        """All values, whole; weights of tables travel for it. Ends all connections."""
        try:
            return {**{name: whole(own, self.values(own, step)) for name, own in self._layout.tables.items()}, **self.pull(step)}
        finally:
            self.close()

    def close(self) -> None:
        """End all connections."""
        for key in [*self._connections]:
            self._drop(key)

    def _pulling(self, places: Sequence[Place], step: int) -> list[tuple[Place, Message]]:
        return [(place, Message(Kind.PULL, place.number, version=step)) for place in places]

    def _dense(self, pieces: Sequence[Tensor]) -> dict[str, Tensor]:
        return self._layout.apart(whole(self._layout.dense, pieces)) if pieces else {}

    def _ask(self, asked: Sequence[tuple[Place, Message]]) -> list[Message]:
        """All answers, in order. ElasticError if one is an error, or an owner stays away."""
        clock.catch_up()
        try:
            return self._answers(asked)
        finally:
            clock.resume()

    def _answers(self, asked: Sequence[tuple[Place, Message]]) -> list[Message]:
        answers: dict[int, Message] = {}
        deadline = time.monotonic() + PATIENCE_S
        try:
            while True:
                left = [number for number in range(len(asked)) if number not in answers]
                under_way = [number for number in left if self._sent_to(*asked[number])]
                for number in under_way:
                    place, question = asked[number]
                    answer = self._answer_of(place)
                    if answer is not None:
                        answers[number] = checked(answer, ANSWERS[question.kind])
                if len(answers) == len(asked):
                    return [answers[number] for number in range(len(asked))]
                if time.monotonic() > deadline:
                    away = sorted({asked[number][0].server for number in left if number not in answers})
                    raise ElasticError(
                        f"servers {', '.join(map(str, away))} are away for {PATIENCE_S:g} s; expected Ray to start them again"
                    )
                time.sleep(PAUSE_S)
        except BaseException:
            self.close()  # answers may be under way
            raise

    def _sent_to(self, place: Place, message: Message) -> bool:
        """Whether the question is under way; else the owner is away."""
        key = (place.server, place.number)
        try:
            if key not in self._connections:
                self._connections[key] = connect(*self._addresses(place.server), self._secret)
            self._connections[key].send(encode(message))
        except PeerLost:
            self._drop(key)
            return False
        return True

    def _answer_of(self, place: Place) -> Message | None:
        key = (place.server, place.number)
        try:
            return decode(self._connections[key].receive())
        except PeerLost:
            self._drop(key)
            return None

    def _drop(self, key: tuple[int, int]) -> None:
        peer = self._connections.pop(key, None)
        if peer is not None:
            self._sent, self._received = self._sent + peer.sent_bytes, self._received + peer.received_bytes
            peer.close()


def whole(places: Sequence[Place], values: Sequence[Tensor]) -> Tensor:
    """A parameter from the values of all its partitions, in their order."""
    return values[0] if len(values) == 1 else torch.cat(list(values), places[0].partition.axis)


class Batches(Protocol):
    """Training data: samples by number, each a tuple of the model's inputs without the batch dimension. Each worker gets a copy."""

    def __len__(self) -> int:
        """How many samples there are."""

    def batch(self, indices: Sequence[int]) -> Sequence[Tensor]:
        """The model's inputs for these samples."""


@dataclass(frozen=True)
class InMemory:
    """Samples in tensors whose dimension 0 counts them."""

    inputs: tuple[Tensor, ...]

    def __len__(self) -> int:
        return len(self.inputs[0])

    def batch(self, indices: Sequence[int]) -> Sequence[Tensor]:
        """See ``Batches``."""
        chosen = torch.as_tensor(np.asarray(indices, np.int64))
        return [whole.index_select(0, chosen) for whole in self.inputs]


@dataclass(frozen=True)
class OfDataset:
    """Samples of a torch dataset with a length, such as ``soap.data.Preprocessed``."""

    dataset: Dataset[Any]

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def batch(self, indices: Sequence[int]) -> Sequence[Tensor]:
        """See ``Batches``."""
        numbers = [int(index) for index in indices]
        several = getattr(self.dataset, "__getitems__", None)
        found: Sequence[Tensor] = default_collate(several(numbers) if several else [self.dataset[i] for i in numbers])
        return found


@dataclass(frozen=True)
class Source:
    """The model as every process of a run loads it. ``seed``: of what it draws (dropout). ``reading``: more arguments of ``load_model``."""

    spec: str
    dtype: str | None = None
    seed: int = 0
    reading: Mapping[str, Any] = field(default_factory=dict)

    def load(self, *, plan_only: bool = False) -> TracedModel:
        """The model with all its values; ``plan_only``: with none."""
        torch.manual_seed(self.seed)
        return load_model(self.spec, dtype=self.dtype, plan_only=plan_only, **self.reading)


@dataclass(frozen=True)
class Report:
    """What a worker says of a lease when all owners have counted it."""

    loss: float
    seconds: float
    sent_bytes: int
    received_bytes: int


class Worker:
    """``addresses``: where servers listen."""

    def __init__(self, source: Source, batches: Batches, layout: Layout, addresses: Address, secret: bytes) -> None:
        self._source, self._batches = source, batches
        self._model, self._tables = source.load(), tuple(layout.tables)
        cut = Cut(self._model, self._tables)
        self._frozen = {name: self._model.parameters[name] for name in cut.frozen}
        self._cuts = {_shapes(self._model.example_inputs): cut}
        self._model.let_go([*cut.tables, *cut.dense])
        self._owners = Owners(layout, addresses, secret)

    def work(self, number: int, indices: Sequence[int], dense_scale: float = 1.0, sparse_scale: float = 1.0, step: int = 0) -> Report:
        """Do a lease: its number, and the samples of its batch. Returns when all owners have counted its gradients, those of the dense
        variables and of tables each times its scale. ``step``: the lease's, where updates are those of steps."""
        return self.work_on(number, self._batches.batch(indices), dense_scale, sparse_scale, step)

    def work_on(self, number: int, inputs: Sequence[Tensor], dense_scale: float, sparse_scale: float, step: int = 0) -> Report:
        """The same with a batch that is here."""
        begin = time.perf_counter()
        sent, received = self._owners.sent_bytes, self._owners.received_bytes
        cut = self._cut(inputs)
        lookups = cut.look_ups(inputs)
        routed = self._owners.route(lookups)
        sums, dense = self._owners.read(routed, step)
        found = cut.gradients(inputs, lookups, sums, {**dense, **self._frozen}, seed=self._source.seed, step=number)
        self._owners.push(number, routed, _scaled(found.sums, sparse_scale), _scaled(found.dense, dense_scale))
        moved = self._owners.sent_bytes - sent, self._owners.received_bytes - received
        return Report(found.loss, time.perf_counter() - begin, *moved)

    def close(self) -> None:
        """End all connections."""
        self._owners.close()

    def process(self) -> int:
        """This process's number."""
        return os.getpid()

    def _cut(self, inputs: Sequence[Tensor]) -> Cut:
        """The cut model for a batch of this size."""
        shapes = _shapes(inputs)
        if shapes not in self._cuts:
            known = next(iter(self._cuts))
            if [len(shape) for shape in shapes] != [len(shape) for shape in known]:
                raise ElasticError(f"a batch has inputs of shapes {[*shapes]}; expected as many dimensions as {[*known]}: check the data")
            self._cuts[shapes] = Cut(self._model.resized(shapes), self._tables)
        return self._cuts[shapes]


def _scaled(gradients: Mapping[str, Tensor], scale: float) -> Mapping[str, Tensor]:
    return gradients if scale == 1 else {name: gradient * scale for name, gradient in gradients.items()}


def _shapes(inputs: Sequence[Tensor]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(tensor.shape) for tensor in inputs)
