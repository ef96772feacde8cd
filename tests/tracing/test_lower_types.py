"""bfloat16 and float16: whole tiles are eager to the bit, and tiles are no farther from float64 than eager is."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from math import prod

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from soap.plan.tiling import NARROW_PRODUCTS, tiles_of
from soap.strategy.config import OpConfig
from soap.tracing import compiled
from soap.tracing.calls import TileContext
from soap.tracing.execute import TracedModel
from soap.tracing.importer import BatchNorm, import_program
from tests.extent import every
from tests.tracing.emulation import Graded, draw_configs, emulated_loss, graded
from tests.tracing.programs import export

LOWER = [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.long)]


def _images(channels: int = 3, size: int = 8) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(8, channels, size, size, generator=generator) + 1


LABELS = torch.arange(8) % 10


class Images(nn.Module):
    """A normalisation between two convolutions."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.first, self.norm, self.second, self.head = nn.Conv2d(3, 16, 3, padding=1), norm, nn.Conv2d(16, 16, 3), nn.Linear(16, 10)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = torch.tanh(self.second(torch.relu(self.norm(self.first(x)))))
        return F.cross_entropy(self.head(x.mean((2, 3))), labels)


class Rows(nn.Module):
    """The same between linear layers."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.first, self.norm, self.second, self.head = nn.Linear(24, 16), norm, nn.Linear(16, 16), nn.Linear(16, 10)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = torch.tanh(self.second(torch.relu(self.norm(self.first(x.flatten(2))))))
        return F.cross_entropy(self.head(x.mean(1)), labels)


class Patches(nn.Module):
    """Overlapping patches of images whose channels are alike, seen through what tells these channels apart: parts cancel in the sum."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.norm, self.head = nn.Conv2d(4, 32, 7, 4, 3), nn.LayerNorm(32), nn.Linear(32, 10)
        with torch.no_grad():
            self.patches.weight.sub_(self.patches.weight.mean(1, keepdim=True))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = self.patches(x[:, :1] * 4 + 0.1 * x)
        return F.cross_entropy(self.head(torch.tanh(self.norm(x.flatten(2).transpose(1, 2))).mean(1)), labels)


class Products(nn.Module):
    """Products of activations, sums over them, and bags of a table."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.table, self.head = nn.Linear(32, 96), nn.EmbeddingBag(12, 32, mode="mean"), nn.Linear(32, 10)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        q, k, v = self.layer(x.flatten(2)).chunk(3, -1)
        x = torch.bmm((q @ k.transpose(1, 2) / 6).softmax(-1), v).sum(1) + self.table((labels[:, None] + torch.arange(6)) % 12)
        return F.cross_entropy(self.head(x), labels)


NORMS: dict[str, Callable[[], nn.Module]] = {
    "batch": lambda: Images(nn.BatchNorm2d(16)),
    "batch, not affine": lambda: Images(nn.BatchNorm2d(16, affine=False)),
    "group": lambda: Images(nn.GroupNorm(4, 16)),
    "instance": lambda: Images(nn.InstanceNorm2d(16, affine=True)),
    "layer": lambda: Rows(nn.LayerNorm(16)),
    "root mean square": lambda: Rows(nn.RMSNorm(16)),
}


def made(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    if name == "products":
        return Products(), _images(5, 4).flatten(2).repeat(1, 1, 2)
    if name == "patches":
        return Patches(), _images(4, 32)
    module = NORMS[name]()
    return module, _images(6, 2).repeat(1, 1, 2, 3) if isinstance(module, Rows) else _images()


def whole_tiles(model: TracedModel, context: TileContext) -> Graded:
    """Loss and gradients by tiles that have everything."""
    parameters = {n: p.clone().requires_grad_() for n, p in model.parameters.items()}
    configs = {op.name: OpConfig((1,) * len(op.factors), (0,)) for op in model.graph.operators}
    tiles = [tile for i, op in enumerate(model.graph.operators) for tile in tiles_of(model.graph, i, configs[op.name])]
    context.unread = model.unread(tiles)
    loss = emulated_loss(model, configs, model.example_inputs, parameters, context)
    loss.backward()
    model.end_step(context)
    return loss.detach(), {n: p.grad for n, p in parameters.items()}


class Mixed(nn.Module):
    """Weights and statistics in float32 beside activations in bfloat16, which torch's kernels take as well."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Conv2d(3, 16, 3, padding=1).bfloat16(), nn.Linear(16, 10).bfloat16()
        self.norm, self.plain = nn.BatchNorm2d(16), nn.BatchNorm2d(16, affine=False)
        self.low = nn.BatchNorm2d(16, affine=False).bfloat16()

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = self.plain(torch.relu(self.low(self.norm(self.first(x)))))
        return F.cross_entropy(self.head(x.square().mean((2, 3))), labels)


