"""The options of training by a plan, as one value that ``soap.Trainer``, ``soap.tune``, runners and commands share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias, TypedDict, Unpack

import torch

from soap.cluster.topology import DeviceKind
from soap.errors import RuntimeFailure
from soap.runtime.comm.world import TIMEOUT_S
from soap.runtime.compression.peer import AS_IT_IS, CompressedTraining
from soap.runtime.updates.loss_scaling import LossScaling
from soap.runtime.updates.optimizers import GroupOptions, Optimizers, Recipe, ScheduleFactory, plain_sgd


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """One step of training, as rank 0 saw it.

    ``step``: its number, from 1; a training that goes on from a checkpoint counts on. ``loss``: of the whole batch. ``seconds``: from the
    step's beginning to its end on this rank; a GPU may still be at work then. ``learning_rates``: of the optimizer's parameter groups in
    this step; empty if rank 0 updates no parameter. ``gradient_norm``: before clipping; None without clipping.
    """

    step: int
    loss: float
    seconds: float
    learning_rates: tuple[float, ...] = ()
    gradient_norm: float | None = None

    def scalars(self) -> dict[str, float]:
        """Name -> number, as loggers take them: ``train/loss``, ``train/seconds``, ``train/learning_rate`` (with further groups
        ``train/learning_rate_1`` and so on), ``train/gradient_norm``."""
        found = {"train/loss": self.loss, "train/seconds": self.seconds}
        for number, rate in enumerate(self.learning_rates):
            found["train/learning_rate" + (f"_{number}" if number else "")] = rate
        return found if self.gradient_norm is None else {**found, "train/gradient_norm": self.gradient_norm}


OnStep: TypeAlias = Callable[[StepMetrics], None]
"""Called on rank 0 behind each step."""


class TrainingKeywords(TypedDict, total=False):
    """The fields of ``TrainingOptions``, where they are given by name."""

    optimizer: Optimizers
    groups: GroupOptions | None
    schedule: ScheduleFactory | None
    clip_norm: float | None
    loss_scaling: LossScaling | None
    compressing: CompressedTraining
    lazy_sparse: bool
    accumulate: int
    seed: int
    dtype: torch.dtype | None
    compiled: bool
    take_over: bool
    backend: str
    device_kind: DeviceKind | None
    timeout_s: float
    on_step: OnStep | None


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """How to train. RuntimeFailure in one line for an impossible value.

    ``optimizer``: a function that makes any torch optimizer from a list of tensors (the parts of parameters that a rank owns); or a mapping
    from name patterns to such functions. If its update is not elementwise (found by trying it, see ``soap.runtime.updates.trial``), the
    plan must keep its parameters whole. ``groups``: (parameter's name, whole shape) -> its options that differ, such as
    ``{"weight_decay": 0.0}``; ``optimizer`` then gets torch's parameter groups. ``schedule``: a function that makes a schedule of
    ``torch.optim.lr_scheduler`` from the optimizer. It steps after each update, with the loss if it takes a metric. ``clip_norm``: scale
    gradients to at most this global norm; where some are compressed, each of N ranks scales its own, all together, to at most N^(-1/2) of
    it. ``loss_scaling``: how the loss is scaled; None: as ``torch.amp.GradScaler`` does by default if the model was loaded with
    ``autocast="float16"``, else not at all; not where gradients are compressed. ``compressing``: momentum correction and warm-up of the
    parameters that the plan compresses.
    ``lazy_sparse``: rows of sparse parameters that a step does not look up stay as they are, whatever the optimizer does with zero
    gradients (see ``row_update``).

    ``accumulate``: micro-batches per step. Loss and gradients are the mean over the micro-batches: if a loss is itself a mean over tokens,
    a micro-batch with few tokens weighs as much as one with many. ``seed``: of dropout. ``dtype``: compute in this floating-point type
    instead of the model's own. ``compiled``: use ``torch.compile``, which makes the first step slow. ``take_over``: train in the model's
    own memory where a rank keeps a parameter whole; ``model.parameters`` then follow the training, and all others become meta tensors, so
    that a rank of a pipeline does not hold the other stages. Nor does it hold constants that it does not read, or others twice.

    ``backend``: ``gloo``, ``nccl``, or ``auto`` (by the devices). ``device_kind``: kind of the ranks' devices; None: the cluster's.
    ``timeout_s``: seconds to wait for ranks that do not answer. ``on_step``: called on rank 0 behind each step with what it showed
    (``StepMetrics``), to be logged; the next step begins when it returns, and its error ends the training.
    """

    optimizer: Optimizers = plain_sgd
    groups: GroupOptions | None = None
    schedule: ScheduleFactory | None = None
    clip_norm: float | None = None
    loss_scaling: LossScaling | None = None
    compressing: CompressedTraining = AS_IT_IS
    lazy_sparse: bool = False
    accumulate: int = 1
    seed: int = 0
    dtype: torch.dtype | None = None
    compiled: bool = False
    take_over: bool = False
    backend: str = "auto"
    device_kind: DeviceKind | None = None
    timeout_s: float = TIMEOUT_S
    on_step: OnStep | None = None

    def __post_init__(self) -> None:
        if self.accumulate < 1 or not (self.clip_norm is None or self.clip_norm > 0):
            wrong = f"accumulate {self.accumulate}, clip_norm {self.clip_norm}"
            raise RuntimeFailure(f"{wrong}: expected at least 1 micro-batch and a norm above 0")

    @property
    def recipe(self) -> Recipe:
        """How parameters are updated."""
        return Recipe(self.optimizer, self.groups, self.schedule)

    def with_changes(self, **changes: Unpack[TrainingKeywords]) -> TrainingOptions:
        """A copy with these fields changed."""
        return replace(self, **changes)


DEFAULT_TRAINING = TrainingOptions()
