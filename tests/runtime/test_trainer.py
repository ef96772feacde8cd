from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from soap.errors import RuntimeFailure, SoapWarning
from soap.measure.iteration import StepTimes, measure_steps
from soap.plan.plan import Plan, backward_name, forward_name, sync_name, update_name
from soap.profiles.roofline import RooflineCosts
from soap.runtime.check import CheckResult, Difference, check
from soap.runtime.program.program import compile_program
from soap.runtime.trace import Event, join_events
from soap.runtime.trainer import Trainer
from soap.simulator.lowering import lower
from soap.simulator.tasks import TaskKind
from soap.strategy.config import OpConfig, Strategy
from soap.tracing.export import export_model
from soap.tracing.load import load_model
from tests.graph_builder import GraphBuilder, mlp, transformer
from tests.runtime.cases import optimizer, train
from tests.runtime.handmade import HandModel
from tests.runtime.plans import plan_of, split
from tests.runtime.pool import Pool, RankError
from tests.strategies import CPU, cluster
from tests.tracing.test_export import INPUTS, Plain

MIXED = plan_of(transformer(layers=1), split((0, 1), b=2), embedding=split((0, 1, 2), v=3), head=split((2, 0), n=2))


def test_trace_has_every_task_of_the_plan_once(pool: Pool) -> None:
    outcomes = pool.run(train, MIXED, None, 2, True)
    assert outcomes[0].parameter_error < 1e-10  # a traced step trains like any other
    events = outcomes[0].events
    assert events == outcomes[1].events == outcomes[2].events
    counts = Counter((event.name, event.kind) for event in events)
    assert set(counts.values()) == {1}
    program = compile_program(MIXED)
    plan = program.plan
    named = {kind: {name for name, k in counts if k is kind} for kind in TaskKind}
    assert named[TaskKind.FORWARD] == {forward_name(plan.operator(tile), tile) for tile in plan.tiles}
    assert named[TaskKind.BACKWARD] == {backward_name(plan.operator(plan.tiles[t]), plan.tiles[t]) for t in program.activity.tiles}
    assert named[TaskKind.SYNC] == {sync_name(sync) for sync in plan.syncs if len(sync.readers) > 1}
    assert named[TaskKind.UPDATE] == {update_name(device) for sync in plan.syncs for device in sync.readers}
    assert all(0 <= event.start_ns <= event.end_ns for event in events)


def test_trace_has_the_names_of_the_simulation(pool: Pool) -> None:
    topology = cluster([3], CPU)
    simulated = {task.name for task in lower(MIXED, topology, RooflineCosts(topology)).tasks}
    assert {event.name for event in pool.run(train, MIXED, None, 1, True)[0].events} == simulated


def test_joined_events_begin_with_the_last_to_come() -> None:
    kind = TaskKind.TRANSFER
    sender, receiver = Event(0, "transfer x[] 0->1", kind, 50, 60), Event(1, "transfer x[] 0->1", kind, 10, 70)
    other = Event(0, "forward fc[0]", TaskKind.FORWARD, 20, 30)
    assert join_events([[sender, other], [receiver]]) == [other, Event(1, "transfer x[] 0->1", kind, 50, 70)]


def run_check(plan: Plan, wrong: bool, kind: str) -> tuple[CheckResult, str]:
    model = _WrongModel(plan.graph) if wrong else HandModel(plan.graph)
    factory = {"sgd": optimizer, "adam": _adam, "clip": _ClippedSgd, "hidden": _HiddenNorm}[kind]
    with Trainer(model, plan, optimizer=factory, dtype=torch.float64) as trainer:
        result = check(trainer, model.inputs, factory, steps=2)
        try:
            result.require()
        except RuntimeFailure as error:
            return result, str(error)
        return result, ""


class _WrongModel(HandModel):
    """Its tiles forget a part of what the whole program computes."""

    def run_tile(self, tile: Any, inputs: Any, parameters: Any, context: Any) -> tuple[torch.Tensor, ...]:
        outputs = super().run_tile(tile, inputs, parameters, context)
        return (outputs[0] * 1.5,) if tile.size * 2 == 8 * 16 * 32 and tile.device == 1 else outputs


