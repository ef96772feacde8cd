"""Scaled losses: the numbers of one process with ``torch.amp.GradScaler``, and one decision of all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import soap
from soap.api.predictions import simulator_for
from soap.cluster.presets import local_topology
from soap.errors import ModelError, RuntimeFailure
from soap.plan.compression.training import PLAIN, for_scaling
from soap.plan.plan import Plan
from soap.plan.planning import build_plan
from soap.plan.syncs.clipping import NORM_NAME
from soap.runtime.check import check
from soap.runtime.trainer import Trainer
from soap.runtime.updates.loss_scaling import LossScaler, LossScaling
from soap.strategy.sync import SHARDED_STATE
from soap.tracing.calls import TileContext
from tests.graph_builder import mlp
from tests.runtime.handmade import HandModel
from tests.runtime.plans import CPU, cluster, plan_of, split
from tests.runtime.pool import Pool

STEPS, OVERFLOWS, CLIP = 7, (1, 2), 0.05
SCALING = LossScaling(initial=2.0**10, interval=2)


def owned_in_parts() -> Plan:
    """Data parallelism with shared optimizer states: each rank has complete gradients of its own parts alone."""
    plan = plan_of(mlp(), split((0, 1, 2), b=3))
    strategy = plan.strategy.with_changes(parameters=dict.fromkeys(HandModel(plan.graph).parameters, SHARDED_STATE))
    return build_plan(plan.graph, strategy, cluster([3], CPU))


PLANS = {
    "copies": plan_of(mlp(), split((0, 1, 2), b=3)),
    "parts": plan_of(mlp(), split((0, 1, 2), n=3)),
    "owned in parts": owned_in_parts(),
}


def adam(tensors: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(tensors, lr=0.01)


def overflowing(trainer: Trainer, rank: int) -> None:
    """Let a gradient be infinite in some steps, in the part of one rank alone: behind all sums, where no other rank sees it."""
    scaler, step = trainer.scaler, [0]
    assert scaler is not None
    unscale = scaler.unscale

    def spoiled(gradients: Any, device: torch.device) -> torch.Tensor:
        own = list(gradients)
        if trainer.rank == rank and step[0] in OVERFLOWS and own:
            own[0].view(-1)[0] = torch.inf
        step[0] += 1
        return unscale(own, device)

    scaler.unscale = spoiled  # type: ignore[method-assign]


def trained(plan: Plan, clip_norm: float | None) -> tuple[list[tuple[float, int]], dict[str, torch.Tensor]]:
    """Scale and number of skipped updates after each step, and the parameters at the end."""
    model, seen = HandModel(plan.graph), []
    with Trainer(model, plan, dtype=torch.float64, optimizer=adam, clip_norm=clip_norm, loss_scaling=SCALING) as trainer:
        overflowing(trainer, 1)
        for step in range(STEPS):
            trainer.step(*model.inputs(step))
            assert trainer.scaler is not None
            seen.append((trainer.scaler.scale, trainer.scaler.skipped))
        return seen, trainer.state_dict()


def alone(clip_norm: float | None) -> tuple[list[tuple[float, int]], dict[str, torch.Tensor]]:
    """The same in one process, by torch's own scaler."""
    model, seen, skipped = HandModel(mlp()), list[tuple[float, int]](), 0
    parameters = {name: tensor.clone().requires_grad_() for name, tensor in model.parameters.items()}
    optimizer = adam(list(parameters.values()))
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALING.initial, growth_interval=SCALING.interval)
    for step in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(model.reference_loss(model.inputs(step), parameters, TileContext(0, step, {}))).backward()
        if step in OVERFLOWS:
            gradient = next(iter(parameters.values())).grad
            assert gradient is not None
            gradient.view(-1)[0] = torch.inf
        scaler.unscale_(optimizer)
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(parameters.values(), clip_norm)
        scaler.step(optimizer)
        scaler.update()
        skipped += step in OVERFLOWS
        seen.append((scaler.get_scale(), skipped))
    return seen, {name: tensor.detach() for name, tensor in parameters.items()}


@pytest.mark.parametrize("clip_norm", [None, CLIP])
@pytest.mark.parametrize("name", PLANS)
def test_ranks_train_like_one_process_with_torch_s_scaler(pool: Pool, name: str, clip_norm: float | None) -> None:
    """An overflow in one rank's part makes all ranks leave the update out, in the same steps; scales are torch's."""
    results: list[Any] = pool.run(trained, PLANS[name], clip_norm)
    scales, expected = alone(clip_norm)
    assert [seen for seen, _ in results] == [scales] * 3
    assert len({scale for scale, _ in scales}) > 2 and scales[-1][1] == len(OVERFLOWS)
    for key, tensor in expected.items():
        torch.testing.assert_close(results[0][1][key], tensor, rtol=1e-9, atol=1e-12)


def scaled_and_not(plan: Plan) -> list[bool]:
    """Whether a scale that is a power of two changes no bit of what is trained."""
    states = []
    for scaling in (None, LossScaling(initial=2.0**12)):
        model = HandModel(plan.graph)
        with Trainer(model, plan, dtype=torch.float64, optimizer=adam, accumulate=2, loss_scaling=scaling) as trainer:
            for step in range(2):
                trainer.step(*model.inputs(step), *model.inputs(step + 7))
            states.append(trainer.state_dict())
    return [torch.equal(states[0][name], states[1][name]) for name in states[0]]


def test_a_scale_changes_nothing_else(pool: Pool) -> None:
    for name in PLANS:
        results = pool.run(scaled_and_not, PLANS[name])
        assert len(results[0]) == 6 and all(results[0])


