"""The configuration of a runner."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from soap.errors import RuntimeFailure, StrategyError
from soap.runtime.training_options import OnStep, TrainingOptions
from soap.runtime.updates.optimizers import GroupOptions, Optimizers, Recipe, ScheduleFactory, plain_sgd
from soap.search.options import DEFAULT_BUDGET
from soap.simulator.costs import CostSource
from soap.strategy.consistency import SYNC, parse

RunOption = Literal["hybrid", "ps", "allreduce"]
RUN_OPTIONS: tuple[RunOption, ...] = ("hybrid", "ps", "allreduce")
Reduction = Literal["mean", "sum"]
REDUCTIONS: tuple[Reduction, ...] = ("mean", "sum")
TIMEOUT_S = 1800.0
"""Long, because ranks wait for the one that searches."""


@dataclass(frozen=True, kw_only=True)
class RunnerConfig:
    """How a runner plans and trains. The first four fields are as in Parallax. RuntimeFailure in one line for an impossible value.

    ``run_option``: ``hybrid`` searches how to split the model, and how to synchronize each sparse parameter; ``allreduce`` searches with
    all-reduces only; ``ps`` is data parallelism with all parameters on servers. ``local_aggregation``: allow the devices of a host to add
    up before they speak to servers. ``search_partitions``: search the number of partitions of parameters on servers; False: it is
    ``partitions``. ``tuning_iterations``: if above 0, choose the number of partitions of sparse parameters from at most five short runs on
    the first batch, each of so many iterations, as ``soap-tune`` does; 0: by predictions.

    ``checkpoint``: a folder. Training goes on from its latest checkpoint; a new one is written every ``save_every`` steps and at the end,
    and the last ``keep`` stay. ``sharded``: each rank passes its own part of a batch; False: every rank passes the whole batch.

    ``consistency``: ``sync`` trains as one process with the whole batch; with ``bounded:D`` or ``async`` (``soap.strategy.consistency``)
    each rank is a worker that trains on its own part, and a server of a part of the model: no step of all is computed, nothing is
    searched, and losses are the rank's own. The model must have a table that servers can compute with (docs/elastic.md).
    ``reduce_dense``, ``reduce_sparse``: gradients of dense and of sparse parameters are the mean over ranks, which is exact, or their sum,
    which is as many times as large (behind clipping).

    ``optimizer``, ``groups``, ``schedule``, ``clip_norm``, ``seed``, ``backend``, ``on_step``: see ``soap.TrainingOptions``; the searched
    plan does not cut parameters that the optimizer needs whole. ``loss``, ``dynamic_batch``: see ``soap.export``. ``budget``, ``costs``:
    see ``soap.SearchOptions``. ``alpha``: pattern of parameter names -> share of its rows that a batch touches. ``timeout_s``: seconds to
    wait for ranks that do not answer. ``verify``: before the first step, rank 0 compares the module's own step on the first batch with its
    program's, as ``soap.export`` does; all ranks refuse a difference.
    """

    run_option: RunOption = "hybrid"
    local_aggregation: bool = True
    search_partitions: bool = True
    partitions: int = 1
    tuning_iterations: int = 0
    checkpoint: str | Path | None = None
    save_every: int | None = None
    keep: int | None = 2
    sharded: bool = True
    optimizer: Optimizers = plain_sgd
    groups: GroupOptions | None = None
    schedule: ScheduleFactory | None = None
    clip_norm: float | None = None
    loss: Callable[..., torch.Tensor] | None = None
    dynamic_batch: bool | Mapping[str, int] = False
    alpha: Mapping[str, float] | None = None
    budget: int = DEFAULT_BUDGET
    costs: CostSource = "auto"
    backend: str = "auto"
    seed: int = 0
    timeout_s: float = TIMEOUT_S
    verify: bool = True
    on_step: OnStep | None = None
    consistency: str = SYNC
    reduce_dense: Reduction = "mean"
    reduce_sparse: Reduction = "mean"

    @property
    def recipe(self) -> Recipe:
        """How parameters are updated."""
        return Recipe(self.optimizer, self.groups, self.schedule)

    @property
    def training(self) -> TrainingOptions:
        """The trainer's options."""
        return TrainingOptions(
            optimizer=self.optimizer,
            groups=self.groups,
            schedule=self.schedule,
            clip_norm=self.clip_norm,
            seed=self.seed,
            backend=self.backend,
            on_step=self.on_step,
        )

    def __post_init__(self) -> None:
        if self.run_option not in RUN_OPTIONS:
            raise RuntimeFailure(f"run_option {self.run_option!r}: expected one of {', '.join(RUN_OPTIONS)}")
        if self.save_every is not None and (self.save_every < 1 or self.checkpoint is None):
            raise RuntimeFailure(f"save_every {self.save_every}: expected at least 1 step, and a folder as checkpoint")
        if self.tuning_iterations < 0 or (self.tuning_iterations and not self.search_partitions):
            wrong = f"tuning_iterations {self.tuning_iterations}, search_partitions {self.search_partitions}"
            raise RuntimeFailure(f"{wrong}: expected iterations of at least 0, and search_partitions if there are any")
        for name in ("reduce_dense", "reduce_sparse"):
            if getattr(self, name) not in REDUCTIONS:
                raise RuntimeFailure(f"{name} {getattr(self, name)!r}: expected one of {', '.join(REDUCTIONS)}")
        self._check_consistency()

    @property
    def stale(self) -> bool:
        """Whether ranks may be apart."""
        return parse(self.consistency).stale

    def _check_consistency(self) -> None:
        try:
            stale = self.stale
        except StrategyError as error:
            raise RuntimeFailure(str(error)) from None
        if not stale:
            return
        if not self.sharded:
            raise RuntimeFailure(f"consistency {self.consistency!r} with sharded=False: expected each rank's own part of a batch")
        others = {name: getattr(self, name) for name in ("checkpoint", "groups", "schedule", "clip_norm", "tuning_iterations", "on_step")}
        others["optimizer"] = self.optimizer if isinstance(self.optimizer, Mapping) else None
        for name, value in others.items():
            if value:
                raise RuntimeFailure(f"consistency {self.consistency!r} with {name}: workers that are apart do not know it; leave it out")