def _adam(parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


class _ClippedSgd(torch.optim.SGD):
    """Not elementwise: depends on the norm of all gradients that it sees."""

    def __init__(self, parameters: list[torch.Tensor]) -> None:
        super().__init__(parameters, lr=1.0)

    def step(self, closure: Any = None) -> None:
        norm = sum(float((p.grad**2).sum()) for group in self.param_groups for p in group["params"] if p.grad is not None) ** 0.5
        for group in self.param_groups:
            group["lr"] = 1.0 / norm
        super().step(closure)


class _HiddenNorm(torch.optim.SGD):
    """The same of tensors of some sizes alone, which are not those that are tried."""

    def __init__(self, parameters: list[torch.Tensor]) -> None:
        super().__init__(parameters, lr=1.0)

    def step(self, closure: Any = None) -> None:
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            if 150 <= p.numel() < 199 or 400 <= p.numel() < 1000:
                p.grad = p.grad / p.grad.norm()
        super().step(closure)


@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_check_passes(pool: Pool, kind: str) -> None:
    results = pool.run(run_check, MIXED, False, kind)
    assert results[0] == results[1] == results[2]
    result, message = results[0]
    assert (result.passed, result.steps, result.tolerance, message) == (True, 2, 1e-9, "")
    parameters = len(MIXED.graph.parameters)
    assert result.compared == 2 * (1 + 2 * parameters)


def test_check_finds_a_wrong_tile(pool: Pool) -> None:
    result, message = pool.run(run_check, plan_of(mlp(), split((0, 1), b=2)), True, "sgd")[0]
    assert not result.passed
    assert message.startswith("check failed at step ")
    assert "differs from one process by" in message and "expected at most 1e-09" in message and "\n" not in message


def test_check_finds_an_optimizer_that_is_not_elementwise_and_does_not_show_it(pool: Pool) -> None:
    result, _ = pool.run(run_check, plan_of(mlp(), split((0, 1, 2), n=3)), False, "hidden")[0]
    assert (result.passed, result.worst.kind) == (False, "updated parameter")


def test_an_optimizer_that_shows_it_is_refused_on_all_ranks(pool: Pool) -> None:
    with pytest.raises(RankError) as caught:
        pool.run(run_check, plan_of(mlp(), split((0, 1, 2), n=3)), False, "clip")
    assert str(caught.value).count("optimizer _ClippedSgd couples the updates of parameters with each other, but") == 3


def test_check_result_is_plain() -> None:
    assert not CheckResult(1, 1, 1e-9, Difference(0, "loss", "loss", float("inf"))).passed
    assert CheckResult(1, 1, 1e-9, Difference(0, "loss", "loss", 1e-10)).passed


def run_state(plan: Plan) -> tuple[list[str], float]:
    """Train, save, load into a second trainer and go on with both."""
    model = HandModel(plan.graph)
    other_plan = plan_of(plan.graph, split((2, 1, 0), b=3))
    with Trainer(model, plan, dtype=torch.float64) as first, Trainer(model, other_plan, dtype=torch.float64) as second:
        first.step(*model.inputs(0))
        saved: list[Any] = first.comm.gather(first.state_dict())
        second.load_state_dict(saved[0])
        losses = [trainer.step(*model.inputs(1)) for trainer in (first, second)]
        return sorted(saved[0]), abs(losses[0] - losses[1])


@pytest.mark.long
def test_state_goes_on_under_another_strategy(pool: Pool) -> None:
    names, difference = pool.run(run_state, MIXED)[0]
    assert names == sorted(t.name for t in MIXED.graph.parameters)
    assert difference < 1e-12


def run_measured(plan: Plan) -> tuple[StepTimes, list[int]]:
    model = HandModel(plan.graph)
    seen: list[int] = []
    with Trainer(model, plan, dtype=torch.float64) as trainer:
        return measure_steps(trainer, model.inputs, 3, 1, lambda step, loss: seen.append(step)), seen


@pytest.mark.long
@pytest.mark.slow
def test_measured_steps(pool: Pool) -> None:
    results = pool.run(run_measured, MIXED)
    times, seen = results[0]
    assert (len(times.times_ns), len(times.losses), seen) == (3, 4, [0, 1, 2, 3])
    assert times.median_ns == sorted(times.times_ns)[1] > 0
    assert all(result[0] == times for result in results)


def run_counted(plan: Plan) -> tuple[StepTimes, list[int]]:
    model = HandModel(plan.graph)
    asked: list[int] = []
    with Trainer(model, plan, dtype=torch.float64) as trainer:

        def card() -> tuple[int, ...]:
            asked.append(trainer.steps)
            return 1000 * trainer.steps, trainer.steps + trainer.rank

        return measure_steps(trainer, model.inputs, 3, 2, card=card), asked


@pytest.mark.slow
def test_a_card_is_asked_before_the_first_timed_step_and_after_the_last(pool: Pool) -> None:
    results = pool.run(run_counted, MIXED)
    assert [asked for _, asked in results] == [[2, 5]] * len(results)
    assert all(times.card_counts == ((3000, 3),) * len(results) for times, _ in results)


def _wrong_inputs(what: str, inputs: list[Any], rank: int) -> list[Any]:
    x, y = inputs
    changed = {
        "count": [x],
        "shape": [x[:4], y],
        "one shape": [x[:4] if rank == 1 else x, y],
        "list": [x.tolist(), y],
        "float": [x, y.double()],
        "half": [x.half(), y],
    }
    return changed.get(what, inputs)


def run_failing(what: str) -> str:
    graph = mlp()
    model, plan = HandModel(graph), plan_of(graph, split((0, 1), b=2))
    try:
        if what == "devices":
            Trainer(model, plan_of(graph, split((0,)), device_count=5))
        elif what == "model":
            Trainer(HandModel(mlp(batch=4)), plan)
        else:
            with Trainer(model, plan, dtype=torch.float64) as trainer:
                if what == "order":  # of tiles that send something to each other: else there is but one
                    plan = plan_of(graph, split((0, 1), b=2), head=split((0,)))
                    Trainer(model, plan, None if trainer.rank else [0, 1, 3, 2, *range(4, len(plan.tiles))])
                elif what == "state":
                    trainer.load_state_dict({})
                else:
                    trainer.step(*_wrong_inputs(what, model.inputs(trainer.rank if what == "batch" else 0), trainer.rank))
    except RuntimeFailure as error:
        return str(error)
    return "nothing raised"


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("devices", "3 processes for a strategy of 5 devices: expected one process per device; start with torchrun --nproc-per-node 5 or "),
        ("model", "plan is for model 'mlp' ("),
        ("count", "1 tensors given to a step: expected 2 (x, y)"),
        ("shape", "input 'x' has shape (4, 16): expected (8, 16), the whole batch, on every rank"),
        ("list", "input 'x' is a list in step 1: expected a tensor of dtype float32 or float64; convert it first"),
        ("float", "input 'y' has dtype float64 in step 1: expected a tensor of dtype int64; convert it first"),
        ("half", "input 'x' has dtype float16 in step 1: expected a tensor of dtype float32 or float64; convert it first"),
        (
            "batch",
            "rank 1 was given another batch than rank 0: every rank gets the whole global batch; seed the loader equally",
        ),
        ("state", "state lacks 'fc0.weight' (and 5 more): expected every parameter and buffer by name"),
        ("order", "rank 1 has another model, strategy or order than rank 0; expected the same on all ranks"),
    ],
)
def test_one_line_for_what_users_get_wrong(pool: Pool, what: str, message: str) -> None:
    for found in pool.run(run_failing, what):
        assert found.startswith(message)
        assert "\n" not in found