def resumed(plan: Plan, folder: str) -> bool:
    """Whether a training that goes on from a checkpoint has the bits and the scale of one that was not interrupted."""
    model = HandModel(plan.graph)
    options: Any = {"dtype": torch.float64, "optimizer": adam, "loss_scaling": SCALING}
    with Trainer(model, plan, **options) as whole:
        overflowing(whole, 0)
        for step in range(4):
            whole.step(*model.inputs(step))
        whole.save(folder)
        for step in range(4, 7):
            whole.step(*model.inputs(step))
        expected, scaler = whole.state_dict(), whole.scaler
    with Trainer(HandModel(plan.graph), plan, **options) as again:
        again.load(folder)
        assert again.scaler is not None and again.scaler.skipped == 2 and again.scaler.since == 1
        step_of = again.steps
        again.scaler.unscale = _from(again, step_of)  # type: ignore[method-assign]
        for step in range(step_of, 7):
            again.step(*model.inputs(step))
        state = again.state_dict()
        assert scaler is not None
        return again.scaler.state() == scaler.state() and all(torch.equal(state[name], expected[name]) for name in state)


def _from(trainer: Trainer, first: int) -> Any:
    """The same overflows for a training that begins at step ``first``."""
    scaler = trainer.scaler
    assert scaler is not None
    unscale, step = scaler.unscale, [first]

    def spoiled(gradients: Any, device: torch.device) -> torch.Tensor:
        own = list(gradients)
        if trainer.rank == 0 and step[0] in OVERFLOWS and own:
            own[0].view(-1)[0] = torch.inf
        step[0] += 1
        return unscale(own, device)

    return spoiled


def test_a_checkpoint_has_the_scale(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(resumed, PLANS["owned in parts"], str(tmp_path)) == [True] * 3


def in_float16(name: str, *initial: float) -> list[tuple[bool, float, int, list[str]]]:
    """For each first scale a check against one process, the scale and the skipped updates, and the types of gradients."""
    model, cluster = soap.load("zoo:gpt:tiny@6", autocast="float16"), local_topology(3)
    plan, seen = (soap.classical(name, model, cluster), cluster), []
    for first in initial:
        with Trainer(model, plan, optimizer=adam, clip_norm=1.0, loss_scaling=LossScaling(initial=first)) as trainer:
            batches = [[tensor.roll(step, 0) for tensor in model.example_inputs] for step in range(4)]
            found = check(trainer, lambda step, own=batches: own[step], adam, 4)  # type: ignore[misc]
            assert trainer.scaler is not None
            kinds = sorted({str(tensor.dtype) for tensor in trainer.gradients().values()})
            seen.append((found.passed, trainer.scaler.scale, trainer.scaler.skipped, kinds))
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param("data_parallel", marks=pytest.mark.long), "megatron+zero1"])
def test_float16_is_trained_with_a_scaled_loss(pool: Pool, name: str) -> None:
    """It checks against one process, also where the first scales are too large for float16's numbers."""
    results: list[Any] = pool.run(in_float16, name, 2.0**16, 2.0**40)
    assert [own for own, _ in results] == [(True, 2.0**16, 0, ["torch.float32"]), *[(True, 2.0**16, 0, [])] * 2]
    assert results[0][1][:3] == (True, 2.0**36, 4)


@pytest.mark.slow
def test_a_model_in_float16_is_scaled_unasked() -> None:
    scaled = LossScaler.of(soap.load("zoo:rnnlm:tiny", autocast="float16"), None)
    assert scaled is not None and scaled.options == LossScaling()
    torch_s = torch.amp.GradScaler("cpu")
    assert (scaled.scale, scaled.options.growth) == (torch_s.get_scale(), torch_s.get_growth_factor())
    assert (scaled.options.backoff, scaled.options.interval) == (torch_s.get_backoff_factor(), torch_s.get_growth_interval())
    assert LossScaler.of(soap.load("zoo:rnnlm:tiny", autocast="bfloat16"), None) is None
    assert LossScaler.of(HandModel(mlp()), None) is None
    with pytest.raises(ModelError, match="autocast 'float8'"):
        soap.load("zoo:rnnlm:tiny", autocast="float8")


@pytest.mark.parametrize("wrong", [{"initial": 0.0}, {"initial": float("inf")}, {"growth": 0.5}, {"backoff": 0.0}, {"interval": 0}])
def test_impossible_values(wrong: dict[str, Any]) -> None:
    with pytest.raises(RuntimeFailure, match="expected an initial scale of"):
        LossScaling(**wrong)


def test_the_scale_has_bounds() -> None:
    scaler = LossScaler(LossScaling(initial=2.0**127, interval=1))
    scaler.update(True)
    assert scaler.scale == 2.0**127
    for _ in range(200):
        scaler.update(False)
    assert scaler.scale == 2.0**-24 and scaler.skipped == 200


def test_the_agreement_is_priced() -> None:
    """As the norm of clipping is: a sum that all updates wait for."""
    assert for_scaling(PLAIN, "float16").clips and not for_scaling(PLAIN, "bfloat16").clips and not for_scaling(PLAIN, None).clips
    graph, cluster = soap.load("zoo:gpt:tiny", plan_only=True, autocast="float16").graph, soap.load_cluster("h100-4")
    strategy = soap.classical("data_parallel", graph, cluster)
    for autocast, priced in (("float16", True), ("bfloat16", False)):
        simulator = simulator_for(graph, cluster, costs="estimate", training=for_scaling(PLAIN, autocast))
        assert (NORM_NAME in {task.name for task in simulator.run(strategy).tasks.tasks}) == priced
