"""What every rank of ``soap-run`` does: load the model, check the first steps, train, measure, trace, save."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from soap.errors import RuntimeFailure
from soap.files import write_bytes_atomically
from soap.runtime.check import CheckResult, check
from soap.runtime.measure import WARM_UP_STEPS, StepTimes, measure_steps
from soap.runtime.redistribute import Traffic
from soap.runtime.trace import Event
from soap.runtime.trainer import Trainer
from soap.runtime.world import TIMEOUT_S
from soap.simulator.plan import Plan
from soap.topology import DeviceKind
from soap.tracing.model import TracedModel

OPTIMIZERS: Mapping[str, type[torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
}
"""Optimizers by name; all update each element by itself, which sharded parameters need."""

Batches = Callable[[int], Sequence[torch.Tensor]]


@dataclass(frozen=True)
class TrainJob:
    """Everything a rank needs, picklable. ``load`` and ``batches`` must be functions at the top of a module (or ``partial`` of such).

    ``batches`` makes, from the model, the function that gives the global batch of a step; equal on all ranks. ``reference_plan``: a second
    plan to measure for comparison (data parallelism), with its order.
    """

    load: Callable[[], TracedModel]
    plan: Plan
    order: tuple[int, ...]
    steps: int = 10
    warm_up: int = WARM_UP_STEPS
    check_steps: int = 0
    tolerance: float | None = None
    trace: bool = False
    optimizer: str = "sgd"
    optimizer_options: Mapping[str, Any] = field(default_factory=lambda: {"lr": 0.01})
    backend: str = "auto"
    device_kind: DeviceKind = "cpu"
    seed: int = 0
    batches: Callable[[TracedModel], Batches] | None = None
    comparison: tuple[Plan, tuple[int, ...]] | None = None
    save: str | None = None
    timeout_s: float = TIMEOUT_S


@dataclass(frozen=True)
class TrainReport:
    """What a run gave; equal on all ranks except for ``traffic``, which is the rank's own per step."""

    backend: str
    check: CheckResult | None
    times: StepTimes
    comparison: StepTimes | None
    traffic: Traffic
    events: tuple[Event, ...] = ()


def run_job(job: TrainJob) -> TrainReport:
    """The entry of each rank. Raises RuntimeFailure if the check does not hold."""
    optimizer_type = OPTIMIZERS.get(job.optimizer)
    if optimizer_type is None:
        raise RuntimeFailure(f"optimizer {job.optimizer!r}: expected one of {', '.join(OPTIMIZERS)}")

    def make_optimizer(parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
        factory: Callable[..., torch.optim.Optimizer] = optimizer_type
        return factory(parameters, **job.optimizer_options)

    model = job.load()
    batches = job.batches(model) if job.batches is not None else resampled_batches(model, job.seed)
    comparison = None
    with _trainer(job, model, (job.plan, job.order), make_optimizer) as trainer:
        checked = None
        if job.check_steps:
            checked = check(trainer, batches, make_optimizer, job.check_steps, job.tolerance)
            checked.require()
        before = trainer.traffic
        times = measure_steps(trainer, batches, job.steps, job.warm_up)
        traffic = _per_step(before, trainer.traffic, job.steps + job.warm_up)
        events = tuple(trainer.trace(*batches(trainer.steps))) if job.trace else ()
        if job.save is not None:
            _save(trainer, job.save)
        if job.comparison is not None:
            with _trainer(job, model, job.comparison, make_optimizer) as other:
                comparison = measure_steps(other, batches, job.steps, job.warm_up)
        return TrainReport(trainer.world.backend, checked, times, comparison, traffic, events)


def resampled_batches(model: TracedModel, seed: int) -> Batches:
    """Batches whose elements are drawn from the example inputs' own: legal token numbers stay legal. Masks stay as they are."""

    def batch(step: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(hash((seed, step)) % 2**63)
        result = []
        for example in model.example_inputs:
            values = example.detach().flatten().cpu()
            if values.dtype is not torch.bool and values.numel():
                values = values[torch.randint(values.numel(), (values.numel(),), generator=generator)]
            result.append(values.view(example.shape))
        return result

    return batch


def _trainer(job: TrainJob, model: TracedModel, plan: tuple[Plan, tuple[int, ...]], optimizer: Any) -> Trainer:
    return Trainer(
        model,
        plan[0],
        plan[1],
        optimizer=optimizer,
        backend=job.backend,
        device_kind=job.device_kind,
        seed=job.seed,
        timeout_s=job.timeout_s,
    )


def _per_step(before: Traffic, after: Traffic, steps: int) -> Traffic:
    def share(first: int, last: int) -> int:
        return (last - first) // max(1, steps)

    return Traffic(
        share(before.sent_bytes, after.sent_bytes),
        share(before.received_bytes, after.received_bytes),
        share(before.reduced_bytes, after.reduced_bytes),
        share(before.synchronized_bytes, after.synchronized_bytes),
    )


def _save(trainer: Trainer, path: str) -> None:
    """The whole state by the user's names, as ``torch.load(path, weights_only=True)`` reads it."""
    state = trainer.state_dict()
    if trainer.rank == 0:
        buffer = io.BytesIO()
        torch.save(state, buffer)
        write_bytes_atomically(Path(path), buffer.getvalue())
