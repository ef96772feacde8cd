"""Casts as calls compute, bit for bit, what ``torch.autocast`` computes."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from soap import api
from soap.cluster.presets import local_topology
from soap.errors import ModelError
from soap.model.graph import FactorKind
from soap.strategy.classical import data_parallel
from soap.strategy.config import OpConfig
from soap.tracing.autocast import Autocast, Caster
from soap.tracing.calls import Call, TileContext
from soap.tracing.export import export_model
from soap.tracing.importer import import_program
from soap.tracing.load import load_model
from soap.tracing.rules.notation import Local
from tests.processor import lacks_lstm_under_autocast, needs_lstm_under_autocast
from tests.tracing.emulation import graded
from tests.tracing.programs import Lambda, export

LOW = torch.bfloat16


def attention(self: Any, x: Tensor) -> Tensor:
    q, k, v = self.qkv(x).view(2, 4, 3, 2, 4).permute(2, 0, 3, 1, 4)
    return F.scaled_dot_product_attention(q, k, v).square().mean()


def block(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = self.layer(x)
    return (self.layer(x) * y).sum()


CASES: dict[str, tuple[Callable[..., Any], dict[str, Any], tuple[Tensor, ...]]] = {
    "linear and norm": (
        lambda self, x: F.mse_loss(self.norm(self.layer(x) + x), x),
        {"layer": nn.Linear(8, 8), "norm": nn.LayerNorm(8)},
        (torch.linspace(-1, 1, 32).view(4, 8),),
    ),
    "mixed operands": (
        lambda self, x: torch.cat([self.layer(x), x]).sum(),
        {"layer": nn.Linear(8, 8)},
        (torch.linspace(-1, 1, 32).view(4, 8),),
    ),
    "casts of the user's": (
        lambda self, x: (self.layer(x).float().softmax(-1) * x.double()).sum(),
        {"layer": nn.Linear(8, 8)},
        (torch.linspace(-1, 1, 32).view(4, 8),),
    ),
    "in place": (lambda self, x: (x + 1).add_(self.layer(x)).relu_().sum(), {"layer": nn.Linear(8, 8)}, (torch.ones(4, 8),)),
    "attention": (attention, {"qkv": nn.Linear(8, 24)}, (torch.linspace(-1, 1, 64).view(2, 4, 8),)),
    "convolution": (
        lambda self, x: F.max_pool2d(self.conv(x), 2).sum(),
        {"conv": nn.Conv2d(3, 4, 3)},
        (torch.linspace(-1, 1, 192).view(1, 3, 8, 8),),
    ),
    "matrices": (
        lambda self, x: (x @ self.w @ x.mT).sum(),
        {"w": nn.Parameter(torch.ones(8, 8))},
        (torch.linspace(-1, 1, 64).view(2, 4, 8),),
    ),
    "no gradients": (block, {"layer": nn.Linear(8, 8)}, (torch.ones(4, 8),)),
    "loss": (
        lambda self, x: F.cross_entropy(self.layer(x), torch.tensor([0, 1, 2, 3])),
        {"layer": nn.Linear(8, 8)},
        (torch.linspace(-1, 1, 32).view(4, 8),),
    ),
}


def both(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, dict[str, Tensor], Tensor, dict[str, Tensor]]:
    """Loss and gradients of torch's autocast, and of the program with casts."""
    with torch.autocast("cpu", dtype=LOW, cache_enabled=False):
        expected = module(*inputs)
    expected.backward()
    gradients = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = import_program(export(module, *inputs), name="m", autocast=LOW)
    parameters = {name: p.detach().clone().requires_grad_() for name, p in model.parameters.items()}
    loss = model.reference_loss(inputs, parameters, TileContext(0, 0, {}))
    loss.backward()  # type: ignore[no-untyped-call]
    for name, tensor in model.program.values.items():
        assert name not in model.program.constants or tensor.dtype == model.program.constants[name].dtype
    return expected.detach(), gradients, loss.detach(), {n: p.grad for n, p in parameters.items() if p.grad is not None}


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients_are_torchs(name: str) -> None:
    torch.manual_seed(0)
    function, members, inputs = CASES[name]
    expected, gradients, loss, found = both(Lambda(function, **members), inputs)
    assert loss.dtype == expected.dtype
    assert torch.equal(loss, expected)
    assert found.keys() == gradients.keys()
    assert all(torch.equal(found[n], gradients[n]) for n in gradients)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_layers_that_cast_inside_run_under_autocast(kind: type[nn.RNNBase]) -> None:
    torch.manual_seed(0)
    module = Lambda(lambda self, x: self.memory(x)[0].float().square().sum(), memory=kind(4, 4, batch_first=True))
    inputs = (torch.linspace(-1, 1, 24).view(2, 3, 4),)
    if kind is nn.LSTM:
        needs_lstm_under_autocast(LOW)
    expected, gradients, loss, found = both(module, inputs)
    torch.testing.assert_close(loss, expected, rtol=1e-2, atol=1e-2)
    assert found.keys() == gradients.keys()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = import_program(export(module, *inputs), name="m", autocast=LOW)
    calls = [call for call in model.program.calls if isinstance(call.target, Autocast)]
    assert len(calls) == 1 and all(op.partitionable for op in model.graph.operators)


