"""What the ranks run to compare a traced model under a strategy with one process."""

from __future__ import annotations

import functools
import os
import warnings

import torch

from soap.cluster.topology import DeviceKind, Topology
from soap.runtime.check import CheckResult, check
from soap.runtime.trainer import Trainer
from soap.strategy.config import Strategy
from soap.tracing.execute import ExecutableModel
from soap.tracing.load import load_model

DEVICE: DeviceKind = "cuda" if os.environ.get("SOAP_TESTS_DEVICE") == "cuda" else "cpu"
"""Where ranks that are checked compute. On a machine with one GPU they share it."""


@functools.lru_cache(maxsize=8)
def traced(spec: str, dtype: str | None) -> ExecutableModel:
    """A model that each rank loads once."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return load_model(spec, dtype=dtype)


def adam(parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def sgd(parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def checked(spec: str, dtype: str | None, strategy: Strategy, topology: Topology, steps: int = 2) -> CheckResult:
    """Train some steps on the example inputs, comparing loss, gradients, parameters and buffers with one process."""
    model = traced(spec, dtype)
    with Trainer(model, (strategy, topology), optimizer=sgd, seed=7, device_kind=DEVICE) as trainer:
        return check(trainer, lambda step: model.example_inputs, sgd, steps)
