"""What every rank of ``soap-run`` does: load the model, train by the strategy, measure, and check if asked to."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from itertools import islice
from time import perf_counter_ns
from typing import Any

import torch

from soap import api
from soap.cli.batches import Batch, drawn_batches, user_batches
from soap.errors import SoapError
from soap.runtime.trainer import OptimizerFactory, Trainer
from soap.strategy import Strategy
from soap.topology import DeviceKind, Topology
from soap.tracing.model import TracedModel

WARM_UP_STEPS = 2
"""Steps that are not counted: allocators and connections are set up in them."""


@dataclass(frozen=True)
class Job:
    """All that a rank must know. The order of tiles comes from one simulation, so that all ranks have the same."""

    model: str
    batch_dims: Mapping[str, int] | None
    topology: Topology
    strategies: Mapping[str, tuple[Strategy, tuple[int, ...]]]
    """Name -> strategy and order of its tiles; the first is the one that is asked for."""
    steps: int
    seed: int
    dtype: str | None
    optimizer: str
    learning_rate: float
    data: str | None
    backend: str
    device_kind: DeviceKind | None
    traced: bool


@dataclass
class Measured:
    """What training by one strategy gave. ``events``: (rank, task, kind, start, end) in nanoseconds, if it was traced."""

    losses: list[float] = field(default_factory=list)
    step_ns: list[int] = field(default_factory=list)
    bytes_moved: int = 0
    events: list[tuple[int, str, str, int, int]] = field(default_factory=list)

    @property
    def time_ns(self) -> int:
        """The median step after those that warm up, or the last one if there are no more."""
        return int(statistics.median(self.step_ns[WARM_UP_STEPS:] or self.step_ns[-1:]))


def train(job: Job) -> dict[str, Measured]:
    """Train by each strategy in turn, each from the model's own parameters. Returns what this rank saw."""
    model = api.load(job.model, batch_dims=job.batch_dims)
    return {name: _train(job, model, strategy, order) for name, (strategy, order) in job.strategies.items()}


def make_optimizer(name: str, learning_rate: float) -> OptimizerFactory:
    """``sgd`` or ``adam``."""
    kinds: dict[str, type[Any]] = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}
    return lambda tensors: kinds[name](tensors, lr=learning_rate)


def batches_for(job: Job, model: TracedModel) -> Iterator[Batch]:
    """The job's data; the same on every rank."""
    return drawn_batches(model, job.seed) if job.data is None else user_batches(job.data)


def _train(job: Job, model: TracedModel, strategy: Strategy, order: tuple[int, ...]) -> Measured:
    result = Measured()
    with closing(_trainer(job, model, strategy, order)) as trainer:
        batches = batches_for(job, model)
        for batch in islice(batches, job.steps):
            trainer.comm.barrier()
            start = perf_counter_ns()
            result.losses.append(trainer.step(*batch))
            _wait(trainer.device)
            result.step_ns.append(perf_counter_ns() - start)
        result.bytes_moved = _sent_per_step(trainer, job.steps)
        if job.traced:
            result.events = [(e.rank, e.name, e.kind.value, e.start_ns, e.end_ns) for e in trainer.trace(*next(batches))]
    if not all(map(_finite, result.losses)):
        raise SoapError(f"the loss became {result.losses[-1]}; expected a finite number: lower --lr")
    return result
