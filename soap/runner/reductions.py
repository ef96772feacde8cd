"""Gradients of ranks that are summed where the mean over them is exact: larger by the number of ranks."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import torch

from soap.runner.config import RunnerConfig
from soap.runtime.updates.optimizers import OptimizerFactory


def with_reductions(config: RunnerConfig, sparse: Collection[str], ranks: int) -> RunnerConfig:
    """The configuration with optimizers that multiply gradients as it says; itself if all are means."""
    if config.reduce_dense == config.reduce_sparse == "mean":
        return config
    given = config.optimizer if isinstance(config.optimizer, Mapping) else {"*": config.optimizer}
    wanted: dict[str, OptimizerFactory] = {}
    for name in sparse:
        make = next((make for pattern, make in given.items() if fnmatchcase(name, pattern)), None)
        if make is not None:
            wanted[name] = _times(make, ranks if config.reduce_sparse == "sum" else 1)
    for pattern, make in given.items():
        wanted.setdefault(pattern, _times(make, ranks if config.reduce_dense == "sum" else 1))
    return replace(config, optimizer=wanted)


def _times(make: OptimizerFactory, factor: int) -> OptimizerFactory:
    """Makes the same optimizer, which takes gradients ``factor`` times as large."""

    def made(tensors: Any) -> torch.optim.Optimizer:
        optimizer = make(tensors)
        if factor != 1:
            optimizer.register_step_pre_hook(_multiply(factor))
        return optimizer

    return made


def _multiply(factor: int) -> Any:
    def before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            for tensor in group["params"]:
                if tensor.grad is not None:
                    tensor.grad = tensor.grad * factor  # not in place: sums are kept in buffers

    return before
