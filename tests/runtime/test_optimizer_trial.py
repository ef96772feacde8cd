"""What an optimizer's update depends on: found by trying it, of torch's own and of others."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from soap.errors import RuntimeFailure
from soap.runtime.updates import trial
from soap.runtime.updates.optimizers import Recipe, Several
from soap.runtime.updates.trial import ELEMENTWISE, Scope, Tried, optimizer_states, try_optimizer

SHAPES = {"matrix": (8, 4), "vector": (4,), "kernel": (2, 3, 3, 3), "scalar": ()}


def tried(make: Callable[..., Any], shapes: dict[str, tuple[int, ...]] | None = None) -> Tried:
    shapes = SHAPES if shapes is None else shapes
    return try_optimizer(Recipe(make).layout(shapes), shapes)


class Lamb(torch.optim.SGD):
    """A step as long as the tensor."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            parameter -= 0.01 * parameter.grad * parameter.norm() / (parameter.grad.norm() + 1e-12)


class Rows(torch.optim.SGD):
    """Only matrices' rows are scaled, as a whole."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            length = parameter.grad.norm(dim=-1, keepdim=True) if parameter.dim() > 1 else 0.0
            parameter -= 0.01 * parameter.grad / (length + 1)


class Late(torch.optim.SGD):
    """A norm of the whole every ten steps."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            count = self.state[parameter]["count"] = self.state[parameter].get("count", 0) + 1
            parameter -= 0.01 * (parameter.grad / (parameter.grad.norm() + 1) if count % 10 == 0 else parameter.grad)


class Factored(torch.optim.SGD):
    """Means of rows of matrices that are large."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            large = parameter.dim() > 1 and min(parameter.shape[-2:]) >= 128
            scale = parameter.grad.square().mean(-1, keepdim=True) if large else parameter.grad.square()
            parameter -= 0.01 * parameter.grad / (scale.sqrt() + 1)


class Counting(torch.optim.SGD):
    """The more parameters have gradients, the shorter the step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        there = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        for parameter in there:
            parameter -= 0.01 * parameter.grad / len(there)


class Noisy(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            parameter -= 0.01 * parameter.grad + 0.01 * torch.randn_like(parameter)


@pytest.mark.parametrize("kind", sorted(ELEMENTWISE, key=lambda kind: kind.__name__))
def test_those_that_are_known_are_elementwise(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "ELEMENTWISE", frozenset())
    assert set(tried(kind).scopes.values()) == {Scope.ELEMENT}


@pytest.mark.parametrize("make", [lambda p: torch.optim.Adam(p, amsgrad=True), lambda p: torch.optim.SGD(p, momentum=0.9, nesterov=True)])
def test_elementwise_whatever_the_options(make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "ELEMENTWISE", frozenset())
    assert set(tried(make).scopes.values()) == {Scope.ELEMENT}


E, T, M = Scope.ELEMENT, Scope.TENSOR, Scope.MODEL


@pytest.mark.parametrize(
    ("make", "matrix", "vector", "kernel"),
    [
        (torch.optim.Adafactor, T, T, T),
        (lambda p: Lamb(p), T, T, T),
        (lambda p: Rows(p), T, E, T),
        (lambda p: Late(p), T, T, T),
        (lambda p: Factored(p), T, E, T),
        (lambda p: Counting(p), M, M, M),
    ],
)
def test_found_by_kind_of_parameter(make: Callable[..., Any], matrix: Scope, vector: Scope, kernel: Scope) -> None:
    found = tried(make).scopes
    assert (found["matrix"], found["vector"], found["kernel"]) == (matrix, vector, kernel)


def test_a_hook_counts_as_part_of_the_optimizer() -> None:
    def clipped(parameters: Any) -> torch.optim.Optimizer:
        made = torch.optim.SGD(parameters, lr=0.1)
        made.register_step_pre_hook(clip)
        return made

    def clip(own: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        torch.nn.utils.clip_grad_norm_([p for group in own.param_groups for p in group["params"]], 1.0)

    assert set(tried(clipped).scopes.values()) == {Scope.MODEL}


def test_each_parameter_by_the_optimizer_that_it_has() -> None:
    found = tried({"vector": torch.optim.Adam, "kernel": torch.optim.Adam, "scalar": torch.optim.SGD, "*": torch.optim.Muon})
    assert found.whole == ("matrix",) and found.coupled == ()
    assert (found.name, found.states) == ("Adam+Adam+SGD+Muon", 2)


def test_one_that_draws_random_numbers_is_refused() -> None:
    with pytest.raises(RuntimeFailure, match=r"^optimizer Noisy updates 'matrix' differently each time: expected equal updates"):
        tried(lambda p: Noisy(p))


def test_nothing_to_train() -> None:
    assert tried(torch.optim.SGD, {}) == Tried("none", {}, 0, True)


@pytest.mark.parametrize(
    ("make", "dense", "sparse"),
    [
        (torch.optim.SGD, 0, 0),
        (lambda p: torch.optim.SGD(p, momentum=0.9), 1, 2),
        (torch.optim.Adagrad, 1, 1),
        (lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.9), 3, 3),
        (torch.optim.Adafactor, 1, 2),
    ],
)
def test_states_are_counted(make: Callable[..., Any], dense: int, sparse: int) -> None:
    found = tried(make)
    assert (optimizer_states(found, sparse=False), optimizer_states(found, sparse=True)) == (dense, sparse)


def test_several_as_one_keep_their_state_through_a_state_dict() -> None:
    def made(tensors: list[torch.Tensor]) -> Several:
        return Several([torch.optim.Adam([tensors[0]], lr=0.1), torch.optim.SGD([tensors[1]], lr=0.2, momentum=0.9)])

    start = [torch.ones(2, 3), torch.ones(4)]
    first, second = ([tensor.clone().requires_grad_() for tensor in start] for _ in range(2))
    one, other = made(first), made(second)
    for step in range(4):
        if step == 2:
            other.load_state_dict(copy.deepcopy(one.state_dict()))
            for mine, theirs in zip(second, first, strict=True):
                mine.data.copy_(theirs.data)
        for optimizer, tensors in ((one, first), (other, second)):
            if optimizer is one or step >= 2:
                for tensor in tensors:
                    tensor.grad = torch.full_like(tensor, 0.5 + step)
                optimizer.step()
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(second, first, strict=True))
    assert other.members[1].state[second[1]]["momentum_buffer"] is other.state[second[1]]["momentum_buffer"]
