"""Values of sharded parameters are there only while they are used. ``test_owned_parts`` holds their training against one process."""

from __future__ import annotations

import random
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from torch import nn

from soap.cluster.topology import Topology
from soap.model.graph import OperatorGraph
from soap.plan.plan import Plan
from soap.plan.syncs import bucketing
from soap.plan.syncs.bucketing import gradient_bytes
from soap.runtime.program.actions import ActionKind, part_of
from soap.runtime.program.program import compile_program
from soap.runtime.sync import sharded
from soap.runtime.trainer import Trainer
from soap.simulator.lowering import build_plan
from soap.strategy.classical import fsdp
from soap.strategy.config import Strategy
from soap.strategy.sync import SHARDED
from soap.tracing.export import export_model
from soap.tracing.load import load_model
from tests.extent import often
from tests.kept_models import ModelFiles
from tests.micro_batches import in_micro_batches
from tests.runtime.exact_modules import Batch, Trained, worst
from tests.runtime.pool import Pool
from tests.runtime.sparse_modules import OPTIMIZERS, train_alone
from tests.runtime.sparse_plans import by_samples, hosts
from tests.runtime.test_sharded_state import FILES, assert_trains, batch_of
from tests.runtime.traced import traced
from tests.simulator.test_sharded import layers

TOLERANCE = 1e-9
TWO, FOUR = hosts(1, 1), hosts(2, 2)


class Views(nn.Module):
    """Parameters that operators hand on as views; one of them is also read late."""

    def __init__(self) -> None:
        super().__init__()
        self.places, self.first, self.head = nn.Parameter(torch.randn(6, 8)), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        places = self.places[1:5]
        x = torch.relu(self.first(x + places) * places.flip(0))
        x = nn.functional.linear(x, self.first.weight.t()) + self.places[:4]
        return nn.functional.cross_entropy(self.head(x).mean(1), labels)


def views_batch(step: int) -> Batch:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 4, 8, generator=generator, dtype=torch.float64), torch.randint(0, 3, (8,), generator=generator)


def views() -> nn.Module:
    torch.manual_seed(3)
    return Views().double().train()


VIEWS = ModelFiles("sharded", lambda name, path: export_model(views(), views_batch(0), path=path))


@pytest.fixture(scope="module")
def files() -> dict[str, str]:
    return FILES


def all_sharded(graph: OperatorGraph, strategy: Strategy, prefetch: int = 1) -> Strategy:
    """With all parameters gathered for their uses, frozen ones too."""
    syncs = {tensor.name: SHARDED for tensor in graph.parameters}
    return replace(strategy.with_changes(parameters=syncs), prefetch=prefetch)


def train_views(path: str, strategy: Strategy) -> Trained:
    with Trainer(traced(path), (strategy, TWO), optimizer=OPTIMIZERS["adam"]) as trainer:
        losses = [trainer.step(*views_batch(step)) for step in range(3)]
        return Trained(losses, trainer.state_dict())


def test_what_is_a_view_of_values_outlives_them(four: Pool) -> None:
    graph = traced(path := VIEWS["views"]).graph
    strategy = all_sharded(graph, by_samples(graph, range(2), 8), 0)
    result = four.run(train_views, path, strategy, ranks=2)[0]
    assert worst(result, train_alone(views(), [[views_batch(step)] for step in range(3)], OPTIMIZERS["adam"])) < TOLERANCE


def held_while_training(path: str, strategy: Strategy, topology: Topology) -> tuple[int, int, int, bool]:
    """(most bytes of leaves at a time in two steps, bytes behind the steps, bytes of parts, whether the model's own values are gone)."""
    model, most = load_model(path, dtype="float64"), 0
    many, adam = patch.object(bucketing, "LEAST_GROUPS", MANY), OPTIMIZERS["adam"]
    with many, Trainer(model, (strategy, topology), optimizer=adam, take_over=True) as trainer:
        leaves = [leaf for piece, leaf in trainer.shards.leaves.items() if piece not in trainer.shards.tensors]

        def noted(leaf: torch.Tensor, *, kept: bool) -> None:
            nonlocal most
            keep_memory(leaf, kept=kept)
            most = max(most, sum(own.untyped_storage().nbytes() for own in leaves))

        keep_memory = sharded.keep_memory
        with patch.object(sharded, "keep_memory", noted):
            for step in range(2):
                trainer.step(*batch_of("odd", 6, step))
        behind = sum(own.untyped_storage().nbytes() for own in leaves)
        parts = sum(tensor.nbytes for tensor in trainer.shards.tensors.values())
        gone = all(tensor.is_meta for name, tensor in model.parameters.items() if tensor.shape[:1] > (1,))
        return most, behind, parts, gone