@pytest.mark.slow
@pytest.mark.parametrize("batch_norm", ["global", "local"])
@pytest.mark.parametrize("name", every(2, ["mixed", *NORMS]))
def test_whole_tiles_normalise_as_eager_does_to_the_bit(name: str, batch_norm: BatchNorm) -> None:
    module, x = (Mixed(), _images()) if name == "mixed" else made(name)
    module = module if name == "mixed" else module.bfloat16()
    model = import_program(export(module, x.bfloat16(), LABELS), name="model", batch_norm=batch_norm)
    buffers = {n: b.clone() for n, b in model.buffers.items()}
    loss, gradients = whole_tiles(model, TileContext(0, 0, buffers))
    expected = module(x.bfloat16(), LABELS)
    expected.backward()
    assert torch.equal(loss, expected.detach())
    for own, parameter in module.named_parameters():
        assert torch.equal(gradients[own], parameter.grad), own
    for own, buffer in buffers.items():  # rounded twice instead of once
        torch.testing.assert_close(buffer, module.get_buffer(own), rtol=float(torch.finfo(torch.bfloat16).eps), atol=0)


def distances(module: nn.Module, inputs: tuple[Tensor, ...], dtype: torch.dtype, plans: Sequence[Callable[..., OpConfig]]) -> list[float]:
    """How far one process's gradients are from float64, relative to all of them, and those by the tiles of each plan."""
    exported = export(module, *inputs)
    low, judge = (import_program(exported, name="model", dtype=kind) for kind in (dtype, torch.float64))
    judge.parameters = {n: p.double() for n, p in low.parameters.items()}
    judge.example_inputs = tuple(t.double() if t.is_floating_point() else t for t in low.example_inputs)
    truth = _flat(graded(judge, None))
    found = [graded(low, None)]
    for choose in plans:
        found.append(graded(low, {op.name: choose(op) for op in low.graph.operators}))
    return [float((_flat(one) - truth).norm() / truth.norm()) for one in found]


def _flat(found: Graded) -> Tensor:
    return torch.cat([found[1][name].double().flatten() for name in sorted(found[1])])


def _by_sums(degree: int) -> Callable[..., OpConfig]:
    """Each operator's largest summed factor in so many parts."""

    def choose(op: object) -> OpConfig:
        sizes = [f.size if f.summed else 0 for f in op.factors]  # type: ignore[attr-defined]
        degrees = [min(degree, size) if size and i == sizes.index(max(sizes)) else 1 for i, size in enumerate(sizes)]
        return OpConfig(tuple(degrees), (0,) * max([1, *degrees]))

    return choose


@pytest.mark.slow
@pytest.mark.parametrize("dtype", LOWER)
@pytest.mark.parametrize("name", every(2, ["products", "patches", *NORMS]))
def test_parts_of_sums_are_no_farther_from_float64_than_eager(name: str, dtype: torch.dtype) -> None:
    module, x = made(name)
    alone, *tiled = distances(module, (x, LABELS), dtype, [_by_sums(n) for n in (2, 4)])
    assert 0 < alone < 0.1
    assert max(tiled) < 1.5 * alone


class Upwards(nn.Module):
    """Images made twice as large."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.up, self.head = nn.Conv2d(4, 16, 3, 2, 1), nn.ConvTranspose2d(16, 8, 4, 2, 1), nn.Linear(8, 10)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(torch.tanh(self.up(torch.tanh(self.first(x)))).mean((2, 3))), labels)


class Signals(nn.Module):
    """Convolutions over time."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Conv1d(4, 16, 4, 3, 1), nn.Conv1d(16, 16, 3, 2, 1, groups=2), nn.Linear(16, 10)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = torch.tanh(self.second(torch.tanh(self.first(x.flatten(2)))))
        return F.cross_entropy(self.head(x.mean(2)), labels)


def _thin(name: str) -> Callable[..., OpConfig]:
    """The last dimension of space in tiles of one."""

    def choose(op: object) -> OpConfig:
        degrees = [f.size if f.name == name else 1 for f in op.factors]  # type: ignore[attr-defined]
        return OpConfig(tuple(degrees), (0,) * max(degrees))

    return choose


