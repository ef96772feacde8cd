"""Readers receive what servers have updated while their backward passes go on, into copies that nobody reads any more."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from soap.cluster.topology import Topology
from soap.runtime.sync import parameter_server
from soap.runtime.sync.parameter_server import DenseServing
from soap.runtime.trainer import Trainer
from soap.simulator.lowering import build_plan
from soap.tracing.export import export_model
from tests.kept_models import ModelFiles
from tests.runtime.exact_modules import Batch, worst
from tests.runtime.pool import Pool
from tests.runtime.sparse_modules import OPTIMIZERS, train_alone
from tests.runtime.sparse_plans import hosts
from tests.runtime.test_served_early import SHARED, TOPOLOGY, in_order, served
from tests.runtime.test_sharded_state import TOLERANCE, assert_trains, batch_of, train
from tests.runtime.test_sharded_state import files as files  # a fixture
from tests.runtime.traced import traced
from tests.strategies import with_servers

TWO_SERVERS = with_servers(hosts(1, 1, 1, 1), 2)
Event = tuple[str, int]


class Apart(nn.Module):
    """A weight of which the last backward pass reads a detached view, long after the weight's own gradient is complete."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.book = nn.Linear(6, 6), nn.Linear(6, 6), nn.Parameter(torch.randn(6, 6) / 2)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        read = torch.tanh(self.first(x)) @ self.book.t().detach()
        return F.mse_loss(F.linear(torch.tanh(self.second(read)), self.book), y)


def apart() -> nn.Module:
    torch.manual_seed(5)
    return Apart().double().train()


def apart_batch(samples: int, step: int) -> Batch:
    torch.manual_seed(1000 + step)
    return torch.randn(samples, 6, dtype=torch.float64), torch.randn(samples, 6, dtype=torch.float64)


APART = ModelFiles("pulled early", lambda _, path: export_model(apart(), apart_batch(6, 0), path=path, dynamic_batch=True))


def events(path: str, topology: Topology, partitions: int, batch: Batch, options: Mapping[str, Any]) -> list[Event]:
    """What a rank does in its second step: ("push", place in ``Plan.syncs``), ("pull", place), and ("end", 0) of its backward passes."""
    found: list[Event] = []
    strategy = served(path, topology, partitions)

    def noting(name: str, note: Callable[..., Event | None]) -> Any:
        before = getattr(DenseServing, name)

        def noted(self: Any, *args: Any) -> Any:
            event = note(*args)
            found.extend([event] if event is not None else [])
            return before(self, *args)

        return patch.object(DenseServing, name, noted)

    with ExitStack() as patches:
        patches.enter_context(noting("synchronize", lambda number: ("push", number)))
        patches.enter_context(noting("_pull", lambda number, parcels, places: ("pull", number) if places else None))
        patches.enter_context(noting("end", lambda part: ("end", 0)))
        trainer = patches.enter_context(Trainer(traced(path), (strategy, topology), optimizer=OPTIMIZERS["adam"], **options))
        trainer.step(*batch)
        found.clear()
        trainer.step(*batch)
    return found


def scattered(path: str, batch: Batch) -> list[Event]:
    """``events`` where no places are adjacent."""
    with patch.object(parameter_server, "are_adjacent", lambda rooms: False):
        return events(path, TOPOLOGY, 1, batch, {})


@pytest.mark.parametrize(("topology", "partitions"), [(TOPOLOGY, 1), (TWO_SERVERS, 2)])
def test_a_value_is_awaited_as_soon_as_its_gradient_has_left(
    four: Pool, files: dict[str, str], topology: Topology, partitions: int
) -> None:
    """If what comes lands in place, one part behind the other: where the first server has the first one."""
    path, order = files["odd"], in_order(files["odd"], topology, partitions)
    found = four.run(events, path, topology, partitions, batch_of("odd", 6, 0), {}, ranks=topology.device_count)
    plan = build_plan(traced(path).graph, served(path, topology, partitions), topology)
    servers = {place: [plan.shards[shard].devices[0] for shard in plan.syncs[place].shards] for place in order}
    early = [place for place in order if servers[place] == sorted(servers[place])]
    assert early == order if partitions == 1 else 3 < len(early) < len(order)
    for reader in found[:2]:
        assert reader == [
            *(event for place in order for event in (("push", place), ("pull", place)) if event[0] == "push" or place in early),
            ("end", 0),
            *(("pull", place) for place in order if place not in early),
        ]
    for server in found[2:]:
        assert not [place for kind, place in server if kind == "pull"]


def test_leaders_await_it_for_their_hosts(four: Pool, files: dict[str, str]) -> None:
    path, order = files["odd"], in_order(files["odd"], SHARED)
    leader, member, _ = four.run(events, path, SHARED, 1, batch_of("odd", 6, 0), {}, ranks=3)
    assert leader == [*(event for place in order for event in (("push", place), ("pull", place))), ("end", 0)]
    assert not [event for event in member if event[0] == "pull"]


def test_nothing_is_awaited_while_gradients_may_be_clipped(four: Pool, files: dict[str, str]) -> None:
    path, order = files["odd"], in_order(files["odd"])
    for reader in four.run(events, path, TOPOLOGY, 1, batch_of("odd", 6, 0), {"clip_norm": 0.05}, ranks=3)[:2]:
        assert reader == [*(("push", place) for place in order), ("end", 0), *(("pull", place) for place in order)]


def test_what_would_not_land_in_place_is_awaited_when_the_step_ends(four: Pool, files: dict[str, str]) -> None:
    """It needs memory meanwhile, which no plan counts."""
    path, order = files["odd"], in_order(files["odd"])
    for reader in four.run(scattered, path, batch_of("odd", 6, 0), ranks=3)[:2]:
        assert reader == [*(("push", place) for place in order), ("end", 0), *(("pull", place) for place in order)]


def test_a_copy_that_is_still_read_changes_when_the_step_ends(four: Pool) -> None:
    """And the model trains like one process."""
    path = APART["apart"]
    syncs = build_plan(traced(path).graph, served(path), TOPOLOGY).syncs
    book = next(place for place, sync in enumerate(syncs) if sync.parameter == "book")
    assert traced(path).read_apart == {"book"}
    for reader in four.run(events, path, TOPOLOGY, 1, apart_batch(6, 0), {}, ranks=3)[:2]:
        pulls = [place for kind, place in reader[: reader.index(("end", 0))] if kind == "pull"]
        assert pulls == [place for place in in_order(path) if place != book] and reader[-1] == ("pull", book)
    steps = [[apart_batch(6, step)] for step in range(3)]
    results = four.run(train, path, served(path), TOPOLOGY, steps, "adam", None, {}, ranks=3)
    assert worst(results[0], train_alone(apart(), steps, OPTIMIZERS["adam"])) < TOLERANCE


@pytest.mark.parametrize("partitions", [2, 3])
def test_parts_of_several_servers_train_like_one_process(four: Pool, files: dict[str, str], partitions: int) -> None:
    assert_trains(four, files, "odd", served(files["odd"], TWO_SERVERS, partitions), TWO_SERVERS)
