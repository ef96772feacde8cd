"""Models with complex numbers: what they are split by, what is refused, and tiles against the module itself, in one process."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from soap.errors import ModelError
from soap.model.dtypes import is_differentiable, part_of, replaced
from soap.strategy.config import OpConfig
from soap.tracing.calls import TileContext
from soap.tracing.execute import TracedModel
from soap.tracing.importer import import_program
from soap.tracing.load import load_model
from tests.complex_modules import EXAMPLES, FILES, batches, module_of
from tests.extent import every, so_many
from tests.tracing.emulation import compare, draw_configs, graded, kept_bytes
from tests.tracing.programs import Lambda, export

DOUBLE = torch.float64


def _equals_module(model: TracedModel, module: nn.Module) -> None:
    """Loss and every gradient of the program, by plain calls, are those of autograd on the module."""
    inputs = [t.clone() for t in model.example_inputs]
    module.zero_grad()
    loss = module(*inputs)
    loss.backward()
    found, gradients = graded(model, None)
    torch.testing.assert_close(found, loss.detach(), rtol=1e-12, atol=1e-12)
    own = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    assert own.keys() == {name for name, gradient in gradients.items() if gradient is not None}
    for name, gradient in own.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-9, atol=1e-11)


def _agrees(model: TracedModel, seeds: int = so_many(2, 6)) -> None:
    """Tiles of each factor in 2 and 3, and at random, give the plain program's loss and gradients."""
    reference = graded(model, None)
    for degree in (2, 3):
        for place in range(max(len(op.factors) for op in model.graph.operators)):
            configs = {}
            for op in model.graph.operators:
                degrees = tuple(min(degree, f.size) if i == place else 1 for i, f in enumerate(op.factors))
                configs[op.name] = OpConfig(degrees, (0,) * max(degrees, default=1))
            compare(model, configs, reference=reference)
    for seed in range(seeds):
        compare(model, draw_configs(model.graph, random.Random(seed)), reference=reference)


@pytest.fixture(scope="module")
def files() -> dict[str, str]:
    return FILES


@pytest.mark.parametrize("name", every(2, [*EXAMPLES]))
def test_models_by_tiles_equal_the_module(files: dict[str, str], name: str) -> None:
    """Exported in float32, read in float64: complex numbers widen as well."""
    model = load_model(files[name], dtype="float64")
    assert all(op.partitionable for op in model.graph.operators)
    assert not {t.dtype for t in model.graph.tensors.values()} & {"complex64", "float32"}
    _equals_module(model, module_of(name, DOUBLE))
    _agrees(model)
    kept, bound = kept_bytes(model)
    assert kept <= bound


def test_what_transforms_are_split_by(files: dict[str, str]) -> None:
    """Samples and channels, not what is transformed; of short-time transforms also the frames."""
    graph = load_model(files["operator"]).graph
    transforms = {op.kind: [f.size for f in op.factors] for op in graph.operators if "fft" in op.kind}
    assert transforms == {"fft_rfft": [6, 4], "fft_irfft": [6, 4]}
    contraction = next(op for op in graph.operators if op.kind == "einsum")
    assert [(f.name, f.size, f.summed) for f in contraction.factors] == [("b", 6, False), ("i", 4, True), ("x", 3, False), ("o", 4, False)]
    assert contraction.flops >= 4 * 2 * 6 * 4 * 3 * 4
    assert {graph.tensors[o.tensor].dtype for o in contraction.inputs + contraction.parameters} == {"complex64"}
    graph = load_model(files["short time"]).graph
    assert [[(f.name, f.size) for f in op.factors] for op in graph.operators if op.kind == "stft"] == [[("b", 6), ("t", 9)]] * 2


COMPLEX = torch.complex128


def _program(forward: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> tuple[TracedModel, nn.Module]:
    torch.manual_seed(0)
    inner = nn.Linear(4, 4, dtype=inputs[0].dtype)
    module = Lambda(forward, inner=inner)
    return import_program(export(module, *inputs), name="model"), module


def _drawn(*shape: int, dtype: torch.dtype = COMPLEX) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(3))


