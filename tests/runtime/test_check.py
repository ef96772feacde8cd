"""What a check makes of rounding: float64 is the judge, and a defect is still seen."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

from soap.cluster.presets import local_topology
from soap.runtime.check import CheckResult, Difference, check
from soap.runtime.trainer import Trainer
from soap.strategy.classical import CLASSICAL
from soap.tracing.export import export_model
from soap.tracing.load import load_model
from tests.runtime.exact_modules import batches, converted, sgd
from tests.runtime.pool import Pool
from tests.runtime.test_exactness import FILES


class Cancelling(nn.Module):
    """A gradient that is the small difference of two large sums, one added up by each operator."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.1, 1, 16).reshape(16, 1))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x @ self.weight).mean() - (y @ self.weight).mean()


def cancelling() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = 1000 * torch.randn(96, 16, generator=generator)
    return x, x + 0.3 * torch.rand(96, 16, generator=generator)


@pytest.mark.parametrize(
    ("difference", "agrees"),
    [
        (Difference(0, "loss", "l", 9e-5), True),
        (Difference(0, "loss", "l", 2e-4), False),
        (Difference(0, "loss", "l", 4e-2, 5e-3, 4e-2), True),  # one process is the worse of the two
        (Difference(0, "loss", "l", 2e-2, 2e-2, 1.1e-2), True),
        (Difference(0, "loss", "l", 2e-2, 2e-2, 9e-3), False),  # more than twice as far off as one process
        (Difference(0, "loss", "l", 2e-4, 9e-5, 1e-6), True),  # within the tolerance of the truth
        (Difference(0, "loss", "l", 2e-4, 3e-4, 1e-6), False),
        (Difference(0, "loss", "l", 0.3, 0.2, 0.2), False),  # nothing can be said
        (Difference(0, "loss", "l", float("inf"), float("inf"), 1e-6), False),
    ],
)
def test_what_agrees(difference: Difference, agrees: bool) -> None:
    assert CheckResult(1, 1, 1e-4, difference).passed is agrees


def run(path: str, dtype: str, inputs: Sequence[Sequence[torch.Tensor]], scale: float) -> tuple[CheckResult, str]:
    """Check in float32; gradients of one shard are scaled behind the runtime's back."""
    model, topology = load_model(path, dtype=dtype), local_topology(3)
    with Trainer(model, (CLASSICAL["data_parallel"](model.graph, topology), topology), optimizer=sgd) as trainer:
        gradients = trainer.sizes.gradients
        add_up = gradients.add_up

        def tampered(shards: Collection[int] | None = None) -> None:
            add_up(shards)
            gradients.dense[0].mul_(scale)

        gradients.add_up = tampered  # type: ignore[method-assign]
        result = check(trainer, lambda step: converted(inputs[step], getattr(torch, dtype)), sgd, len(inputs))
        try:
            result.require()
        except Exception as error:
            return result, str(error)
        return result, ""


@pytest.mark.slow
def test_rounding_that_one_process_has_as_well_is_no_defect(pool: Pool, tmp_path: Path) -> None:
    path, inputs = str(tmp_path / "m.pt2"), cancelling()
    export_model(Cancelling(), inputs, path=path)
    result, message = pool.run(run, path, "float32", [inputs], 1.0)[0]
    worst = result.worst
    assert result.passed and message == ""
    assert worst.error > result.tolerance == 1e-4
    assert worst.from_float64 is not None and worst.alone_from_float64 is not None
    assert 0 < worst.from_float64 < 2 * worst.alone_from_float64 < 0.2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["conv norm", pytest.param("shared", marks=pytest.mark.long)])
def test_a_gradient_that_is_off_by_a_hundredth_is_a_defect(pool: Pool, name: str) -> None:
    path, inputs = FILES[name], batches(name, [6])
    assert pool.run(run, path, "float32", inputs, 1.0)[0][0].passed
    result, message = pool.run(run, path, "float32", inputs, 1.01)[0]
    assert not result.passed
    worst = result.worst
    assert worst.kind == "gradient of" and worst.from_float64 == pytest.approx(0.01, rel=0.1)
    assert worst.alone_from_float64 is not None and worst.alone_from_float64 < 1e-4
    assert "differs from one process by 1.00e-02 relative, expected at most 1e-04 (from float64: 1.0e-02, one process " in message
    assert not pool.run(run, path, "bfloat16", inputs, 1.5)[0][0].passed


class SparseTables(nn.Module):
    """Look-ups that ask autograd for sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.bag = nn.Embedding(10, 4, sparse=True), nn.EmbeddingBag(10, 4, mode="sum", sparse=True)

    def forward(self, places: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.table(places).sum(1) * self.bag(places), wanted)


@pytest.mark.parametrize("devices", [1, 3])
def test_tables_that_ask_for_sparse_gradients_get_dense_ones(pool: Pool, tmp_path: Path, devices: int) -> None:
    path = str(tmp_path / "m.pt2")
    places = torch.arange(18).reshape(6, 3) % 7
    export_model(SparseTables().train(), (places, torch.ones(6, 4)), path=path)
    results = pool.run(_check_alone, path, devices)
    assert results[0].passed
    assert results[0].worst.error < 1e-12


def _check_alone(path: str, devices: int) -> CheckResult:
    model, topology = load_model(path, dtype="float64"), local_topology(3)
    name = "single_device" if devices == 1 else "data_parallel"
    with Trainer(model, (CLASSICAL[name](model.graph, topology), topology), optimizer=sgd) as trainer:
        return check(trainer, lambda step: model.example_inputs, sgd, 2)
