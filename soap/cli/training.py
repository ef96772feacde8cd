"""What every rank of ``soap-run`` does: load the model, check against one process if asked to, train by the strategies, measure."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from tqdm import tqdm

from soap.cli import checkpoints, compressing
from soap.cli.batches import Batches, ConvertedBatches, DrawnBatches, JoinedBatches, batch_size, by_rank, user_batches
from soap.cli.checkpoints import Checkpoints, Evaluated, Saver
from soap.cli.options import Reading
from soap.cli.updating import Updating
from soap.cluster.kinds import run_kind
from soap.cluster.topology import DeviceKind, Topology
from soap.emulation.placement import card_counters, run_evenly
from soap.errors import RuntimeFailure, SoapWarning
from soap.measure.iteration import WARM_UP_STEPS, StepTimes, measure_steps, peak_memory
from soap.plan.running.order import ExecutionOrder
from soap.runtime.check import CheckResult, check
from soap.runtime.comm.world import World, close_world, open_world
from soap.runtime.system import clock
from soap.runtime.trainer import Trainer
from soap.runtime.training_options import TrainingOptions
from soap.runtime.updates.optimizers import Optimizers
from soap.simulator.analysis.timeline import MeasuredEvent
from soap.strategy.config import Strategy
from soap.tracing.execute import TracedModel
from soap.tracing.record import ExportRecord

TRACED_STEPS = 5
WEIGHED_STEPS = 3
"""The first step makes the optimizer's states, the second is the first to have all of them, the third has what a step leaves behind."""
CHECKED_STEPS = 2
"""The second step shows what a wrong update in the first one does."""


@dataclass(frozen=True)
class Job:
    """What a rank must know. The orders of tiles come from one simulation, so all ranks have the same. ``strategies``: name -> strategy
    and order of its tiles; the first is the one that is checked, traced and saved. ``optimizer``: as ``--optimizer``, or all options of
    updating; what it leaves open is taken from the checkpoint, if the job goes on from one. ``emulated``: whether ranks are on emulated
    hosts. ``correct_momentum``, ``warm_up``: see ``--correct-momentum`` and ``--warm-up``. ``compressed``: name of a
    strategy -> parameters that it compresses, in order. ``weighed``: whether peak memory is measured.
    ``record``: what the model's file says of its export. ``journal``: the file for each step's loss (``soap.cli.checkpoints``).
    ``evaluated``: that of which the loss is asked for at the end. ``log``: as ``--log``."""

    model: str
    reading: Reading
    topology: Topology
    strategies: Mapping[str, tuple[Strategy, ExecutionOrder]]
    steps: int
    seed: int
    optimizer: str | Updating
    dtype: str | None = None
    accumulate: int = 1
    clip_norm: float | None = None
    correct_momentum: float | None = None
    warm_up: tuple[int, int] = (0, 0)
    compressed: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    compiled: bool = False
    data: str | None = None
    weights: str | None = None
    backend: str = "auto"
    device_kind: DeviceKind | None = None
    checked: bool = False
    traced: bool = False
    weighed: bool = False
    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    emulated: bool = False
    record: ExportRecord | None = None
    journal: str | None = None
    evaluated: Evaluated | None = None
    log: str | None = None

    @property
    def updating(self) -> Updating:
        """How parameters are updated."""
        return Updating((self.optimizer,)) if isinstance(self.optimizer, str) else self.optimizer

    def updating_by(self, name: str) -> Updating:
        """The same for the strategy of this name: what it compresses has momentum before that."""
        return replace(self.updating, corrected=self.compressed.get(name, ()))

    @property
    def main(self) -> str:
        """Name of the first strategy."""
        return next(iter(self.strategies))


@dataclass(frozen=True)
class Outcome:
    """What all ranks saw together. ``iterations``: the events of each traced iteration, empty if none was to be traced. ``saved``: the
    last checkpoint's path, if there is one. ``peak_bytes``: of each rank, if it was to be measured. ``evaluation``: the mean loss
    on other data, if it was asked for. ``loss_scaling``: the scaler's state at the end, if the loss was scaled."""

    backend: str
    measured: Mapping[str, StepTimes]
    check: CheckResult | None
    iterations: tuple[tuple[MeasuredEvent, ...], ...]
    saved: str | None = None
    peak_bytes: tuple[int, ...] | None = None
    evaluation: float | None = None
    loss_scaling: Mapping[str, Any] | None = None


def train(job: Job) -> Outcome:
    """Train by each strategy in turn, each from the model's own parameters."""
    with warnings.catch_warnings(action="ignore", category=SoapWarning):  # the command has shown the warnings, once for all ranks
        model = checkpoints.load_weighed(job)
    batches = batches_of(job, model)
    checkpoints.require_possible(job, model)
    with in_world(job) as world:
        optimizer = job.updating.recipe().optimizer
        found = _check(job, model, batches, optimizer) if job.checked else None
        saver = Saver(job.checkpoints, job.steps)
        results = {name: _measure(job, model, name, batches, saver if name == job.main else None) for name in job.strategies}
        measured = {name: own for name, (own, _, _) in results.items()}
        traced = _trace(job, model, batches) if job.traced else ()
        held = _weigh(job, model, batches, world.device) if job.weighed else None
        return Outcome(world.backend, measured, found, traced, saver.saved, held, *results[job.main][1:])


@contextmanager
def in_world(job: Job) -> Iterator[World]:
    """Within the context this process is one of the job's ranks, whatever trainers are made."""
    world = open_world(job.topology.device_count, job.device_kind or run_kind(job.topology), job.backend)
    try:
        yield world
    finally:
        close_world(world)