def _odd_pairs(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = self.inner(x).flatten()[1:13].reshape(3, 2, 2)  # which begins in the middle of a pair
    return torch.view_as_complex(y.clone()).abs().sum()


def _turned_pairs(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (torch.view_as_complex(self.inner(x).unflatten(-1, (2, 2)).transpose(1, 2).contiguous()) ** 2).imag.square().sum()


def _rows_written(self: nn.Module, z: torch.Tensor) -> torch.Tensor:
    z = self.inner(z).clone()
    z[1:].imag.mul_(z[:-1].real.clone().sin())
    z.diagonal(0, -2, -1).mul_(2 - 1j)
    z.real[:, 2] = 1.5
    return (z * z.conj()).real.sqrt().sum() + z.angle().sin().sum()


def _pairs_written(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    pairs = self.inner(x).unflatten(-1, (2, 2)).clone()
    torch.view_as_complex(pairs).mul_(0.5 + 2j)
    return (pairs[..., 0].sin() + pairs[..., 1] ** 2).sum()


def _conjugate_written(self: nn.Module, z: torch.Tensor) -> torch.Tensor:
    z = self.inner(z).clone()
    z.conj()[:, 0] *= 2j
    z.mT.conj()[1] += 1 - 3j
    return z.real.sum() + (z.imag * torch.arange(1, 5)).sum() ** 3


def _there_and_back(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    spectrum = torch.stft(self.inner(x), 4, 2, window=x[0], return_complex=True)
    return torch.istft(spectrum * (1 + 0.5j), 4, 2, window=x[0]).square().sum()


@pytest.mark.parametrize(
    ("forward", "dtype"),
    [
        (_odd_pairs, DOUBLE),
        (_turned_pairs, DOUBLE),
        (_rows_written, COMPLEX),
        (_pairs_written, DOUBLE),
        (_conjugate_written, COMPLEX),
        (lambda self, z: (self.inner(z).adjoint() @ z).abs().sum(), COMPLEX),
        (lambda self, z: torch.view_as_real(self.inner(z).mH.resolve_conj()).sin().sum(), COMPLEX),
        (lambda self, z: torch.linalg.vector_norm(torch.fft.fftshift(torch.fft.fft2(self.inner(z)))), COMPLEX),
        (lambda self, z: torch.vdot(self.inner(z)[0], z[1]).abs() + self.inner(z).std(), COMPLEX),
        (lambda self, z: torch.where(self.inner(z).real > 0, self.inner(z), 1j).imag.sum(), COMPLEX),
        (lambda self, x: torch.fft.ifft(torch.fft.fft(self.inner(x).to(COMPLEX)) * 1j).imag.square().sum(), DOUBLE),
        (_there_and_back, DOUBLE),
        (lambda self, z: self.inner(z).detach().real.sum() + self.inner(z).cumsum(0).prod(1).imag.sum(), COMPLEX),
    ],
)
def test_views_writes_and_other_calls(forward: Callable[..., torch.Tensor], dtype: torch.dtype) -> None:
    x = _drawn(6, 4, dtype=dtype)
    model, module = _program(forward, x if dtype.is_complex else x.abs() + 0.1)
    _equals_module(model, module)
    _agrees(model, 3)


def test_types() -> None:
    assert [is_differentiable(t) for t in ("float32", "bfloat16", torch.complex64, torch.int64, "bool")] == [True, True, True, False, False]
    assert replaced(torch.complex64, torch.float64) is torch.complex128 and replaced(torch.complex128, torch.float32) is torch.complex64
    assert replaced(torch.int64, torch.float64) is torch.int64 and replaced(torch.float32, None) is torch.float32
    assert part_of(torch.complex64) is torch.float32 and part_of(torch.bfloat16) is torch.bfloat16


def test_one_line_for_types_that_have_no_complex_numbers(files: dict[str, str]) -> None:
    for dtype in ("bfloat16", "float16"):
        with pytest.raises(ModelError) as caught:
            load_model(files["spectral"], dtype=dtype)
        assert str(caught.value) == (
            f"the model computes with complex numbers (complex64), which torch does not have in {dtype}; expected float32 or float64"
        )


@pytest.mark.slow
def test_autocast(files: dict[str, str]) -> None:
    """Transforms compute in float32, as under torch.autocast; what torch cannot put together from bfloat16 is refused in one line."""
    for name in ("spectral", "operator", "short time"):
        model, module = load_model(files[name], autocast="bfloat16"), module_of(name)
        with torch.autocast("cpu", torch.bfloat16):
            expected = module(*batches(name, 1)[0])
        expected.backward()
        found, gradients = graded(model, None)
        torch.testing.assert_close(found, expected.detach())
        for own, parameter in module.named_parameters():
            torch.testing.assert_close(gradients[own], parameter.grad)
    with pytest.raises(ModelError, match=r"^call 'complex\w*' of complex makes complex numbers of bfloat16, .* float64: cast before it$"):
        load_model(files["plane"], autocast="bfloat16")


def test_one_line_for_a_complex_loss() -> None:
    with pytest.raises(ModelError) as caught:
        _program(lambda self, z: self.inner(z).sum(), _drawn(6, 4))
    assert str(caught.value) == (
        "the output has shape [] and dtype complex128; expected a scalar floating-point loss: return its real part or magnitude"
    )


def test_inputs_and_weights_that_are_only_marked_as_conjugated(tmp_path: Path) -> None:
    """Their memory holds other numbers."""
    z = _drawn(6, 4)
    model, module = _program(lambda self, z: (self.inner(z) * z).abs().sum(), z)
    context = TileContext(0, 0, {})
    marked = z.conj().clone().conj()
    assert marked.is_conj() and torch.equal(marked, z)
    loss = model.reference_loss([marked], model.parameters, context)
    torch.testing.assert_close(loss, module(z))
