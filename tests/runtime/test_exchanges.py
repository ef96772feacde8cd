"""Collectives in training on four ranks: each pattern is used, moves what the plan says, and is exact there and back."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from soap.model.graph import DimMap, Factor, FactorKind, OperatorGraph
from soap.model.regions import volume
from soap.plan.plan import Pattern, Plan, remote_parts
from soap.runtime.program.program import compile_program
from soap.runtime.step.forward import ForwardPass
from soap.runtime.trainer import Trainer
from tests.extent import often
from tests.graph_builder import GraphBuilder, mlp, transformer
from tests.runtime.cases import train
from tests.runtime.handmade import HandModel
from tests.runtime.plans import moved_bytes, plan_of, split
from tests.runtime.pool import Pool
from tests.runtime.test_training import assert_equal_to_one_process


def unread_by_some() -> OperatorGraph:
    """A value of which some readers, not all, carry a gradient: the loss's replica on device 3 has no backward pass."""
    g = GraphBuilder("unread")
    x = g.linear(g.input("x", 5, 4), 8, bias=False, name="fc")
    return g.build(g.mean(g.elementwise(x, name="act"), name="loss"))


def two_convolutions() -> OperatorGraph:
    """The second reads halos of the first one's sums."""
    g = GraphBuilder("convolutions")
    return g.build(g.mean(g.conv(g.conv(g.input("x", 2, 4, 15), 3, name="conv0"), 2, name="conv1"), name="loss"))