def _check(job: Job, model: TracedModel, batches: Batches, optimizer: Optimizers) -> CheckResult:
    trainer = make_trainer(job, model, job.main)
    return check(trainer, by_rank(batches, trainer), optimizer, min(CHECKED_STEPS, job.steps), whole=batches)


def batches_of(job: Job, model: TracedModel) -> Batches:
    """The batches of the job, by step."""
    batches: Batches = DrawnBatches(model, job.seed) if job.data is None else user_batches(job.data, batch_size(model))
    batches = converted(job, batches)
    return JoinedBatches(batches, job.accumulate) if job.accumulate > 1 else batches


def converted(job: Job, batches: Batches) -> Batches:
    """The batches in the type that is computed in."""
    return batches if job.dtype is None else ConvertedBatches(batches, getattr(torch, job.dtype))


def _measure(
    job: Job, model: TracedModel, name: str, batches: Batches, saver: Saver | None
) -> tuple[StepTimes, float | None, Mapping[str, Any] | None]:
    """Run all steps of the job, then evaluate; with it the state of the loss's scaler. The first few steps are not timed."""
    trainer = make_trainer(job, model, name)
    if saver is not None and job.log is not None and trainer.rank == 0:
        trainer.on_step = checkpoints.logger(job.log, after=job.checkpoints.resumed_at)
    if job.checkpoints.resume is not None:
        _resume(job, trainer, job.checkpoints.resume)
    warm_up = min(WARM_UP_STEPS, job.steps - 1)
    hidden = True if trainer.rank else None  # None: shown if standard error is a terminal
    with tqdm(total=job.steps, desc=name, unit="step", disable=hidden, leave=False) as bar:

        def after(step: int, loss: float) -> None:
            show(bar, f"loss {loss:.4g}")
            if saver is not None and job.journal is not None and trainer.rank == 0:
                checkpoints.note_step(job.journal, step, loss)  # before a checkpoint says that the step is done
            if saver is not None:
                saver.after_step(trainer)

        card = card_counters if job.emulated else None
        times = measure_steps(trainer, by_rank(batches, trainer), job.steps - warm_up, warm_up, on_step=after, card=card)
    scaled = None if trainer.scaler is None else trainer.scaler.state()
    return times, checkpoints.evaluate(job, model, trainer) if saver is not None else None, scaled


def _resume(job: Job, trainer: Trainer, checkpoint: str) -> None:
    """Go on from a checkpoint. The command line overrules the checkpoint."""
    optimizer = trainer.optimizer
    before = [dict(group) for group in optimizer.param_groups] if optimizer is not None else []
    trainer.load(checkpoint)
    trainer.seed = job.seed
    if optimizer is None:
        return
    begun, wanted = ([group.get("initial_lr") for group in groups] for groups in (optimizer.param_groups, before))
    if trainer.schedule.name is not None and job.updating.learning_rate is not None and begun != wanted:
        raise RuntimeFailure(
            f"--lr {job.updating.learning_rate:g}: the checkpoint's schedule began at other learning rates, {begun} instead of {wanted}; "
            "leave --lr out"
        )
    scheduled = {"lr", "momentum", "betas"} if trainer.schedule.name is not None else set()
    own = iter(zip(optimizer.param_groups, before, strict=True))
    for member in trainer.layout.members:
        for _ in range(trainer.layout.group_count(member)):
            group, asked = next(own)
            group.update({key: asked[key] for key in getattr(member.make, "explicit", ()) if key not in scheduled})


def _trace(job: Job, model: TracedModel, batches: Batches) -> tuple[tuple[MeasuredEvent, ...], ...]:
    """The events of some iterations on one batch, after others that warm up. One iteration alone would be noisy."""
    trainer = make_trainer(job, model, job.main)
    given = by_rank(batches, trainer)
    for step in range(WARM_UP_STEPS):
        trainer.step(*given(step))
    traced = [trainer.trace(*given(WARM_UP_STEPS)) for _ in range(TRACED_STEPS)]
    return tuple(tuple((event.rank, event.name, event.kind.value, event.start_ns, event.end_ns) for event in events) for events in traced)


def _weigh(job: Job, model: TracedModel, batches: Batches, device: torch.device) -> tuple[int, ...]:
    """Each rank's peak memory, from before its shards are made to the end of a step with all of the optimizer's states. The loaded
    model is not counted: it was there before. Ranks are given whole batches, as is predicted."""
    batch = batches(0)
    gc.collect()
    with peak_memory(device) as peak:
        trainer = make_trainer(job, model, job.main)
        own = [tensor.clone() for tensor in batch]
        for _ in range(WEIGHED_STEPS):
            trainer.step(*own)
    return tuple(trainer.comm.gather(peak.bytes))


def make_trainer(job: Job, model: TracedModel, name: str) -> Trainer:
    """A trainer of the model's own parameters by the strategy of this name."""
    strategy, order = job.strategies[name]
    recipe = job.updating_by(name).recipe()
    options = TrainingOptions(
        optimizer=recipe.optimizer,
        groups=recipe.groups,
        schedule=recipe.schedule,
        backend=job.backend,
        device_kind=job.device_kind,
        seed=job.seed,
        accumulate=job.accumulate,
        clip_norm=job.clip_norm,
        compressing=compressing.training_of(job.correct_momentum, job.warm_up),
        compiled=job.compiled,
    )
    with clock.paused():  # it is made at this machine's speed
        trainer = Trainer(model, (strategy, job.topology), order, options)
        checkpoints.fill_weights(job, trainer)
    if job.emulated:
        run_evenly()  # all groups' threads exist now
    return trainer


def show(bar: tqdm[Any], text: str) -> None:
    """One more step, and a few words."""
    bar.set_postfix_str(text, refresh=False)
    bar.update()
