"""Buffers of every type, and buffers that forward assigns: programs have them as eager PyTorch does, step by step."""

from __future__ import annotations

import copy
from collections.abc import Callable
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


class Reshaped(Kept):
    def __init__(self, assigned: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__(torch.float32)
        self.assigned = assigned

    def forward(self, x: Tensor) -> Tensor:
        z = self.layer(x)
        y = z * self.moved.sum()
        self.moved = self.assigned(self.moved, z.detach())
        return mean_square(y)


@pytest.mark.parametrize(
    ("assigned", "given"),
    [
        (lambda moved, z: torch.cat([moved, z[0, :1]]), "(5,)"),
        (lambda moved, z: z[0, :1], "(1,)"),  # could be broadcast
        (lambda moved, z: z, "(8, 4)"),
    ],
)
def test_a_buffer_that_changes_its_shape_is_refused(assigned: Callable[[Tensor, Tensor], Tensor], given: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError) as refused:
        soap.export(Reshaped(assigned), (X,), path=tmp_path / "m.pt2")
    assert str(refused.value) == f"buffer 'moved' has shape (4,) and is given shape {given}; expected that buffers keep their shape"
