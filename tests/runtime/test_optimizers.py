"""The command line's optimizers: the same update as torch's usual ones."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.optim.lr_scheduler import StepLR

from soap.runtime.updates.optimizers import OPTIMIZERS, Recipe, Schedule, adam
from soap.runtime.updates.trial import ELEMENTWISE

USUAL = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_updates_are_the_usual_ones(name: str) -> None:
    generator = torch.Generator().manual_seed(1)
    start = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((3, 5), (7,), (), (0, 2))]
    ours, usual = ([tensor.clone().requires_grad_() for tensor in start] for _ in range(2))
    made, known = OPTIMIZERS[name](ours, 0.1), USUAL[name](usual, lr=0.1)
    for _ in range(4):
        for one, other in zip(ours, usual, strict=True):
            one.grad = torch.randn(one.shape, generator=generator, dtype=torch.float64)
            other.grad = one.grad.clone()
        made.step()
        known.step()
    torch.testing.assert_close(ours, usual, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", sorted({kind.__name__ for kind in ELEMENTWISE} | {"Muon", "Adafactor"} | set(OPTIMIZERS)))
def test_a_rank_may_keep_nothing_of_a_group(name: str) -> None:
    make = partial(OPTIMIZERS[name], lr=0.1) if name in OPTIMIZERS else getattr(torch.optim, name)
    recipe = Recipe(make, lambda parameter, shape: {"lr": 0.1 if parameter == "there" else 0.2}, lambda own: StepLR(own, 1, 0.5))
    layout = recipe.layout({"first": (3, 2), "there": (2, 2), "last": (2,) if name != "Muon" else (1, 2)})
    tensor = torch.ones(2, 2, requires_grad=True)
    made = layout.optimizer({"there": [tensor], "last": []})
    assert made is not None and [len(group["params"]) for group in made.param_groups] == [0, 1]
    schedule = Schedule.of(recipe.schedule, made)
    tensor.grad = torch.ones(2, 2)
    made.step()
    schedule.step(1.0)
    assert not torch.equal(tensor, torch.ones(2, 2))
    assert [group["lr"] for group in made.param_groups] == [0.1, 0.05]
    assert layout.optimizer({"there": []}) is None


def test_adam_goes_over_a_tensor_once_on_cpus_alone() -> None:
    assert adam([torch.zeros(2)], 0.1).defaults["fused"] is True
    assert adam([torch.zeros(2, device="meta")], 0.1).defaults["fused"] is None
