"""Buffers that the forward pass moves, in one process: what is read of them, what is kept, and what is refused."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization import (
    FusedMovingAvgObsFakeQuantize,
    MinMaxObserver,
    MovingAveragePerChannelMinMaxObserver,
    PerChannelMinMaxObserver,
)
from torch.nn.utils.parametrizations import spectral_norm

from soap.errors import ModelError, SoapWarning
from soap.model.graph import KEEP_STATE, NEXT_STATE, TensorKind
from soap.tracing.calls import TileContext
from soap.tracing.execute import TracedModel
from soap.tracing.importer import import_program
from soap.tracing.load import load_model
from tests.extent import every
from tests.runtime.state_modules import EXAMPLES, batches_of, module_of
from tests.tracing.programs import Lambda, export, imported


def assert_trains_as_eager(model: TracedModel, eager: nn.Module, batches: list[list[Tensor]], tolerance: float = 1e-12) -> None:
    """Loss, every gradient and every buffer, with updates of the parameters in between."""
    parameters = {n: t.detach().clone().requires_grad_(model.graph.tensors[n].requires_grad) for n, t in model.parameters.items()}
    buffers = {name: tensor.clone() for name, tensor in model.buffers.items()}
    for step, batch in enumerate(batches):
        eager.zero_grad()
        expected = eager(*batch)
        expected.backward()
        context = TileContext(0, step, buffers)
        found = model.reference_loss(batch, parameters, context)
        model.end_step(context)  # before the backward pass: what that needs of the old values is not overwritten
        found.backward()
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
        for name, parameter in eager.named_parameters():
            if parameter.grad is not None:
                mine = parameters[name]
                torch.testing.assert_close(mine.grad, parameter.grad, rtol=tolerance, atol=tolerance)
                with torch.no_grad():
                    parameter -= 0.1 * parameter.grad
                    mine -= 0.1 * mine.grad
                    mine.grad = None
        state = dict(eager.named_buffers(remove_duplicate=False)) | dict(eager.named_parameters())
        for name, buffer in buffers.items():
            torch.testing.assert_close(buffer, state[name], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", every(2, [*EXAMPLES]))
def test_examples_train_as_eager_does(name: str, tmp_path: Path) -> None:
    """Read from memory and from a file."""
    batches = batches_of(name, [4] * 4)
    exported = export(module_of(name), *batches[0])
    assert_trains_as_eager(import_program(exported, name="model"), module_of(name), batches)
    torch.export.save(exported, tmp_path / "model.pt2")
    assert_trains_as_eager(load_model(tmp_path / "model.pt2"), module_of(name), batches)


@pytest.mark.parametrize(
    "observer", [MinMaxObserver, PerChannelMinMaxObserver, MovingAveragePerChannelMinMaxObserver, FusedMovingAvgObsFakeQuantize]
)
def test_observers_of_quantization_train_as_eager_does(observer: Any) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 8), observer(), nn.Linear(8, 1)).train()
    batches = [[torch.randn(4, 6)] for _ in range(4)]
    module(*batches[0])  # observers by channel take their shape from their first batch

    def loss(self: Any, x: Tensor) -> Tensor:
        return self.inner(x).square().mean()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = import_program(export(Lambda(loss, inner=module), *batches[0]), name="model")
    assert len(model.state) >= 2
    assert_trains_as_eager(model, Lambda(loss, inner=copy.deepcopy(module)), batches, 1e-5)


def test_observers_by_channel_need_a_shape() -> None:
    observer = FusedMovingAvgObsFakeQuantize(
        observer=MovingAveragePerChannelMinMaxObserver,
        quant_min=-128,
        quant_max=127,
        dtype=torch.qint8,
        qscheme=torch.per_channel_symmetric,
    )
    module = Lambda(lambda self, x: self.inner(self.layer(x)).sum(), inner=observer, layer=nn.Linear(3, 4)).train()
    with pytest.raises(ModelError, match="its shape with the first batch; expected it before the export: run the module once"):
        import_program(export(copy.deepcopy(module), torch.ones(2, 3)), name="model")
    module(torch.ones(2, 3))
    with pytest.warns(SoapWarning, match="no rule for soap.moving_fake_quantize"):
        model = import_program(export(module, torch.ones(2, 3)), name="model")
    assert_trains_as_eager(model, copy.deepcopy(module), [[torch.randn(2, 3)] for _ in range(3)], 1e-5)


def _weight() -> nn.Parameter:
    return nn.Parameter(torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(3, 4))


def _x() -> Tensor:
    return torch.linspace(-2, 3, 6, dtype=torch.float64).reshape(2, 3)


def _parts(self: Any, y: Tensor) -> Tensor:
    self.b[1:3].lerp_(y.mean(0)[1:3], 0.5)
    self.b.view(2, 2).t()[0].mul_(0.5)
    return self.b


def _masked(self: Any, y: Tensor) -> Tensor:
    self.b.masked_fill_(y.mean(0) > 0, 2.0).clamp_(0, 1.5)
    return self.b


def _indexed(self: Any, y: Tensor) -> Tensor:
    self.b.zero_().index_add_(0, torch.tensor([0, 2, 1, 1]), y.mean(0)).scatter_add_(0, torch.tensor([3, 2]), y[0, :2])
    return self.b


def _out(self: Any, y: Tensor) -> Tensor:
    torch.mean(y, 0, out=self.b)
    return torch.maximum(self.b, self.b.flip(0), out=self.b)


def _detached(self: Any, y: Tensor) -> Tensor:
    """What was taken of the buffer before it moves: a copy stays, what shares its memory follows."""
    old, same = self.b.clone(), self.b.detach()
    self.b.add_(y.mean(0))
    same.mul_(0.5)
    return old + same * self.b


@pytest.mark.parametrize("change", [_parts, _masked, _indexed, _out, _detached])
@pytest.mark.parametrize("grad", [True, False])
def test_ways_to_move_a_buffer(change: Any, grad: bool) -> None:
    def loss(self: Any, x: Tensor) -> Tensor:
        y = x @ self.w
        if grad:
            return (y - change(self, y.detach())).square().mean()
        with torch.no_grad():
            found = change(self, y)
        return (y * found).sum() + (y - self.b).square().mean()

    module = Lambda(loss, w=_weight(), b=torch.linspace(0, 1, 4, dtype=torch.float64))
    model = import_program(export(copy.deepcopy(module), _x()), name="model")
    assert [op.kind for op in model.graph.operators][-2:] == [NEXT_STATE, KEEP_STATE]
    assert_trains_as_eager(model, module, [[_x() + step] for step in range(3)])


def test_old_values_are_no_constants_of_the_import() -> None:
    """Nothing that depends on a buffer which moves is evaluated once and for all."""

    def loss(self: Any, x: Tensor) -> Tensor:
        factor = torch.exp(self.b * 2)
        self.b.add_(1.0)
        return ((x @ self.w) * factor).sum()

    module = Lambda(loss, w=_weight(), b=torch.zeros(4, dtype=torch.float64))
    model = import_program(export(copy.deepcopy(module), _x()), name="model")
    assert model.state == {"b_b": "b"}
    assert model.graph.tensors["b_b"].kind is TensorKind.CONSTANT
    assert_trains_as_eager(model, module, [[_x()]] * 3)


def test_nothing_moves_where_buffers_are_left_alone() -> None:
    model = imported(module_of("codebook"), *batches_of("codebook", [4])[0])
    buffers = {name: tensor.clone() for name, tensor in model.buffers.items()}
    context = TileContext(0, 0, buffers, update_buffers=False)
    model.reference_loss(model.example_inputs, model.parameters, context)
    model.end_step(context)
    assert all(torch.equal(buffers[name], tensor) for name, tensor in model.buffers.items())


def test_state_carries_no_gradient_and_stays_out_of_the_backward_pass() -> None:
    graph = imported(module_of("codebook"), *batches_of("codebook", [4])[0]).graph
    for name in (NEXT_STATE, KEEP_STATE):
        position = graph.index[name]
        assert position not in graph.backward_operators
        assert not graph.needs_backward(graph.operators[position])


def test_counters_that_nobody_reads_need_no_operator() -> None:
    model = imported(module_of("codebook"), *batches_of("codebook", [4])[0])
    assert [call.kind for call in model.program.end_step] == ["add_"]
    assert set(model.state.values()) == {"book", "size", "total", "low"}


class Shared(nn.Module):
    """One layer under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.a = spectral_norm(nn.Linear(3, 3))
        self.b = self.a

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x))).square().mean()


