"""Plans that keep optimizer states on hosts: copies are really made, also on CPUs. ``test_owned_parts`` holds their training."""

from __future__ import annotations

import torch

from soap.cluster.topology import Topology
from soap.errors import RuntimeFailure
from soap.model.graph import OperatorGraph
from soap.plan.offloading import from_host_name, host_update_name, offloaded_bytes, to_host_name
from soap.profiles.roofline import RooflineCosts
from soap.runtime.trainer import Trainer
from soap.simulator.lowering import build_plan, lower
from soap.strategy.config import Strategy, SyncConfig
from soap.strategy.sync import ALL_REDUCE, SHARDED_STATE, offloaded
from tests.runtime.pool import Pool
from tests.runtime.sparse_modules import OPTIMIZERS
from tests.runtime.sparse_plans import by_samples
from tests.runtime.test_sharded_state import FOUR, TWO, batch_of, files
from tests.runtime.traced import traced

__all__ = ["files"]  # a fixture


def away(graph: OperatorGraph, strategy: Strategy, sync: SyncConfig = ALL_REDUCE) -> Strategy:
    """All trainable parameters synchronized so, with their states on hosts."""
    return offloaded(graph, strategy.with_changes(parameters={t.name: sync for t in graph.parameters if t.requires_grad}))


def kept(path: str, strategy: Strategy, topology: Topology) -> tuple[int, int, bool]:
    """(bytes of states that are not beside the device's own tensors, bytes of host copies, whether all values are equal to the device's)
    of this rank, and the events of a traced step."""
    with Trainer(traced(path), (strategy, topology), optimizer=OPTIMIZERS["adam"]) as trainer:
        trainer.step(*batch_of("odd", 6, 0))
        assert trainer.optimizer is not None
        on_device = {id(tensor) for tensor in trainer.shards.tensors.values()}
        beside = {id(tensor) for group in trainer.optimizer.param_groups for tensor in group["params"]} & on_device
        hosts = [part for number, part in trainer.parts.items() if number in trainer.plan.offloaded]
        same = all(torch.equal(part.tensor, trainer.shards.tensors[part.shards[0]]) for part in hosts)
        apart = {part.tensor.data_ptr() for part in hosts}.isdisjoint({t.data_ptr() for t in trainer.shards.tensors.values()})
        return len(beside), sum(part.tensor.nbytes for part in hosts), same and apart


def test_what_is_updated_is_on_the_host(four: Pool, files: dict[str, str]) -> None:
    graph = traced(files["odd"]).graph
    strategy = away(graph, by_samples(graph, range(4), 6), SHARDED_STATE)
    plan = build_plan(graph, strategy, FOUR)
    found = four.run(kept, files["odd"], strategy, FOUR)
    assert [size for _, size, _ in found] == [offloaded_bytes(plan)[device] for device in range(4)]
    assert [(beside, same) for beside, _, same in found] == [(0, True)] * 4


def told_names(path: str, strategy: Strategy, topology: Topology) -> list[str]:
    with Trainer(traced(path), (strategy, topology), optimizer=OPTIMIZERS["adam"]) as trainer:
        trainer.step(*batch_of("odd", 6, 0))
        events = trainer.trace(*batch_of("odd", 6, 1))
    return [event.name for event in events]


def test_traces_have_the_simulated_tasks(four: Pool, files: dict[str, str]) -> None:
    """One lowering: what is simulated of offloading is what ranks do."""
    graph = traced(files["odd"]).graph
    strategy = away(graph, by_samples(graph, range(2), 6))
    (names, _) = four.run(told_names, files["odd"], strategy, TWO, ranks=2)
    simulated = [task.name for task in lower(build_plan(graph, strategy, TWO), TWO, RooflineCosts(TWO)).tasks]
    wanted = [name(device) for device in range(2) for name in (to_host_name, host_update_name, from_host_name)]
    assert {*wanted} <= {*names} and {*wanted} <= {*simulated}


def refusal(path: str, strategy: Strategy, topology: Topology) -> str:
    try:
        Trainer(traced(path), (strategy, topology), optimizer=OPTIMIZERS["adam"], lazy_sparse=True).close()
    except RuntimeFailure as error:
        return str(error)
    return ""


def test_lazy_tables_are_refused(four: Pool, files: dict[str, str]) -> None:
    graph = traced(files["shared"]).graph
    strategy = away(graph, by_samples(graph, range(2), 6))
    lines = four.run(refusal, files["shared"], strategy, TWO, ranks=2)
    assert len({*lines}) == 1 and ("leave lazy_sparse out" in lines[0]) == bool(graph.sparse)