FOUR = (0, 1, 2, 3)
CASES: dict[str, tuple[Plan, set[Pattern], bool]] = {
    "all-gather": (plan_of(mlp(), split(FOUR, n=4), 4, act=split(FOUR, d1=4), cross_entropy=split(FOUR, b=4)), {Pattern.ALL_GATHER}, False),
    "all-gather of uneven rows": (
        plan_of(mlp(batch=7), split(FOUR, b=4), 4, fc1=split(FOUR, n=4), act1=split(FOUR, d1=4)),
        {Pattern.ALL_GATHER, Pattern.ALL_TO_ALL},
        False,
    ),
    "all-gather of rows in another order": (
        plan_of(mlp(batch=7), split((2, 0, 3, 1), b=4), 4, fc1=split(FOUR, n=4), act1=split(FOUR, d1=4)),
        {Pattern.ALL_GATHER, Pattern.ALL_TO_ALL},
        False,
    ),
    "all-to-all": (plan_of(mlp(batch=6), split((2, 1, 0), b=3), 4, act=split((0, 1, 2), d1=3)), {Pattern.ALL_TO_ALL}, False),
    "broadcast": (plan_of(mlp(), split((1,)), 4, fc1=split(FOUR, n=4), act1=split(FOUR, d1=4)), {Pattern.BROADCAST}, False),
    "reduce-scatter": (plan_of(mlp(batch=7), split(FOUR, b=4), 4, fc=split(FOUR, k=4)), {Pattern.ALL_TO_ALL}, True),
    "reduce-scatter and halos": (
        plan_of(two_convolutions(), split((0,)), 4, conv0=split(FOUR, c=4), conv1=split((3, 1, 2, 0), l=4)),
        set(),
        True,
    ),
    "sequence parallel": (
        plan_of(
            transformer(length=7), split(FOUR, d1=4), 4,
            **{f"{i}.{part}": split(FOUR, n=4) for i in (0, 1) for part in ("q", "k", "v", "fc1")},
            **{f"{i}.{part}": split(FOUR, k=4) for i in (0, 1) for part in ("proj", "fc2")},
            **{f"{i}.gelu": split(FOUR, d2=4) for i in (0, 1)},
            attention=split(FOUR, h=4),
        ),
        {Pattern.ALL_GATHER},
        True,
    ),
    "some without gradient": (
        plan_of(unread_by_some(), split((0, 1, 2, 3), b=4), 4, act=split((0, 1, 2, 3), replicas=4), loss=split((0, 1, 2, 3), replicas=4)),
        {Pattern.ALL_GATHER},
        False,
    ),
    "a broadcast of which some have no gradient": (
        plan_of(unread_by_some(), split((2,)), 4, act=split((0, 1, 2, 3), replicas=4), loss=split((0, 1, 2, 3), replicas=4)),
        {Pattern.BROADCAST},
        False,
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_each_pattern_trains_like_one_process(four: Pool, name: str) -> None:
    plan, patterns, scattered = CASES[name]
    assert {exchange.pattern for exchange in plan.exchanges} >= patterns
    assert any(reduction.cells for reduction in plan.reductions) >= scattered
    steps = 2
    outcomes = four.run(train, plan)
    assert_equal_to_one_process(outcomes)
    traffic = [outcome.traffic for outcome in outcomes]
    forward = 8 * sum(volume(box) for exchange in plan.exchanges for *_, box, _ in remote_parts(plan, exchange.parts))
    exchanged = sum(t.exchanged_bytes for t in traffic)
    assert (exchanged > 0) == (forward > 0) and steps * forward <= exchanged <= 2 * steps * forward
    assert sum(t.sent_bytes for t in traffic) == sum(t.received_bytes for t in traffic) >= steps * moved_bytes(plan)
    program = compile_program(plan)
    sums = [r for r in plan.reductions if r.cells]
    back = [plan.reductions[i] for i in program.activity.reductions if plan.reductions[i].cells]
    assert sum(t.scattered_bytes for t in traffic) == steps * 8 * sum(volume(r.box) * len(r.devices) for r in (*sums, *back))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sequence parallel", "all-gather of uneven rows", "broadcast"])
def test_equal_runs_give_equal_bits(four: Pool, name: str) -> None:
    plan = CASES[name][0]
    assert four.run(train, plan)[0].losses == four.run(train, plan)[0].losses


@dataclass
class Lifetimes:
    """Outputs of tiles on this rank: how many there were, and how many are alive after the forward pass and after the step."""

    made: int
    forward: int
    end: int


def count_alive(plan: Plan) -> Lifetimes:
    model = _Watched(plan.graph)
    found: list[int] = []
    release = ForwardPass.release

    def counted(forward: ForwardPass) -> None:
        release(forward)
        found.append(model.alive())

    ForwardPass.release = counted  # type: ignore[method-assign]
    try:
        with Trainer(model, plan, dtype=torch.float64) as trainer:
            trainer.step(*model.inputs(0))
            return Lifetimes(len(model.outputs), found[0], model.alive())
    finally:
        ForwardPass.release = release  # type: ignore[method-assign]


class _Watched(HandModel):
    """Remembers what its tiles make, weakly; parts of parameters are not made."""

    def __init__(self, graph: OperatorGraph) -> None:
        super().__init__(graph)
        self.outputs: list[weakref.ref[torch.Tensor]] = []

    def run_tile(self, tile: Any, inputs: Any, parameters: Any, context: Any) -> tuple[torch.Tensor, ...]:
        outputs = super().run_tile(tile, inputs, parameters, context)
        self.outputs += [weakref.ref(output) for output in outputs if not any(output is parameter for parameter in parameters)]
        return outputs

    def alive(self) -> int:
        gc.collect()
        return sum(output() is not None for output in self.outputs)


def sums_of_sums() -> OperatorGraph:
    """Additions: autograd needs neither their inputs nor their outputs."""
    g = GraphBuilder("sums")
    x = g.linear(g.input("x", 4, 6), 6, bias=False, name="fc")
    rows = [DimMap(0), DimMap(1)]
    factors = [Factor("b", 4, FactorKind.SAMPLE), Factor("d", 6, FactorKind.ATTRIBUTE)]
    for i in range(4):
        x = g.operator("sum", factors, [(x, rows), (x, rows)], [], [((4, 6), rows)], name=f"sum{i}")[0]
    return g.build(g.mean(x, name="loss"))


@pytest.mark.slow
def test_values_go_with_their_last_reader(four: Pool) -> None:
    plan = plan_of(sums_of_sums(), split(FOUR, b=4), 4)
    for found in four.run(count_alive, plan):
        assert found.made == 6
        assert found.forward == 0, "no value waits for its gradient, not even the partial loss, where the backward pass starts"
        assert found.end == 0


KEPT = ["all-gather of uneven rows", "all-to-all", "broadcast", "sequence parallel", "reduce-scatter"]


@pytest.mark.parametrize("name", often(KEPT, ["all-gather of uneven rows"], pytest.mark.slow))
def test_nothing_outlives_the_step(four: Pool, name: str) -> None:
    assert [found.end for found in four.run(count_alive, CASES[name][0])] == [0] * 4
