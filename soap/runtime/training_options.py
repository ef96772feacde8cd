"""How a model is trained by a plan, as one value: for ``soap.Trainer``, ``soap.tune``, runners and the commands alike."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypedDict, Unpack

import torch

from soap.cluster.topology import DeviceKind
from soap.errors import RuntimeFailure
from soap.runtime.comm.world import TIMEOUT_S
from soap.runtime.updates.optimizers import GroupOptions, Optimizers, Recipe, ScheduleFactory, plain_sgd


class TrainingKeywords(TypedDict, total=False):
    """The fields of ``TrainingOptions``, where they are given by name."""

    optimizer: Optimizers
    groups: GroupOptions | None
    schedule: ScheduleFactory | None
    clip_norm: float | None
    lazy_sparse: bool
    accumulate: int
    seed: int
    dtype: torch.dtype | None
    compiled: bool
    take_over: bool
    backend: str
    device_kind: DeviceKind | None
    timeout_s: float


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """How to train. RuntimeFailure in one line where a value cannot be.

    ``optimizer``: makes any torch optimizer from a list of tensors, the parts of parameters that a rank keeps; or pattern of names -> what
    makes it. If its update is not elementwise (found by trying it, see ``soap.runtime.updates.trial``), the plan must keep its parameters
    whole. ``groups``: from a parameter's name and whole shape to what is different for it, such as ``{"weight_decay": 0.0}``;
    ``optimizer`` is then given torch's parameter groups. ``schedule``: makes a schedule of ``torch.optim.lr_scheduler`` from the optimizer;
    it steps behind each update, with the loss if it asks for a metric. ``clip_norm``: scale gradients to at most this global norm.
    ``lazy_sparse``: rows of sparse parameters that a step does not look up stay as they are, whatever the optimizer does with zeros (see
    ``row_update``).

    ``accumulate``: micro-batches per step; loss and gradients are the mean over the micro-batches of each one's own: where a loss is a mean
    over tokens that count, a micro-batch with few of them weighs as much as one with many. ``seed`` is that of dropout. ``dtype``: compute
    in this floating-point type instead of the model's own. ``compiled``: by ``torch.compile``, which takes its time in the first step.
    ``take_over``: train in the model's own memory where a rank keeps a parameter whole; ``model.parameters`` then follow the training, and
    lose the values of sparse tables that servers keep.

    ``backend``: ``gloo``, ``nccl``, or ``auto`` by the devices. ``device_kind``: of the ranks' devices; None: as the cluster's are.
    ``timeout_s``: seconds after which ranks that do not answer are given up.
    """

    optimizer: Optimizers = plain_sgd
    groups: GroupOptions | None = None
    schedule: ScheduleFactory | None = None
    clip_norm: float | None = None
    lazy_sparse: bool = False
    accumulate: int = 1
    seed: int = 0
    dtype: torch.dtype | None = None
    compiled: bool = False
    take_over: bool = False
    backend: str = "auto"
    device_kind: DeviceKind | None = None
    timeout_s: float = TIMEOUT_S

    def __post_init__(self) -> None:
        if self.accumulate < 1 or not (self.clip_norm is None or self.clip_norm > 0):
            wrong = f"accumulate {self.accumulate}, clip_norm {self.clip_norm}"
            raise RuntimeFailure(f"{wrong}: expected at least 1 micro-batch and a norm above 0")

    @property
    def recipe(self) -> Recipe:
        """How parameters are updated."""
        return Recipe(self.optimizer, self.groups, self.schedule)

    def with_changes(self, **changes: Unpack[TrainingKeywords]) -> TrainingOptions:
        """The same but for these fields."""
        return replace(self, **changes)


DEFAULT_TRAINING = TrainingOptions()
