"""Any optimizer, groups and schedule: the parameters that plain torch ends with, however they are cut; or one line."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from soap.cluster.presets import local_topology
from soap.cluster.topology import Topology
from soap.model.graph import OperatorGraph
from soap.simulator.lowering import build_plan
from soap.strategy.classical import CLASSICAL
from soap.strategy.config import Strategy
from tests.extent import often
from tests.runtime.pool import Pool
from tests.runtime.traced import traced
from tests.runtime.updating import RECIPES, Together, Updated, checked_recipe, cutting, refusal, save_module, train_plain, train_recipe

ONE, TWO, FOUR = local_topology(1), local_topology(2), local_topology(4)
STEPS = 5


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_module("tiny", tmp_path_factory.mktemp("tiny"))


def nothing(parameters: Any) -> None:
    """No optimizer."""


def by_size(parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [p], "lr": 0.1 if p.numel() > 50 else 0.2} for p in parameters])


def by_position(parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [p], "lr": 0.1 / (1 + number)} for number, p in enumerate(parameters)])


def by_dimensions(parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    groups = [[p for p in parameters if p.dim() > 1], [p for p in parameters if p.dim() <= 1]]
    return torch.optim.AdamW([{"params": own, "weight_decay": 0.1 * (1 - number)} for number, own in enumerate(groups) if own])


def expect_same(found: Updated, plain: Updated) -> None:
    assert found.losses == pytest.approx(plain.losses[-len(found.losses) :], rel=1e-9)
    for name, tensor in plain.state.items():
        torch.testing.assert_close(found.state[name], tensor, rtol=1e-9, atol=1e-11, msg=lambda text, name=name: f"{name}: {text}")


def test_the_plan_cuts_parameters_by_rows_and_by_columns(tiny: str) -> None:
    graph = traced(tiny, "float64").graph
    plan = build_plan(graph, cutting(graph, 4), FOUR)
    shapes = {(shard.parameter, tuple(b - a for a, b in shard.box)) for shard in plan.shards}
    assert {("up.weight", (16, 2)), ("up.weight", (4, 8))} & shapes and {("down.weight", (2, 16)), ("down.weight", (8, 4))} & shapes
    assert ("embedding.weight", (12, 8)) not in shapes and ("both", (16, 8)) not in shapes


@pytest.mark.parametrize("recipe", often(list(RECIPES), ["momentum", "amsgrad", "cyclic"]))
def test_as_plain_torch(recipe: str, tiny: str, four: Pool) -> None:
    graph = traced(tiny, "float64").graph
    found = four.run(train_recipe, tiny, cutting(graph, 4), FOUR, recipe, STEPS)
    expect_same(found[0], train_plain("tiny", recipe, STEPS))
    assert all(rank.losses == found[0].losses for rank in found)


@pytest.mark.parametrize("recipe", often(["adamw", "several", "momentum"], ["several"]))
def test_clipped_by_the_norm_over_all_groups(recipe: str, tiny: str, four: Pool) -> None:
    graph = traced(tiny, "float64").graph
    found = four.run(train_recipe, tiny, cutting(graph, 4), FOUR, recipe, STEPS, None, None, 0.2)
    plain = train_plain("tiny", recipe, STEPS, 0.2)
    expect_same(found[0], plain)
    assert plain.losses != train_plain("tiny", recipe, STEPS).losses  # it was clipped


@pytest.mark.parametrize(
    "recipe", often(["several", "asgd", "one cycle", "steps", "cyclic", "plateau", "sequence"], ["several", "plateau"])
)
def test_resumed_under_another_strategy_as_if_never_ended(recipe: str, tiny: str, four: Pool, tmp_path: Path) -> None:
    graph = traced(tiny, "float64").graph
    first = four.run(train_recipe, tiny, cutting(graph, 4), FOUR, recipe, 3, None, str(tmp_path / "a"))
    other = CLASSICAL["data_parallel"](graph, TWO)
    second = four.run(train_recipe, tiny, other, TWO, recipe, 2, first[0].saved, str(tmp_path / "b"), ranks=2)
    third = four.run(train_recipe, tiny, CLASSICAL["model_parallel"](graph, FOUR), FOUR, recipe, 2, second[0].saved)
    plain = train_plain("tiny", recipe, 7)
    assert first[0].losses + second[0].losses + third[0].losses == pytest.approx(plain.losses, rel=1e-9)
    expect_same(third[0], plain)


@pytest.mark.parametrize("recipe", often(["adafactor", "together"], ["together"]))
@pytest.mark.parametrize("ranks", often([2, 4], [2]))
def test_what_needs_whole_tensors_by_data_parallelism(recipe: str, ranks: int, tiny: str, four: Pool, tmp_path: Path) -> None:
    graph, topology = traced(tiny, "float64").graph, local_topology(ranks)
    strategy = CLASSICAL["data_parallel"](graph, topology)
    expect_two_parts_of_a_whole(graph, strategy, topology)
    first = four.run(train_recipe, tiny, strategy, topology, recipe, 3, None, str(tmp_path), ranks=ranks)
    second = four.run(train_recipe, tiny, strategy, topology, recipe, 2, first[0].saved, ranks=ranks)
    expect_same(second[0], train_plain("tiny", recipe, 5))


def expect_two_parts_of_a_whole(graph: OperatorGraph, strategy: Strategy, topology: Topology) -> None:
    plan = build_plan(graph, strategy, topology)
    assert sum(shard.parameter == "both" for shard in plan.shards) == 2  # each rank keeps both


@pytest.mark.parametrize("ranks", [2, 4])
def test_muon_updates_matrices_as_one_process_does_from_the_same_gradients(ranks: int, tiny: str, four: Pool) -> None:
    """It computes in bfloat16, where gradients that differ in the last bit may make updates that differ in the third digit."""
    graph, topology = traced(tiny, "float64").graph, local_topology(ranks)
    errors = four.run(checked_recipe, tiny, CLASSICAL["data_parallel"](graph, topology), topology, "muon", 4, ranks=ranks)
    assert max(errors) < 1e-12


REFUSED: dict[str, tuple[Any, str]] = {
    "cut": (torch.optim.Adafactor, "optimizer Adafactor updates 'both' as a whole (its update is not elementwise), but the plan keeps par"),
    "coupled": (Together, "optimizer Together couples the updates of parameters with each other, but the plan does not keep all of"),
    "size": (by_size, "the optimizer's factory gives ["),
    "position": (by_position, "the optimizer's factory gives ["),
    "closure": (torch.optim.LBFGS, "optimizer LBFGS computes the loss several times in a step (its step needs a closure), which ranks can"),
    "sparse": (torch.optim.SparseAdam, "optimizer SparseAdam cannot make a step: RuntimeError: SparseAdam does not support dense gradie"),
    "dimensions": (torch.optim.Muon, "no optimizer can be made for parameter 'scale' of shape [], tried as []: ValueError: Muon only s"),
    "gpus": (partial(torch.optim.Adam, capturable=True), "optimizer Adam cannot make a step: "),
    "differentiable": (partial(torch.optim.Adam, differentiable=True), "optimizer Adam cannot make a step: RuntimeError: a leaf Variable"),
    "value": (partial(torch.optim.Adam, betas=3), "no optimizer can be made for parameter 'both' of shape [16, 8], tried as [4, 6]: TypeE"),
    "nothing": (nothing, "the optimizer's factory gave a NoneType; expected a torch.optim.Optimizer"),
    "patterns": ({"up*": torch.optim.Adam}, "no optimizer for parameter 'both': none of the patterns up* names it; add '*' at the end"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_in_one_line_on_all_ranks(case: str, tiny: str, four: Pool) -> None:
    make, words = REFUSED[case]
    found = four.run(refusal, tiny, cutting(traced(tiny, "float64").graph, 2), TWO, make, ranks=2)
    assert all(text.startswith(words) and "\n" not in text for text in found), found
    assert found[0] == found[1]


def test_groups_by_the_number_of_dimensions_are_those_of_whole_parameters(tiny: str, four: Pool) -> None:
    assert four.run(refusal, tiny, cutting(traced(tiny, "float64").graph, 2), TWO, by_dimensions, ranks=2) == ["", ""]