def test_a_buffer_with_two_names() -> None:
    torch.manual_seed(0)
    module, batches = Shared().train().double(), [[_x()]] * 3
    model = import_program(export(copy.deepcopy(module), *batches[0]), name="model")
    name = "parametrizations.weight.0._u"
    assert f"a.{name}" in model.state.values()
    assert model.graph.aliases[f"b.{name}"] == f"a.{name}"
    assert f"b.{name}" not in model.unchanged
    assert_trains_as_eager(model, module, batches)


def test_frozen_parameters_that_nothing_moves_stay_parameters() -> None:
    """Also where two layers share one."""
    torch.manual_seed(0)
    frozen = nn.Linear(3, 3).requires_grad_(False)
    other = nn.Linear(3, 3)
    other.weight = frozen.weight
    module = Lambda(lambda self, x: self.two(self.layer(self.one(x))).square().sum(), one=frozen, two=other, layer=nn.Linear(3, 3))
    model = import_program(export(module.double(), _x()), name="model")
    assert not model.state
    assert not model.buffers
    assert {"one.weight", "one.bias"} <= model.parameters.keys()


class Overlapping(nn.Module):
    def __init__(self, other: str) -> None:
        super().__init__()
        self.w, memory = _weight(), torch.zeros(8, dtype=torch.float64)
        self.register_buffer("b", memory)
        self.register_buffer("other", memory[:4] if other == "buffer" else self.w.data[0])
        self.moves = other == "buffer"

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.w
        if self.moves:
            self.b.add_(y.detach().mean())
        return (y - self.other).square().mean() + self.b.sum()


