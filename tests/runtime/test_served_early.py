"""Servers update and send back one parameter after the other, as gradients come; and what goes back does not queue behind what comes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from soap.cluster.topology import Topology
from soap.runtime.comm import parcels
from soap.runtime.comm.packing import land
from soap.runtime.comm.redistribute import Communicator, Pending
from soap.runtime.comm.world import open_world
from soap.runtime.sync.parameter_server import DenseServing
from soap.runtime.sync.row_update import Updater
from soap.runtime.trainer import Trainer
from soap.simulator.lowering import build_plan
from soap.strategy.classical import parameter_server
from soap.strategy.config import Strategy
from tests.extent import often
from tests.runtime.exact_modules import Batch
from tests.runtime.pool import Pool
from tests.runtime.sparse_modules import OPTIMIZERS
from tests.runtime.sparse_plans import hosts
from tests.runtime.test_sharded_state import assert_trains, batch_of
from tests.runtime.test_sharded_state import files as files  # a fixture
from tests.runtime.traced import traced
from tests.strategies import with_servers

TOPOLOGY, SHARED = with_servers(hosts(1, 1, 1), 1), with_servers(hosts(2, 1), 1)
"""Two workers and a server, which computes nothing; on the second cluster one worker speaks for both."""
SERVER = 2
Event = tuple[str, int]


def served(path: str, topology: Topology = TOPOLOGY, partitions: int = 1) -> Strategy:
    """Samples on workers, all parameters on servers."""
    strategy = parameter_server(traced(path).graph, topology)
    return strategy.with_changes(parameters={name: replace(own, partitions=partitions) for name, own in strategy.parameters.items()})


def events(path: str, steps: Sequence[Batch], options: Mapping[str, Any]) -> list[Event]:
    """What a rank has done in the last step: ("wait", parameter's place) for gradients, ("update", how many shards), ("bring", place)."""
    found: list[Event] = []

    def noting(owner: type, name: str, note: Callable[..., Event | None]) -> Any:
        before = getattr(owner, name)

        def noted(self: Any, *args: Any, **rest: Any) -> Any:
            event = note(self, *args)
            result = before(self, *args, **rest)
            if event is not None:
                found.append(event)
            return result

        return patch.object(owner, name, noted)

    def waits(own: DenseServing, shards: Sequence[int]) -> Event | None:
        return ("wait", min(own._number_of[shard] for shard in shards)) if shards else None

    def updates(own: Updater, dense: object, rows: object, looked_up: object, only: Sequence[int]) -> Event:
        return "update", len(only)

    with (
        noting(DenseServing, "gradients", waits),
        noting(Updater, "update", updates),
        noting(DenseServing, "bring", lambda own, number: ("bring", number)),
        Trainer(traced(path), (served(path), TOPOLOGY), optimizer=OPTIMIZERS["adam"], **options) as trainer,
    ):
        for inputs in steps:
            found.clear()
            trainer.step(*inputs)
    return found


def in_order(path: str, topology: Topology = TOPOLOGY, partitions: int = 1) -> list[int]:
    """Synchronizations, those first whose gradients backward passes complete first."""
    plan = build_plan(traced(path).graph, served(path, topology, partitions), topology)
    return sorted(range(len(plan.syncs)), key=lambda i: -min(tile for tile, _ in plan.syncs[i].uses))


def test_what_has_come_is_sent_back_before_the_next_is_waited_for(four: Pool, files: dict[str, str]) -> None:
    """On a step that is not traced, with an optimizer that updates each element by itself."""
    path, steps = files["odd"], [batch_of("odd", 6, seed) for seed in range(2)]
    *readers, server = four.run(events, path, steps, {}, ranks=3)
    order = in_order(path)
    assert len(order) > 3
    assert server == [event for number in order for event in (("wait", number), ("update", 1), ("bring", number))]
    for reader in readers:
        assert [event for event in reader if event[0] == "bring"] == [("bring", number) for number in order]


def test_what_all_gradients_decide_comes_first(four: Pool, files: dict[str, str]) -> None:
    """With clipping nothing is updated before all gradients are there."""
    path, steps = files["odd"], [batch_of("odd", 6, 0)]
    server = four.run(events, path, steps, {"clip_norm": 0.05}, ranks=3)[SERVER]
    assert [kind for kind, _ in server] == ["wait", "update", *["bring"] * len(in_order(path))]


@pytest.mark.parametrize("name", often(("odd", "shared", "weighted"), ("odd",)))
@pytest.mark.parametrize("topology", [TOPOLOGY, SHARED])
def test_trains_like_one_process(four: Pool, files: dict[str, str], name: str, topology: Topology) -> None:
    assert_trains(four, files, name, served(files[name], topology), topology)


def used_groups(path: str) -> set[tuple[str, tuple[int, ...]]]:
    """By what a rank's exchanges went in a step."""
    found: set[tuple[str, tuple[int, ...]]] = set()
    before = Communicator.post

    def post(self: Communicator, coming: Any, leaving: Any, devices: tuple[int, ...], *, answers: int | None = None) -> Any:
        for way, tensors in (("in", coming), ("out", leaving)):
            others = [tensor for device, own in zip(devices, tensors, strict=True) for tensor in own if device != self.rank]
            if any(tensor.numel() for tensor in others):
                found.add((way, devices[::-1] if answers is not None and devices[::-1] in self.groups else devices))
        return before(self, coming, leaving, devices, answers=answers)

    with Trainer(traced(path), (served(path), TOPOLOGY), optimizer=OPTIMIZERS["adam"]) as trainer:
        trainer.step(*batch_of("odd", 6, 0))
        with patch.object(Communicator, "post", post):
            trainer.step(*batch_of("odd", 6, 1))
    return found


def test_values_go_back_by_other_connections_than_gradients_come(four: Pool, files: dict[str, str]) -> None:
    """Requests for them would otherwise queue behind gradients: half the rate where links are slow (docs/lab_notebook.md)."""
    *readers, server = four.run(used_groups, files["odd"], ranks=3)
    assert server == {("in", (0, 1, 2)), ("out", (2, 1, 0))}
    assert readers == [{("out", (0, 1, 2)), ("in", (2, 1, 0))}] * 2


def copies(path: str) -> tuple[list[bool], list[bool]]:
    """Of a step: whether values are sent from where they are, and whether what comes lands where it belongs."""
    sent, landed = list[bool](), list[bool]()
    before = Communicator.post

    def post(self: Communicator, coming: Any, leaving: Any, devices: tuple[int, ...], *, answers: int | None = None) -> Any:
        sent.extend(own.data_ptr() in values for tensors in leaving for own in tensors if answers is not None and own.numel())
        return before(self, coming, leaving, devices, answers=answers)

    def landing(places: Sequence[torch.Tensor]) -> Any:
        found = land(places)
        landed.append(found[1] is None)
        return found

    with Trainer(traced(path), (served(path), TOPOLOGY), optimizer=OPTIMIZERS["adam"]) as trainer:
        values = {own.data_ptr() for own in trainer.shards.tensors.values()}
        with patch.object(Communicator, "post", post), patch.object(parcels, "land", landing):
            trainer.step(*batch_of("odd", 6, 0))
    return sent, landed


def test_servers_copy_nothing(four: Pool, files: dict[str, str]) -> None:
    """Values for two readers, and gradients of two: predicted memory has no room for copies of them."""
    sent, landed = four.run(copies, files["odd"], ranks=3)[SERVER]
    count = len(in_order(files["odd"]))
    assert sent == [True] * 2 * count and landed == [True] * count


def both_ways() -> list[float]:
    """Messages between all pairs, with a second group for those to lower ranks."""
    world = open_world(3)
    comm = Communicator(world.device, [(2, 1, 0)], world.timeout)
    groups: list[tuple[int, bool]] = []
    send = dist.isend

    def sending(tensor: torch.Tensor, peer: int, *, tag: int, group: Any = None) -> Any:
        groups.append((peer, group is not None))
        return send(tensor, peer, tag=tag, group=group)

    got: list[Pending] = []
    with patch.object(dist, "isend", sending):
        for peer in range(3):
            if peer != comm.rank:
                got.append(comm.receive(torch.empty(1), peer, 7))
                comm.send(torch.tensor([10.0 * comm.rank + peer]), peer, 7)
    values = [float(own.wait()) for own in got]
    comm.finish_sends()
    comm.close()
    assert groups == [(peer, peer < world.rank) for peer in range(3) if peer != world.rank]
    return values


def test_messages_to_lower_ranks_go_by_a_second_group(four: Pool) -> None:
    assert four.run(both_ways, ranks=3) == [[10.0, 20.0], [1.0, 21.0], [2.0, 12.0]]
