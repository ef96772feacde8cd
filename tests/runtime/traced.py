"""What the ranks run to compare a traced model under a strategy with one process."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Sequence

import torch

from soap.cluster.topology import DeviceKind, Topology
from soap.runtime.check import CheckResult, check
from soap.runtime.inputs import PartBatch
from soap.runtime.trainer import Trainer
from soap.runtime.training_options import TrainingOptions
from soap.strategy.config import Strategy
from soap.tracing.execute import TracedModel
from soap.tracing.load import load_model

Optimizer = Callable[[list[torch.Tensor]], torch.optim.Optimizer]

DEVICE: DeviceKind = "cuda" if os.environ.get("SOAP_TESTS_DEVICE") == "cuda" else "cpu"
"""Where ranks that are checked compute. On a machine with one GPU they share it."""


Reading = tuple[tuple[str, str], ...]
"""Options of ``load_model`` and their values."""


def traced(spec: str, dtype: str | None = "float64", reading: Reading = ()) -> TracedModel:
    """A model that each rank loads once."""
    return _read(spec, dtype, reading)


@functools.lru_cache(maxsize=32)
def _read(spec: str, dtype: str | None, reading: Reading) -> TracedModel:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return load_model(spec, dtype=dtype, **dict(reading))  # type: ignore[arg-type]


def adam(parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def sgd(parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def checked(
    spec: str,
    dtype: str | None,
    strategy: Strategy,
    topology: Topology,
    steps: int = 2,
    optimizer: Optimizer = sgd,
    accumulate: int = 1,
    clip_norm: float | None = None,
    by_rank: bool = False,
) -> CheckResult:
    """Train some steps on the example inputs (``batch_of``), comparing loss, gradients, parameters and buffers with one process.
    ``by_rank``: ranks are given only the samples that they read."""
    model = traced(spec, dtype)
    options = TrainingOptions(optimizer=optimizer, seed=7, device_kind=DEVICE, accumulate=accumulate, clip_norm=clip_norm)
    with Trainer(model, (strategy, topology), options=options) as trainer:
        whole = functools.partial(batch_of, model.example_inputs, accumulate=accumulate)
        return check(trainer, functools.partial(parts_of, trainer, whole) if by_rank else whole, optimizer, steps, whole=whole)


def parts_of(trainer: Trainer, whole: Callable[[int], Sequence[torch.Tensor]], step: int) -> list[PartBatch]:
    """What this rank reads of a step's whole batches, which have the model's own size."""
    given, count = whole(step), len(trainer.model.input_names)
    return [PartBatch.cut(given[i : i + count], trainer.samples()) for i in range(0, len(given), count)]


def batch_of(inputs: Sequence[torch.Tensor], step: int, accumulate: int) -> list[torch.Tensor]:
    """The example inputs. Of several micro-batches, each pairs one input's samples with other samples of the next input."""
    numbers = range(step * accumulate, (step + 1) * accumulate) if accumulate > 1 else (0,)
    return [tensor.roll(number * place, 0) for number in numbers for place, tensor in enumerate(inputs)]
