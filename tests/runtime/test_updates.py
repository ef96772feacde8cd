"""Any optimizer, groups and schedule: the parameters that plain torch ends with, however they are cut; or one line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from soap.presets import local_topology
from soap.simulator.lowering import build_plan
from soap.strategies import CLASSICAL
from tests.runtime.pool import Pool
from tests.runtime.traced import traced
from tests.runtime.updating import RECIPES, Updated, cutting, save_module, train_plain, train_recipe

TWO, FOUR = local_topology(2), local_topology(4)
STEPS = 5


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_module("tiny", tmp_path_factory.mktemp("tiny"))


def expect_same(found: Updated, plain: Updated) -> None:
    assert found.losses == pytest.approx(plain.losses[-len(found.losses) :], rel=1e-9)
    for name, tensor in plain.state.items():
        torch.testing.assert_close(found.state[name], tensor, rtol=1e-9, atol=1e-11, msg=lambda text, name=name: f"{name}: {text}")


def test_the_plan_cuts_parameters_by_rows_and_by_columns(tiny: str) -> None:
    graph = traced(tiny, "float64").graph
    plan = build_plan(graph, cutting(graph, 4), FOUR)
    shapes = {(shard.parameter, tuple(b - a for a, b in shard.box)) for shard in plan.shards}
    assert {("up.weight", (16, 2)), ("down.weight", (2, 16))} <= shapes or {("up.weight", (4, 8)), ("down.weight", (8, 4))} <= shapes, shapes


@pytest.mark.parametrize("recipe", RECIPES)
def test_as_plain_torch(recipe: str, tiny: str, four: Pool) -> None:
    graph = traced(tiny, "float64").graph
    found = four.run(train_recipe, tiny, cutting(graph, 4), FOUR, recipe, STEPS)
    expect_same(found[0], train_plain("tiny", recipe, STEPS))
    assert all(rank.losses == found[0].losses for rank in found)