MANY = 64
"""So many groups that each has few parameters: none is used early and late for that reason."""


def together(plan: Plan, operators: set[int]) -> int:
    """Bytes of the groups between whose first and last uses some of these operators are."""
    found = 0
    for sync in plan.syncs:
        own = [plan.tiles[tile].operator for tile, _ in sync.uses]
        found += gradient_bytes(plan, sync) if any(min(own) <= operator <= max(own) for operator in operators) else 0
    return found


@pytest.mark.parametrize("prefetch", often([0, 3], [3]))
def test_values_are_there_only_while_they_are_used(four: Pool, files: dict[str, str], prefetch: int) -> None:
    graph = traced(files["odd"]).graph
    strategy = all_sharded(graph, by_samples(graph, range(4), 6), prefetch)
    size = sum(tensor.bytes for tensor in graph.parameters)
    with patch.object(bucketing, "LEAST_GROUPS", MANY):
        plan = build_plan(graph, strategy, FOUR)
    assert any(plan.is_frozen(sync) for sync in plan.syncs)
    needed = max(together(plan, {plan.tiles[tile].operator for tile in own.tiles}) for own in compile_program(plan).segments)
    found = four.run(held_while_training, files["odd"], strategy, FOUR)
    assert sum(parts for *_, parts, _ in found) == size
    for most, behind, _, gone in found:
        assert 0 < most <= needed < size
        assert behind == 0 and gone


@pytest.mark.parametrize("schedule", [None, "gpipe"])
def test_values_are_there_for_each_micro_batch_or_for_all(four: Pool, files: dict[str, str], schedule: str | None) -> None:
    """While each uses them; or, if these do not pass one by one, all at once. None behind the step; gradients of all micro-batches of two
    batches are those of one process."""
    graph = traced(files["odd"]).graph
    strategy = in_micro_batches(graph, all_sharded(graph, by_samples(graph, range(2), 6)), 3, random.Random(0), 2)
    strategy = replace(strategy, schedule=schedule)
    with patch.object(bucketing, "LEAST_GROUPS", MANY):
        plan = build_plan(graph, strategy, TWO)
    gathered = [sync for sync in plan.syncs if sync.contract.gathers_values and len(sync.readers) > 1 and not sync.part]
    values = sum(gradient_bytes(plan, sync) for sync in gathered)
    for most, behind, _, gone in four.run(held_while_training, files["odd"], strategy, TWO, ranks=2):
        assert (most == values if schedule else 0 < most < values) and behind == 0 and gone
    assert_trains(four, files, "odd", strategy, TWO, clip_norm=0.05)


def test_gathers_come_behind_what_they_wait_for() -> None:
    """In a rank's list each gather comes before the passes that need its values; with more prefetch it comes earlier."""
    graph = layers()
    places = []
    for prefetch in (0, 1):
        plan = build_plan(graph, replace(fsdp(graph, FOUR), prefetch=prefetch), FOUR)
        program, found = compile_program(plan), dict[tuple[ActionKind, int], int]()
        actions = part_of((*program.forward, *program.backward), 1)
        for place, action in enumerate(actions):
            if action.kind in (ActionKind.BRING, ActionKind.BRING_BACK):
                assert (action.kind, action.subject) not in found
                found[action.kind, action.subject] = place
        for number, sync in enumerate(plan.syncs):
            tiles = {tile for tile, _ in sync.uses if plan.tiles[tile].device == 1}
            forward = [place for place, own in enumerate(actions) if own.kind is ActionKind.TILE and own.subject in tiles]
            back = [
                place
                for place, own in enumerate(actions)
                if own.kind is ActionKind.SEGMENT and tiles & {*program.segments[own.subject].tiles}
            ]
            assert found[ActionKind.BRING, number] < min(forward) <= max(forward) < found[ActionKind.BRING_BACK, number] < min(back)
        assert len(found) == 2 * len(plan.syncs)
        places.append(found)
    assert sum(places[1].values()) < sum(places[0].values())


def test_what_passes_need_next_is_gathered_before_gradients_leave() -> None:
    """Behind each segment: passes wait for the values, nothing of the step for the gradients."""
    program = compile_program(build_plan(layers(), fsdp(layers(), FOUR), FOUR))
    behind: list[list[ActionKind]] = []
    for action in part_of(program.backward, 1):
        if action.kind is ActionKind.SEGMENT:
            behind.append([])
        elif behind and action.kind in (ActionKind.BRING_BACK, ActionKind.SYNC):
            behind[-1].append(action.kind)
    both = [kinds for kinds in behind if {*kinds} == {ActionKind.BRING_BACK, ActionKind.SYNC}]
    assert both and all(kinds == sorted(kinds, key=[ActionKind.BRING_BACK, ActionKind.SYNC].index) for kinds in both)