@pytest.mark.parametrize("other", ["buffer", "parameter"])
def test_buffers_that_change_with_others_memory_are_refused(other: str) -> None:
    with pytest.raises(ModelError, match=r"shares memory with .*register a clone"):
        imported(Overlapping(other), _x())


class TwoParameters(nn.Module):
    """Two parameters in one piece of memory."""

    def __init__(self, one: Tensor, other: Tensor, *, trained: bool = True) -> None:
        super().__init__()
        self.one, self.other = nn.Parameter(one, trained), nn.Parameter(other, trained)
        self.scale = nn.Parameter(torch.ones(4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return (torch.tanh(x @ self.one) @ self.other * self.scale).square().mean()


def _memory() -> Tensor:
    return torch.linspace(-1, 1, 32, dtype=torch.float64)


SHARED: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "the same": lambda m: (m[:16].view(4, 4), m[:16].view(4, 4)),
    "transposed": lambda m: (m[:16].view(4, 4), m[:16].view(4, 4).t()),
    "half of it": lambda m: (m[:16].view(4, 4), m[8:24].view(4, 4)),
    "a column": lambda m: (m.view(4, 8)[:, :4], m.view(4, 8)[:, 3:7]),
}
APART: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "halves": lambda m: (m[:16].view(4, 4), m[16:].view(4, 4)),
    "columns": lambda m: (m.view(4, 8)[:, :4], m.view(4, 8)[:, 4:]),
}


@pytest.mark.parametrize("name", SHARED)
def test_two_parameters_in_one_memory_are_refused(name: str) -> None:
    with pytest.raises(ModelError, match=r"'one' and 'other' are two parameters in one memory.*module.other = module.one.*a clone"):
        imported(TwoParameters(*SHARED[name](_memory())), torch.randn(3, 4, dtype=torch.float64))
    imported(TwoParameters(*SHARED[name](_memory()), trained=False), torch.randn(3, 4, dtype=torch.float64))  # nothing moves


@pytest.mark.parametrize("name", APART)
def test_parameters_side_by_side_in_one_memory_are_two(name: str) -> None:
    model = imported(TwoParameters(*APART[name](_memory())), torch.randn(3, 4, dtype=torch.float64))
    assert model.parameters.keys() == {"one", "other", "scale"}


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.table(ids)).square().mean()  # type: ignore[no-any-return]


def test_a_tie_that_loading_has_cut_is_told_and_mended_as_told() -> None:
    module, ids = Tied(), torch.arange(6)
    assert imported(module, ids).parameters.keys() == {"table.weight"}
    module.load_state_dict(module.state_dict(), assign=True)
    with pytest.raises(ModelError, match=r"expected one parameter \(module.head.weight = module.table.weight"):
        imported(module, ids)
    module.head.weight = module.table.weight
    assert imported(module, ids).parameters.keys() == {"table.weight"}


def _foreach(self: Any, y: Tensor) -> Tensor:
    torch._foreach_mul_([self.b, self.c], 0.5)
    return self.b


def _as_integers(self: Any, y: Tensor) -> Tensor:
    self.b.view(torch.int64).add_(1)
    return self.b


@pytest.mark.parametrize("change", [_foreach, _as_integers])
def test_what_cannot_be_followed_is_refused_by_the_buffers_name(change: Any) -> None:
    inner = Lambda(change, b=torch.ones(4, dtype=torch.float64), c=torch.ones(4, dtype=torch.float64))
    module = Lambda(lambda self, x: (x @ self.w - self.inner(x)).sum(), w=_weight(), inner=inner)
    with pytest.raises(ModelError, match=r"buffer 'inner\.b' is changed in a way that cannot be followed: .*write it out of place"):
        imported(module, _x())


def test_reading_running_statistics_of_batch_norm_is_refused() -> None:
    module = Lambda(lambda self, x: (self.norm(x) * self.norm.running_mean).sum(), norm=nn.BatchNorm1d(3))
    with pytest.raises(ModelError, match=r"buffer 'norm\.running_mean' holds running statistics of batch norm, which call 'mul' reads"):
        imported(module, torch.ones(2, 3))


@pytest.mark.parametrize("name", ["codebook", "queue"])
def test_decomposed_programs_that_no_longer_say_where_gradients_stop_are_refused(name: str) -> None:
    exported = export(module_of(name), *batches_of(name, [4])[0]).run_decompositions()
    with pytest.raises(ModelError, match=r"decomposed \(run_decompositions\).*buffer '\w+' is moved"):
        import_program(exported, name="model")


def test_other_decomposed_programs_are_read_with_a_warning() -> None:
    detached = Lambda(lambda self, x: ((x @ self.w).detach() * self.w.sum()).sum(), w=_weight())
    with pytest.raises(ModelError, match=r"decomposed \(run_decompositions\).*was detached"):
        import_program(export(detached, _x()).run_decompositions(), name="model")
    plain = Lambda(lambda self, x: (x @ self.w).square().sum(), w=_weight())
    with pytest.warns(SoapWarning, match=r"decomposed \(run_decompositions\)"):
        model = import_program(export(copy.deepcopy(plain), _x()).run_decompositions(), name="model")
    assert_trains_as_eager(model, plain, [[_x()]])