def test_a_rank_that_fails_first_does_not_leave_the_others_waiting(pool: Pool) -> None:
    message = "input 'x' has shape (4, 16): expected (8, 16), the whole batch, on every rank; made by hand for one size"
    assert pool.run(run_failing, "one shape") == [f"rank 1: {message}", message, f"rank 1: {message}"]


def run_wrong_shape(graph: Any) -> str:
    class Broken(HandModel):
        def run_tile(self, tile: Any, inputs: Any, parameters: Any, context: Any) -> tuple[torch.Tensor, ...]:
            return tuple(output[..., :1] for output in super().run_tile(tile, inputs, parameters, context))

    with Trainer(Broken(graph), plan_of(graph, split((0, 1, 2), b=3)), dtype=torch.float64) as trainer:
        try:
            trainer.step(*HandModel(graph).inputs(0))
        except RuntimeFailure as error:
            return str(error)
    return "nothing raised"


def test_wrong_output_of_a_tile_names_the_operator(pool: Pool) -> None:
    g = GraphBuilder("broken")
    graph = g.build(g.mean(g.linear(g.input("x", 6, 4), 5, name="fc")))
    for rank, found in enumerate(pool.run(run_wrong_shape, graph)):
        expected = f"tile {rank} of operator 'fc' made 'fc' as (2, 1) torch.float64; expected (2, 5) torch.float64"
        assert found.startswith(expected)


def test_one_process_without_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    graph = mlp()
    strategy = Strategy({op.name: OpConfig((1,) * len(op.factors), (0,)) for op in graph.operators})
    model = HandModel(graph)
    with Trainer(model, (strategy, cluster([1], CPU)), dtype=torch.float64) as trainer:
        losses = [trainer.step(*model.inputs(0)) for _ in range(5)]
        assert trainer.world.backend == "gloo" and os.environ["GLOO_SOCKET_IFNAME"] in ("lo", "lo0")
    assert not torch.distributed.is_initialized() and "GLOO_SOCKET_IFNAME" not in os.environ
    assert losses == sorted(losses, reverse=True)
    with pytest.raises(RuntimeFailure, match=r"^1 process for a strategy of 2 devices"):
        Trainer(model, (strategy, cluster([2], CPU)))


@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_the_user_s_model_loads_the_trained_state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, dtype: torch.dtype | None) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    module, fresh = Plain(), Plain()
    export_model(module, INPUTS[:1], {"scale": torch.ones(3)}, path=tmp_path / "m.pt2", loss=lambda y: y.square().mean())
    model = load_model(tmp_path / "m.pt2")
    strategy = Strategy({op.name: OpConfig((1,) * len(op.factors), (0,)) for op in model.graph.operators})
    with Trainer(model, (strategy, cluster([1], CPU)), dtype=dtype) as trainer:
        trainer.step(*model.example_inputs)
        state = trainer.state_dict()
        trainer.load_state_dict(state)
        with pytest.warns(SoapWarning, match=r"^'table' keeps the value that was exported"):
            trainer.load_state_dict({**state, "table": torch.zeros(3)})
    fresh.load_state_dict(state, strict=True)
    assert set(state) == set(module.state_dict())
    assert not torch.equal(fresh.norm.bias, module.norm.bias)
    assert torch.equal(fresh.second.weight, state["first.weight"].float())
    for name in ("unused", "table", "never"):
        torch.testing.assert_close(state[name], module.state_dict()[name], check_dtype=False)
    assert state["norm.num_batches_tracked"] == 1
