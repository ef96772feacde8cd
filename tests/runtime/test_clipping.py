from __future__ import annotations

from typing import Any

import pytest
import torch

from soap.plan.plan import Plan
from soap.plan.syncs.clipping import NORM_NAME
from soap.runtime.trainer import Trainer
from soap.runtime.updates.loss_scaling import limit, squares, summed
from tests.graph_builder import mlp
from tests.runtime.handmade import HandModel
from tests.runtime.plans import plan_of, split
from tests.runtime.pool import Pool

PLANS = {
    "copies": plan_of(mlp(), split((0, 1, 2), b=3)),
    "parts": plan_of(mlp(), split((0, 1, 2), n=3)),
    "both": plan_of(mlp(), split((0, 1), n=2), fc1=split((2, 0, 1), replicas=3)),
}


def norms(plan: Plan, largest: float) -> tuple[float | None, float, dict[str, torch.Tensor]]:
    """What the trainer says the norm was, what torch says, and the clipped gradients."""
    model = HandModel(plan.graph)
    with Trainer(model, plan, dtype=torch.float64) as plain:
        plain.step(*model.inputs(0))
        whole = plain.gradients()
    with Trainer(model, plan, dtype=torch.float64, clip_norm=largest) as trainer:
        trainer.step(*model.inputs(0))
        found = trainer.gradients()
    parameters = [torch.zeros_like(g).requires_grad_() for g in whole.values()]
    for parameter, gradient in zip(parameters, whole.values(), strict=True):
        parameter.grad = gradient
    expected = float(torch.nn.utils.clip_grad_norm_(parameters, largest)) if parameters else 0.0
    return trainer.gradient_norm, expected, {name: found[name] - whole[name] for name in whole}  # whole was clipped in place


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("largest", [1e-3, 1e3])
def test_each_element_counts_once(pool: Pool, name: str, largest: float) -> None:
    results: list[Any] = pool.run(norms, PLANS[name], largest)
    norm, expected, differences = results[0]
    assert norm == pytest.approx(expected, rel=1e-12)
    assert [result[0] for result in results] == [norm] * 3
    assert len(differences) == 6 and all(float(d.abs().max()) < 1e-15 for d in differences.values())


def traced(plan: Plan) -> tuple[list[tuple[str, str]], list[str]]:
    """The sums of squares that a traced step shows, by kind, and what ended before the last of them."""
    model = HandModel(plan.graph)
    with Trainer(model, plan, dtype=torch.float64, clip_norm=1.0) as trainer:
        trainer.step(*model.inputs(0))
        events = trainer.trace(*model.inputs(0))
    own = [(event.name, event.kind.value) for event in events if event.name == NORM_NAME]
    [norm] = [event for event in events if event.name == NORM_NAME]
    return own, [event.name for event in events if event.start_ns >= norm.end_ns]


def test_the_sum_is_the_simulators_task(pool: Pool) -> None:
    """It is traced under the name that the simulator gives it, and nothing but updates comes behind it."""
    for name in PLANS:
        for own, behind in pool.run(traced, PLANS[name]):
            assert own == [(NORM_NAME, "sync")]
            assert behind and all(task.startswith("update @") for task in behind)


class _Alone:
    rank, world_size, device = 0, 1, torch.device("cpu")

    def all_reduce(self, tensor: torch.Tensor, devices: tuple[int, ...]) -> Any:
        return type("Done", (), {"wait": lambda self: tensor})()


def test_what_is_not_finite_spoils_everything_as_in_torch() -> None:
    gradients = {0: torch.tensor([1.0, float("inf")]), 1: torch.tensor([2.0])}
    plan = plan_of(mlp(), split((0,)))
    [found] = summed(_Alone(), [squares(_Alone(), plan, gradients)])  # type: ignore[arg-type]
    norm = found**0.5
    limit(gradients.values(), norm, 1.0)
    assert norm == float("inf")
    assert gradients[1].item() == 0.0 and gradients[0].isnan().tolist() == [False, True]