@pytest.mark.parametrize("dtype", LOWER)
@pytest.mark.parametrize(("build", "size", "last"), [(Patches, 32, "w"), (Upwards, 32, "w"), (Signals, 6, "l")])
def test_strided_convolutions_of_one_column_are_no_farther_from_float64_than_eager(
    build: Callable[[], nn.Module], size: int, last: str, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    module = build()
    torch.full((1 << 16,), float("nan"))  # so that what is left unwritten is seen
    alone, tiled = distances(module, (_images(4, size), LABELS), dtype, [_thin(last)])
    assert 0 < alone < 0.1
    assert tiled < 1.5 * alone


@pytest.mark.slow
@pytest.mark.parametrize("name", every(2, [*NORMS]))
def test_norms_by_tiles_are_no_farther_from_float64_than_eager(name: str) -> None:
    module, x = made(name)
    exported = export(module, x, LABELS)
    graph = import_program(exported, name="model", plan_only=True).graph
    drawn = [draw_configs(graph, random.Random(seed)) for seed in range(4)]
    alone, *tiled = distances(module, (x, LABELS), torch.bfloat16, [lambda op, own=own: own[op.name] for own in drawn])
    assert max(tiled) < 2 * alone


def test_what_parts_of_a_sum_are_made_in() -> None:
    """Float32 where the sum is of a lower type, and nowhere else."""
    module, x = made("patches")
    for dtype, made_in in ((torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)):
        model = import_program(export(module, x, LABELS), name="model", dtype=dtype)
        position = next(i for i, op in enumerate(model.graph.operators) if op.kind == "conv2d")
        op = model.graph.operators[position]
        for degree, expected in ((2, made_in), (1, dtype)):
            degrees = tuple(degree if f.name == "c" else 1 for f in op.factors)
            tile = tiles_of(model.graph, position, OpConfig(degrees, (0,) * degree))[0]
            given = [torch.zeros([b - a for a, b in box], dtype=dtype) for box in (*tile.inputs, *tile.parameters)]
            result = model.run_tile(tile, given[: len(op.inputs)], given[len(op.inputs) :], TileContext())[0]
            assert result.dtype == expected


class Sums(nn.Module):
    """Products of all kinds that GPUs make of 16-bit operands in float32: with bias, in batches, of matrices that broadcast."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(32, 64), nn.Linear(8, 10)
        self.weight, self.bias = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = self.layer(x.flatten(2)).unflatten(-1, (8, 8))  # b, positions, 8, 8
        x = torch.tanh(x @ self.weight / 8) @ x
        x = torch.bmm(x.flatten(0, 1), x.flatten(0, 1).transpose(1, 2)) / 8
        x = torch.addmm(self.bias, torch.tanh(x).sum(1), self.weight, alpha=0.5)
        return F.cross_entropy(self.head(x.unflatten(0, (len(labels), -1)).mean(1)), labels)


@pytest.mark.parametrize("dtype", LOWER)
def test_products_of_narrow_operands_give_what_widened_ones_give(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """As GPUs do it, with a stand-in for their product in float32, which processors do not have."""
    torch.manual_seed(0)
    module, x = Sums().to(dtype), _images(5, 4).flatten(2).repeat(1, 1, 2).to(dtype)
    model = import_program(export(module, x, LABELS), name="model")
    configs, split = {}, set()
    for op in model.graph.operators:
        summed = [i for i, factor in enumerate(op.factors) if factor.summed and factor.size > 1]
        degrees = [2 if i in summed[:1] and op.kind in NARROW_PRODUCTS else 1 for i in range(len(op.factors))]
        configs[op.name] = OpConfig(tuple(degrees), tuple(range(prod(degrees))))
        split |= {op.kind} if prod(degrees) > 1 else set()
    assert split == {"linear", "matmul", "bmm", "addmm"}

    def graded() -> tuple[Tensor, dict[str, Tensor]]:
        parameters = {n: p.clone().requires_grad_() for n, p in model.parameters.items()}
        context = TileContext(0, 0, {})
        loss = emulated_loss(model, configs, model.example_inputs, parameters, context)
        loss.backward()
        return loss.detach(), {n: p.grad for n, p in parameters.items() if p.grad is not None}

    expected, gradients = graded()
    multiplied = []

    def multiply(a: Tensor, b: Tensor) -> Tensor:
        assert a.dtype == b.dtype == dtype
        multiplied.append(a.shape)
        return a.float() @ b.float()

    monkeypatch.setattr(compiled, "multiply", multiply)
    monkeypatch.setattr("soap.tracing.compiled.can_stay_narrow", lambda tensors: len({tensor.dtype for tensor in tensors}) == 1)
    found, own = graded()
    assert len(multiplied) == 2 * sum(prod(configs[op.name].degrees) > 1 for op in model.graph.operators)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=0)
    for name, gradient in gradients.items():
        torch.testing.assert_close(own[name], gradient, rtol=0, atol=0.02 * float(gradient.abs().max()), msg=name)


def test_kinds_of_narrow_products_are_those_that_tiles_know() -> None:
    assert set(compiled.PRODUCTS) == NARROW_PRODUCTS
