"""Models with complex activations and parameters train on two and four ranks as a plain loop does in one process, in float64."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from soap.cluster.presets import local_topology
from soap.errors import RuntimeFailure
from soap.measure.tile_timing import TileOperands, TileTimer, whole_tile
from soap.model.graph import OperatorGraph, TensorKind
from soap.runtime.check import CheckResult, check
from soap.runtime.checkpoint.checkpoint import read_state_dict
from soap.runtime.comm.packing import pack, plain
from soap.runtime.trainer import Trainer
from soap.runtime.updates.optimizers import OPTIMIZERS as OFFERED
from soap.strategy.classical import CLASSICAL, random_strategy
from soap.strategy.config import OpConfig, Strategy
from soap.strategy.sync import fitted, parameter_server
from tests.complex_modules import (
    EXAMPLES,
    FILES,
    OPTIMIZERS,
    WITH_COMPLEX_PARAMETERS,
    Batch,
    Trained,
    batches,
    module_of,
    train_plainly,
    worst,
)
from tests.extent import ALL, often, so_many
from tests.runtime.pool import Pool
from tests.runtime.traced import DEVICE, traced

TOLERANCE = 1e-9
DOUBLE = torch.float64
FOUR = local_topology(4)


@pytest.fixture(scope="module")
def files() -> dict[str, str]:
    return FILES


def train(
    path: str,
    strategy: Strategy,
    steps: Sequence[Batch],
    optimizer: str = "sgd",
    options: Mapping[str, Any] | None = None,
    saving: str | None = None,
    going_on: str | None = None,
) -> Trained:
    """What a rank does; ``saving``: a folder for a checkpoint at the end, ``going_on``: one to begin with."""
    with Trainer(traced(path), (strategy, FOUR), optimizer=OPTIMIZERS[optimizer], **(options or {})) as trainer:
        if going_on is not None:
            trainer.load(going_on)
        losses, gradients = [], []
        for batch in steps:
            losses.append(trainer.step(*batch))
            gradients.append(trainer.gradients())
        if saving is not None:
            trainer.save(saving)
        return Trained(losses, gradients, trainer.state_dict())


def checked(path: str, strategy: Strategy, steps: Sequence[Batch], dtype: str | None, optimizer: str = "sgd") -> CheckResult:
    with Trainer(traced(path, dtype), (strategy, FOUR), optimizer=OPTIMIZERS[optimizer], device_kind=DEVICE) as trainer:
        return check(trainer, steps.__getitem__, OPTIMIZERS[optimizer], len(steps))


def scattered(graph: OperatorGraph) -> Strategy:
    """Operators in turn on four devices, each in two parts by another factor: whatever lies between them travels."""
    configs = {}
    for place, op in enumerate(graph.operators):
        cut = place % len(op.factors) if op.factors else -1
        degrees = tuple(min(2, f.size) if i == cut else 1 for i, f in enumerate(op.factors))
        configs[op.name] = OpConfig(degrees, tuple((place + i) % 4 for i in range(prod(degrees))))
    return Strategy(configs)


def strategies(graph: OperatorGraph, randoms: int) -> dict[str, Strategy]:
    result = {name: CLASSICAL[name](graph, FOUR) for name in ("data_parallel", "model_parallel", "megatron")}
    result["two"] = CLASSICAL["data_parallel"](graph, local_topology(2))
    result["scattered"] = scattered(graph)
    served = result["data_parallel"]
    for parameter in graph.parameters:
        served = served.with_parameter(parameter.name, fitted(graph, parameter.name, parameter_server(2)))
    result["served"] = served
    return result | {f"random {i}": random_strategy(graph, local_topology(2 + 2 * (i % 2)), random.Random(i)) for i in range(randoms)}


@pytest.mark.parametrize("name", often(list(EXAMPLES), []))
def test_every_model_trains_as_a_plain_loop(four: Pool, files: dict[str, str], name: str) -> None:
    steps = batches(name, 3, DOUBLE)
    expected = train_plainly(module_of(name, DOUBLE), steps)
    for kind, strategy in strategies(traced(files[name]).graph, so_many(1, 8)).items():
        results = four.run(train, files[name], strategy, steps)
        assert all(result.losses == results[0].losses for result in results)
        assert worst(results[0], expected) < TOLERANCE, (kind, worst(results[0], expected))


@pytest.mark.slow
def test_complex_activations_travel(files: dict[str, str]) -> None:
    """What the test above is about."""
    for name in ("operator", "plane", "in place"):
        graph = traced(files[name]).graph
        own = [t for t in graph.tensors.values() if t.dtype == "complex128" and t.kind is TensorKind.ACTIVATION]
        assert own and all(t.requires_grad and t.itemsize == 16 for t in own)
    assert {t.dtype for t in traced(files["operator"]).graph.parameters} == {"complex128", "float64"}


@pytest.mark.parametrize("name", often(WITH_COMPLEX_PARAMETERS, ["plane"]))
def test_adam_clipping_and_micro_batches(four: Pool, files: dict[str, str], name: str) -> None:
    steps = batches(name, 2, DOUBLE)
    expected = train_plainly(module_of(name, DOUBLE), steps, "adam", clip_norm=0.1)
    for kind, strategy in strategies(traced(files[name]).graph, 1).items():
        found = four.run(train, files[name], strategy, steps, "adam", {"clip_norm": 0.1})[0]
        assert worst(Trained(found.losses, [], found.state), Trained(expected.losses, [], expected.state)) < 1e-7, kind


@pytest.mark.parametrize("optimizer", often(["sgd", "adam"], ["adam"]))
def test_a_checkpoint_goes_on_under_another_plan(four: Pool, files: dict[str, str], tmp_path: Path, optimizer: str) -> None:
    steps = batches("operator", 4, DOUBLE)
    expected = train_plainly(module_of("operator", DOUBLE), steps, optimizer)
    graph = traced(files["operator"]).graph
    first, second = CLASSICAL["data_parallel"](graph, FOUR), scattered(graph)
    four.run(train, files["operator"], first, steps[:2], optimizer, None, str(tmp_path))
    found = four.run(train, files["operator"], second, steps[2:], optimizer, None, None, str(tmp_path))[0]
    assert worst(found, Trained(expected.losses[2:], expected.gradients[2:], expected.state)) < 1e-7
    halfway = train_plainly(module_of("operator", DOUBLE), steps[:2], optimizer).state
    (saved,) = tmp_path.glob("step-*")
    kept = read_state_dict(saved)
    assert kept["weight"].dtype == torch.complex128
    for name, tensor in halfway.items():
        torch.testing.assert_close(kept[name], tensor, rtol=1e-7, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float64", pytest.param(None, marks=pytest.mark.long)])
def test_the_check_passes(four: Pool, files: dict[str, str], dtype: str | None) -> None:
    """In complex64 and in complex128, of which the tolerances are those of their parts; Adam's on all numbers as torch has it."""
    for name in ("spectral", "plane", "operator", "short time") if ALL else ("plane", "operator"):
        steps = batches(name, 2, DOUBLE if dtype else torch.float32)
        for kind, strategy in strategies(traced(files[name], dtype).graph, 1).items():
            found = four.run(checked, files[name], strategy, steps, dtype, "adam")[0]
            assert found.passed and found.tolerance == (1e-9 if dtype else 1e-4), (name, kind, found.worst)