class WithoutPrimitive:
    """A call that fails as oneDNN does where the processor lacks instructions."""

    _schema, tags = torch.ops.aten.lstm.input._schema, ()

    def __call__(self, *_: Tensor) -> Tensor:
        raise RuntimeError("could not create a primitive descriptor for the LSTM forward propagation primitive. Run workload with …")


def test_instructions_that_the_processor_lacks_are_told_in_one_line() -> None:
    with pytest.raises(ModelError, match=r"^this processor cannot compute aten::lstm under autocast to bfloat16, with or without SOAP: .*"):
        Autocast(WithoutPrimitive(), LOW, [LOW])(torch.zeros(2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_lstm_under_autocast_runs_or_says_why_not(dtype: torch.dtype) -> None:
    module = Lambda(lambda self, x: self.memory(x)[0].float().square().sum(), memory=nn.LSTM(4, 4))
    inputs = (torch.linspace(-1, 1, 24).view(3, 2, 4),)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = import_program(export(module, *inputs), name="m", autocast=dtype)
    if lacks_lstm_under_autocast(dtype):
        with pytest.raises(ModelError, match=r"^this processor cannot compute aten::lstm under autocast to"):
            model.reference_loss(inputs, model.parameters, TileContext(0, 0, {}))
    else:
        assert model.reference_loss(inputs, model.parameters, TileContext(0, 0, {})) > 0


@pytest.mark.parametrize("degree", [1, 2])
def test_by_a_gpus_list_the_loss_of_classes_is_computed_in_float32(degree: int) -> None:
    """Its second half is on that list: rounded to bfloat16 before, or by a tile, the loss would be off by a thousandth."""
    torch.manual_seed(0)
    module = Lambda(lambda self, x, labels: F.cross_entropy(self.head(x), labels), head=nn.Linear(8, 30))
    inputs = (torch.randn(6, 8), torch.randint(30, (6,)))
    model = import_program(export(module, *inputs), name="m", autocast=LOW, autocast_device="cuda")
    assert not [call for call in model.program.calls if isinstance(call.target, Autocast)]
    configs = {op.name: OpConfig(tuple(degree if f.size == 6 else 1 for f in op.factors), (0,) * degree) for op in model.graph.operators}
    loss, gradients = graded(model, configs)
    with torch.autocast("cpu", dtype=LOW):
        logits = module.head(inputs[0]).float()
    expected = F.cross_entropy(logits, inputs[1])
    assert loss.dtype == torch.float32 and abs(loss - expected) < 1e-6
    assert gradients.keys() == {"head.weight", "head.bias"}


def test_what_a_tile_computes_in_its_own_way_is_cast_as_its_call_is() -> None:
    target = Autocast(torch.ops.aten.linear.default, LOW, [torch.float32])
    local = Local(Call("y", target, (), {}, ("y",), ""), [torch.randn(2, 3), torch.randn(4, 3)], [], [], [], [])
    found = target.within(lambda local: F.linear(*local.tensors))(local)
    with torch.autocast("cpu", dtype=LOW):
        assert torch.equal(found, F.linear(*local.tensors).float()) and found.dtype == torch.float32


def test_what_travels_has_the_type_that_was_made(tmp_path: Path) -> None:
    function, members, inputs = CASES["linear and norm"]
    export_model(Lambda(function, **members), inputs, path=tmp_path / "m.pt2")
    plain, cast = load_model(tmp_path / "m.pt2"), load_model(tmp_path / "m.pt2", autocast="bfloat16")
    assert cast.graph.hash != plain.graph.hash
    made = {op.kind: cast.graph.tensors[op.outputs[0].tensor].dtype for op in cast.graph.operators}
    assert made["linear"] == "bfloat16" and made["mse_loss"] == made["layer_norm"] == "float32"
    assert {t.dtype for t in cast.graph.parameters} == {"float32"}
    wide = load_model(tmp_path / "m.pt2", autocast="bfloat16", dtype="float64")
    assert {t.dtype for t in wide.graph.tensors.values()} == {"float64"}  # which autocast leaves alone


def _mixed_matrices(self: Any, x: Tensor) -> Tensor:
    """The layer's outcome is of the lower type, the others are not: without autocast they do not go together."""
    return torch.baddbmm(self.layer(x), x, x.mT).sum()


def test_what_is_tried_in_vain_is_told_nobody(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    export_model(Lambda(_mixed_matrices, layer=nn.Linear(4, 4)), (torch.randn(2, 4, 4),), path=tmp_path / "m.pt2")
    caplog.clear()
    load_model(tmp_path / "m.pt2", autocast="bfloat16")
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_other_types_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"^autocast to float32: expected bfloat16 or float16"):
        Caster(torch.float32)
    with pytest.raises(ModelError, match=r"^autocast 'float64': expected one of bfloat16, float16"):
        load_model(tmp_path / "m.pt2", autocast="float64", plan_only=True)


def test_a_model_remembers_float16(tmp_path: Path) -> None:
    function, members, inputs = CASES["linear and norm"]
    export_model(Lambda(function, **members), inputs, path=tmp_path / "m.pt2")
    assert load_model(tmp_path / "m.pt2", autocast="float16").autocast == "float16"
    assert load_model(tmp_path / "m.pt2").autocast is None
    graph = load_model(tmp_path / "m.pt2", autocast="float16", plan_only=True).graph
    made = {op.kind: (op.arithmetic, graph.tensors[op.outputs[0].tensor].dtype) for op in graph.operators}
    assert made["linear"] == ("float16", "float16") and made["mse_loss"][1] == "float32"
    assert {t.dtype for t in graph.parameters} == {"float32"}


class Images(nn.Module):
    """Its first call reads the input with a halo, and so makes the cast of all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 3, padding=1)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.second(self.first(images).relu()).mean((2, 3)), labels)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_casts_of_inputs_keep_their_samples(tmp_path: Path, device: str) -> None:
    """Data parallelism would otherwise compute the whole batch on every device."""
    api.export(Images(), (torch.randn(4, 3, 8, 8), torch.tensor([0, 1, 2, 3])), path=tmp_path / "m.pt2")
    graph = load_model(str(tmp_path / "m.pt2"), autocast="bfloat16", autocast_device=device).graph
    samples = {op.name: [f.size for f in op.factors if f.kind is FactorKind.SAMPLE] for op in graph.operators}
    assert set(map(tuple, samples.values())) == {(4,)}
    strategy = data_parallel(graph, local_topology(4))
    assert all(config.replicas == 1 and max(config.degrees) == 4 for config in strategy.operators.values())
