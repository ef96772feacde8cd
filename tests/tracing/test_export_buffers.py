"""Buffers of every type, and buffers that forward assigns: programs have them as eager PyTorch does, step by step."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import soap
from soap.cluster.presets import local_topology
from soap.errors import ModelError
from soap.runtime.check import TOLERANCES, check, largest
from soap.runtime.trainer import Trainer
from soap.strategy.classical import CLASSICAL
from tests.runtime.exact_modules import sgd
from tests.tracing.exporting import mean_square

X = torch.linspace(-1, 1, 48).reshape(8, 6)
STEPS = 4


class Kept(nn.Module):
    """A layer with a buffer that is read, and one that each step changes or assigns."""

    fixed: Tensor
    passing: Tensor
    moved: Tensor

    def __init__(self, kind: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 4)
        self.register_buffer("fixed", torch.tensor([1, 0, 1, 1]).to(kind))
        self.register_buffer("passing", torch.tensor([0, 1, 1, 0]).to(kind), persistent=False)
        self.register_buffer("moved", torch.zeros(4).to(kind))


class Assigned(Kept):
    def forward(self, x: Tensor) -> Tensor:
        z = self.layer(x)
        y = z * (self.fixed.float() + self.passing.float() + self.moved.float())
        self.moved = (self.moved.float() + (z.detach().mean(0) > -0.1)).clamp(max=1).to(self.moved.dtype)
        return mean_square(y)


class Written(Kept):
    def forward(self, x: Tensor) -> Tensor:
        z = self.layer(x)
        y = z * (self.fixed.float() + self.passing.float() + self.moved.float())
        self.moved.copy_((self.moved.float() + (z.detach().mean(0) > -0.1)).clamp(max=1))
        return mean_square(y)


KINDS = (
    torch.bool, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8, torch.int8, torch.int64, torch.float16, torch.bfloat16, torch.uint16,
)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("module", [Assigned, Written])
def test_buffers_of_every_type_train_as_eager_does(module: type[Kept], kind: torch.dtype, tmp_path: Path) -> None:
    """Loss, parameters and buffers over several steps, and under a check; the module stays as it was."""
    own = module(kind)
    before, held = copy.deepcopy(own.state_dict()), dict(own._buffers)
    soap.export(own, (X,), path=tmp_path / "m.pt2")
    assert all(own._buffers[name] is tensor for name, tensor in held.items())
    assert all(torch.equal(tensor, own.state_dict()[name]) for name, tensor in before.items())
    model = soap.load(tmp_path / "m.pt2")
    plain, optimizer = own, sgd(list(own.parameters()))
    with Trainer(model, (CLASSICAL["data_parallel"](model.graph, local_topology(1)), local_topology(1)), optimizer=sgd) as trainer:
        assert check(trainer, lambda step: [X], sgd, 1).passed
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = plain(X)
            loss.backward()
            optimizer.step()
            if step:
                assert trainer.step(X) == pytest.approx(float(loss), rel=1e-5)
        state = trainer.state_dict()
    assert state["moved"].dtype is kind and state["fixed"].dtype is kind
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(state[name].float(), tensor.float(), rtol=1e-5, atol=1e-7)


class Averaging(nn.Module):
    """A module that others contain, whose forward assigns its buffer."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, z: Tensor) -> Tensor:
        y = z + self.mean
        self.mean = 0.7 * self.mean + 0.3 * z.detach().mean(0)
        return y