def _lossy(path: str, strategy: Strategy, steps: Sequence[Batch]) -> CheckResult:
    """A rank that loses the imaginary part of a gradient."""
    with Trainer(traced(path), (strategy, FOUR), optimizer=OPTIMIZERS["sgd"]) as trainer:
        whole = trainer.gradients
        trainer.gradients = lambda: {n: g.real.to(g.dtype) for n, g in whole().items()}  # type: ignore[method-assign]
        return check(trainer, steps.__getitem__, OPTIMIZERS["sgd"], 1)


@pytest.mark.long
def test_compiled_steps(files: dict[str, str]) -> None:
    """Torch's compiler leaves complex numbers to torch itself."""
    steps = batches("operator", 2, DOUBLE)
    model = traced(files["operator"])
    expected = train_plainly(module_of("operator", DOUBLE), steps)
    with Trainer(model, (CLASSICAL["data_parallel"](model.graph, local_topology(1)), local_topology(1)), compiled=True) as trainer:
        losses = [trainer.step(*batch) for batch in steps[:1]]
        found = trainer.gradients()
    assert abs(losses[0] - expected.losses[0]) < TOLERANCE
    assert all(float((found[name] - gradient).abs().max()) < TOLERANCE for name, gradient in expected.gradients[0].items())


def test_the_check_sees_imaginary_parts(four: Pool, files: dict[str, str]) -> None:
    strategy = CLASSICAL["data_parallel"](traced(files["plane"]).graph, FOUR)
    found = four.run(_lossy, files["plane"], strategy, batches("plane", 1, DOUBLE))[0]
    assert not found.passed and found.worst.error > 0.05 and "gradient" in found.worst.kind


def test_one_line_for_a_type_that_has_no_complex_numbers(files: dict[str, str]) -> None:
    model = traced(files["plane"], None)
    with pytest.raises(RuntimeFailure) as caught:
        Trainer(model, (CLASSICAL["data_parallel"](model.graph, FOUR), FOUR), dtype=torch.bfloat16)
    assert str(caught.value) == "dtype bfloat16: the model has complex tensors, for which torch has float32 and float64 alone"


def test_what_is_only_marked_is_written_out_before_it_is_sent() -> None:
    z = torch.randn(3, 4, dtype=torch.complex64)
    torch.testing.assert_close(plain(pack([z.conj()])), torch.view_as_real(z.conj().resolve_conj().flatten()))
    torch.testing.assert_close(plain(z.conj().imag), -z.imag)
    buffer = torch.zeros(4, dtype=torch.complex64)
    plain(buffer)[:] = torch.tensor([1.0, 2.0])
    assert torch.equal(buffer, torch.full((4,), 1 + 2j, dtype=torch.complex64))


def test_the_optimizers_that_are_offered_take_complex_tensors() -> None:
    for name, make in OFFERED.items():
        ours, theirs = (torch.ones(3, dtype=torch.complex64, requires_grad=True) for _ in range(2))
        for tensor in (ours, theirs):
            tensor.grad = torch.full((3,), 2 - 1j, dtype=torch.complex64)
        make([ours], 0.1).step()
        plainly = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[name]
        plainly([theirs], lr=0.1).step()
        torch.testing.assert_close(ours, theirs)


def test_tiles_are_timed_on_complex_operands(files: dict[str, str]) -> None:
    model = traced(files["plane"], None)
    operands = TileOperands(model, torch.device("cpu"))
    timer = TileTimer(model, torch.device("cpu"))
    seen = 0
    for position, op in enumerate(model.graph.operators):
        tile = whole_tile(model.graph, position)
        inputs, parameters = operands.copy(tile, {})
        for tensor, operand in zip((*inputs, *parameters), (*op.inputs, *op.parameters), strict=True):
            wanted = model.graph.tensors[operand.tensor]
            assert str(tensor.dtype) == f"torch.{wanted.dtype}"
            if wanted.dtype == "complex64" and wanted.kind is TensorKind.ACTIVATION:
                assert tensor.requires_grad and float(tensor.imag.detach().abs().max()) > 0
                seen += 1
        timer.exercise(tile)
    assert seen >= 3
