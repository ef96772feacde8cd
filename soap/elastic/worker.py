"""A worker: takes a lease's batch, asks the owners for what it needs, computes the rest, and gives the gradients back. It holds no state:
what it knows besides the lease is the model's program and the data, so any other worker may do the same lease instead.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from soap.elastic.cut import Cut
from soap.elastic.faults import ElasticError
from soap.elastic.layout import Layout
from soap.elastic.owners import Address, Owners
from soap.tracing.execute import TracedModel
from soap.tracing.load import load_model


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
        begin = time.perf_counter()
        found = self.work_on(number, self._batches.batch(indices), dense_scale, sparse_scale, step)
        return replace(found, seconds=time.perf_counter() - begin)

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