class Nested(nn.Module):
    """``times``: how often it calls the module inside."""

    def __init__(self, times: int = 1, *, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.times = nn.Linear(6, 4), times
        inner = Averaging()
        self.inside = nn.ModuleDict({"first": nn.Sequential(inner), "second": inner if tied else Averaging()})

    def forward(self, x: Tensor) -> Tensor:
        z = self.layer(x)
        for _ in range(self.times):
            z = self.inside["second"](self.inside["first"](z))
        return mean_square(z)


class Outside(nn.Module):
    """Assigns a buffer of a module that it does not call."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.kept = nn.Linear(6, 4), nn.Identity()
        self.kept.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        z = self.layer(x)
        y = z + self.kept.mean
        self.kept.mean = torch.lerp(self.kept.mean, z.detach().mean(0), 0.3)
        return mean_square(y)


@pytest.mark.parametrize("module", [Nested(), Nested(2), Nested(2, tied=True), Outside()], ids=["nested", "twice", "tied", "outside"])
@pytest.mark.parametrize("loss", [None, lambda output: output * 2], ids=["own", "loss"])
def test_buffers_that_forward_assigns_in_submodules_train_as_eager_does(module: nn.Module, loss: Any, tmp_path: Path) -> None:
    held = {name: id(buffer) for name, buffer in module.named_buffers()}
    soap.export(module, (X,), path=tmp_path / "m.pt2", loss=loss)
    assert {name: id(buffer) for name, buffer in module.named_buffers()} == held and not module._forward_hooks
    model, topology, eager = soap.load(str(tmp_path / "m.pt2")), local_topology(1), copy.deepcopy(module)
    expected, optimizer = [], torch.optim.SGD(eager.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
    for step in range(STEPS):
        optimizer.zero_grad()
        value = eager(X + step) if loss is None else loss(eager(X + step))
        value.backward()
        optimizer.step()
        expected.append(value.item())
    with Trainer(model, (CLASSICAL["data_parallel"](model.graph, topology), topology), optimizer=sgd) as trainer:
        found = [trainer.step(X + step) for step in range(STEPS)]
        state = trainer.state_dict()
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected))
    for name, buffer in eager.named_buffers():
        assert buffer.abs().max() > 0
        torch.testing.assert_close(state[name], buffer)


class Growing(Outside):
    def forward(self, x: Tensor) -> Tensor:
        z = self.layer(x)
        self.kept.mean = torch.cat([self.kept.mean, z.detach().mean().reshape(1)])
        return mean_square(z)


class Undetached(Nested):
    def forward(self, x: Tensor) -> Tensor:
        z, own = self.layer(x), self.inside["second"]
        y = z + own.mean
        own.mean = 0.5 * own.mean + 0.5 * z.mean(0)
        return mean_square(y)


def test_buffers_that_no_program_or_no_step_can_have_are_refused(tmp_path: Path) -> None:
    grown = r"^forward assigns buffer 'kept\.mean' a tensor float32\[5\]; expected float32\[4\], as it was: buffers keep their shape$"
    for module, words in (
        (Growing(), grown),
        (Undetached(), r"^one step of Undetached on the example inputs fails in eager PyTorch \(RuntimeError: Trying to backward through"),
    ):
        with pytest.raises(ModelError, match=words):
            soap.export(module, (X,), path=tmp_path / "m.pt2")


def test_a_buffer_that_a_program_lacks_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("soap.tracing.export.assigned_buffers_followed", lambda module: nullcontext())
    with pytest.raises(ModelError, match=r"^forward changes buffer 'kept\.mean', of which its program has nothing; expected an assignment"):
        soap.export(Outside(), (X,), path=tmp_path / "m.pt2")


def test_the_largest_element_of_any_type() -> None:
    for kind in (*KINDS, *TOLERANCES, torch.complex64, torch.complex128):
        assert largest(torch.tensor([0, 1, 0]).to(kind)) == 1 and largest(torch.empty(0, dtype=kind)) == 0
    assert largest(torch.tensor([-128], dtype=torch.int8)) == 128
    assert largest(torch.tensor([3 - 4j])) == 5


def test_a_module_that_fails_in_its_second_step_fails_in_eager(tmp_path: Path) -> None:
    class Once(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.used = nn.Linear(6, 4), False

        def forward(self, x: Tensor) -> Tensor:
            if self.used:
                raise RuntimeError("used up")
            self.used = True
            return mean_square(self.layer(x))

    module = Once()
    with pytest.raises(ModelError, match=r"one step of Once on the example inputs fails in eager PyTorch \(RuntimeError: used up\)"):
        soap.export(module, (X,), path=tmp_path / "m.pt2")
    assert not module.used


def test_what_eager_computes_does_not_fail_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise NotImplementedError("no such type")

    monkeypatch.setattr("soap.runtime.eager.difference", fails)
    with pytest.raises(ModelError, match=r"cannot be compared with eager PyTorch, which computes it \(NotImplementedError: no such type\)"):
        soap.export(Written(torch.bool), (X,), path=tmp_path / "m.pt2")
