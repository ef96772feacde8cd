from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from soap.errors import CheckpointError
from soap.runtime.checkpoint.manifest import ParameterState
from soap.runtime.checkpoint.rank_state import Known, join, known_here, restore
from soap.runtime.updates.parts import Part
from tests.graph_builder import mlp
from tests.runtime.plans import plan_of, split

PLAN = plan_of(mlp(), split((0, 1), n=2), device_count=2)
TENSORS = {
    number: torch.ones([b - a for a, b in shard.box], requires_grad=True) for number, shard in enumerate(PLAN.shards) if 0 in shard.devices
}

PARTS = {
    number: Part(own.parameter, PLAN.graph.tensors[own.parameter].shape, own.box, tensor, (number,))
    for number, tensor in TENSORS.items()
    for own in [PLAN.shards[number]]
}


def stepped(make: Callable[[list[torch.Tensor]], torch.optim.Optimizer]) -> torch.optim.Optimizer:
    optimizer = make(list(TENSORS.values()))
    for tensor in TENSORS.values():
        tensor.grad = torch.full_like(tensor, 0.5)
    optimizer.step()
    return optimizer


def test_state_by_parameter() -> None:
    known = known_here(PARTS, stepped(lambda p: torch.optim.ASGD(p, lr=0.25, foreach=False)))
    assert known.optimizer == "ASGD"
    assert set(known.states) == {PLAN.shards[number].parameter for number in TENSORS}
    state = known.states["fc0.weight"]
    assert (state.regions, state.scalars, dict(state.values)) == (("ax",), ("eta", "mu", "step"), {})
    assert known.scalars["fc0.weight", "step"] == 1.0
    assert state.options["lr"] == 0.25 and "foreach" not in state.options and "params" not in state.options


def test_nothing_is_known_without_an_optimizer() -> None:
    assert known_here(PARTS, None) == Known()


def test_tensor_options_become_numbers_and_come_back_as_tensors() -> None:
    known = known_here(PARTS, torch.optim.Adam(list(TENSORS.values()), lr=torch.tensor(0.125), foreach=False))
    assert known.states["fc0.weight"].options["lr"] == 0.125
    other = torch.optim.Adam(list(TENSORS.values()), lr=torch.tensor(3.0), foreach=False)
    restore(other, PARTS, known.states, {})
    assert torch.equal(other.param_groups[0]["lr"], torch.tensor(0.125))


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (torch.ones(7), "has shape (7,)"),
        ([1, 2], "is a list"),
        (torch.eye(3).to_sparse(), "has shape (3, 3)"),
    ],
)
def test_what_cannot_be_kept_is_named(value: Any, words: str) -> None:
    optimizer = torch.optim.SGD(list(TENSORS.values()))
    number = next(iter(TENSORS))
    optimizer.state[TENSORS[number]]["odd"] = value
    with pytest.raises(CheckpointError) as caught:
        known_here(PARTS, optimizer)
    assert str(caught.value).startswith(f"optimizer state 'odd' of {PLAN.shards[number].parameter!r} {words}; expected a number")


@pytest.mark.parametrize(
    "other",
    [
        Known("Adam", {"w": ParameterState({"lr": 2.0}, ("m",), ("step",), {})}, {}, {("w", "step"): 1.0}),
        Known("Adam", {"w": ParameterState({"lr": 1.0}, (), ("step",), {})}, {}, {("w", "step"): 1.0}),
        Known("Adam", {"w": ParameterState({"lr": 1.0}, ("m",), ("step",), {})}, {}, {("w", "step"): 2.0}),
        Known("Adam", {"w": ParameterState({"lr": 1.0}, ("m",), ("step",), {})}, {("w", "m"): torch.float64}, {("w", "step"): 1.0}),
    ],
)
def test_shards_of_a_parameter_must_agree(other: Known) -> None:
    one = Known("Adam", {"w": ParameterState({"lr": 1.0}, ("m",), ("step",), {})}, {("w", "m"): torch.float32}, {("w", "step"): 1.0})
    assert join([one, one]) == one
    with pytest.raises(CheckpointError, match="differ among the shards of 'w'; expected the same numbers for a whole parameter"):
        join([one, other])


def test_ranks_must_have_one_optimizer() -> None:
    assert join([Known(), Known("SGD")]).optimizer == "SGD"
    with pytest.raises(CheckpointError, match="optimizers SGD and Adam on different ranks"):
        join([Known("SGD"), Known("Adam")])


def test_groups_that_were_apart_cannot_become_one() -> None:
    names = [PLAN.shards[number].parameter for number in TENSORS]
    states = {name: ParameterState({"lr": float(i)}, (), (), {}) for i, name in enumerate(names)}
    with pytest.raises(CheckpointError, match=f"parameter '{names[1]}' was saved with lr 1.0, another of its group with 0.0; expected"):
        restore(torch.optim.SGD(list(TENSORS.values())), PARTS, states, {})
