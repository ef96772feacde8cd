"""Plans that keep optimizer states on hosts train like one process in float64: copies are really made, also where the device is a CPU."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from soap.cluster.topology import Topology
from soap.errors import RuntimeFailure
from soap.model.graph import OperatorGraph
from soap.plan.offloading import from_host_name, host_update_name, offloaded_bytes, to_host_name
from soap.profiles.roofline import RooflineCosts
from soap.runtime.trainer import Trainer
from soap.simulator.lowering import build_plan, lower
from soap.strategy.classical import data_parallel
from soap.strategy.config import Strategy
from soap.strategy.sync import SHARDED, SHARDED_IN_HOSTS, SHARDED_STATE, offloaded
from tests.extent import often
from tests.micro_batches import in_micro_batches
from tests.runtime.pool import Pool
from tests.runtime.sparse_modules import OPTIMIZERS
from tests.runtime.sparse_plans import by_samples, random_synchronized
from tests.runtime.test_sharded_state import FOUR, MODELS, TWO, batch_of, files, gone_on, in_columns, trained
from tests.runtime.test_within_hosts import FOUR as TWO_HOSTS
from tests.runtime.test_within_hosts import STATE_IN_HOSTS
from tests.runtime.traced import traced

__all__ = ["files"]  # a fixture


def away(graph: OperatorGraph, strategy: Strategy, method: str = "allreduce") -> Strategy:
    """All trainable parameters by a method, with their states on hosts."""
    sync = {"zero": SHARDED_STATE, "fsdp": SHARDED, "hsdp": SHARDED_IN_HOSTS, "zero+local": STATE_IN_HOSTS}.get(method)
    if sync is not None:
        strategy = strategy.with_changes(parameters={t.name: sync for t in graph.parameters if t.requires_grad})
    return offloaded(graph, strategy)


@pytest.mark.parametrize("method", ["allreduce", "zero", "fsdp"])
@pytest.mark.parametrize("name", often(MODELS, ["odd"]))
def test_trains_like_one_process(four: Pool, files: dict[str, str], name: str, method: str) -> None:
    """With Adam, clipping and micro-batches."""
    graph, topology = traced(files[name]).graph, TWO if name == "shared" else FOUR
    strategy = away(graph, by_samples(graph, range(topology.device_count), 6), method)
    trained(four, files, name, strategy, topology, sizes=((6, 6),) * 3, clip_norm=0.05)


def test_tensor_parallel_shards(four: Pool, files: dict[str, str]) -> None:
    graph = traced(files["odd"]).graph
    trained(four, files, "odd", away(graph, in_columns(graph, by_samples(graph, range(4), 6), (3, 0, 2, 1)), "zero"), FOUR, clip_norm=0.05)


@pytest.mark.parametrize("method", often(["hsdp", "zero+local"], ["hsdp"]))
def test_copies_of_hosts(four: Pool, files: dict[str, str], method: str) -> None:
    """Each host has a copy in parts, whose owners sum gradients between hosts before they copy them down."""
    graph = traced(files["odd"]).graph
    strategy = away(graph, by_samples(graph, range(4), 6), method)
    syncs = [sync for sync in build_plan(graph, strategy, TWO_HOSTS).syncs if len(sync.readers) > 1]
    assert all(sync.offload and sync.aggregated for sync in syncs) and syncs
    trained(four, files, "odd", strategy, TWO_HOSTS, sizes=((6, 6),) * 3, clip_norm=0.05)


@pytest.mark.parametrize("method", often(["allreduce", "zero"], ["zero"]))
def test_micro_batches(four: Pool, files: dict[str, str], method: str) -> None:
    """Hosts update once a step, when the last part's gradients are there."""
    graph = traced(files["shared"]).graph
    strategy = in_micro_batches(graph, away(graph, by_samples(graph, range(2), 6), method), 2, random.Random(0), 2)
    assert strategy.microbatches == 2 and build_plan(graph, strategy, TWO).offloaded
    trained(four, files, "shared", strategy, TWO, clip_norm=0.05)


@pytest.mark.parametrize("seed", often(range(8), (0, 1), pytest.mark.slow))
def test_mixtures(four: Pool, files: dict[str, str], seed: int) -> None:
    """Any plan, some of whose parameters are offloaded, with any optimizer, on one host and on two."""
    rng, graph, topology = random.Random(seed), traced(files["odd"]).graph, (FOUR, TWO_HOSTS)[seed % 2]
    strategy = random_synchronized(graph, topology, rng)
    names = [tensor.name for tensor in graph.parameters if strategy.sync(tensor.name).contract.offloads]
    strategy = strategy.with_changes(parameters={n: replace(strategy.sync(n), offload=True) for n in names if rng.random() < 0.7})
    assert any(sync.offload for sync in strategy.parameters.values())
    trained(four, files, "odd", strategy, topology, rng.choice(list(OPTIMIZERS)), clip_norm=0.05)


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
    strategy = away(graph, by_samples(graph, range(4), 6), "zero")
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


@pytest.mark.slow
def test_checkpoints_load_with_and_without(four: Pool, files: dict[str, str], tmp_path: Path) -> None:
    """Training goes on from a checkpoint alike, whether states were on hosts before, or are now."""
    graph = traced(files["odd"]).graph
    usual = by_samples(graph, range(4), 6)
    ways = [(away(graph, usual, "zero"), FOUR), (data_parallel(graph, TWO), TWO), (away(graph, by_samples(graph, range(2), 6)), TWO)]
    for i, (first, then) in enumerate(((0, 1), (1, 2), (2, 0), (0, 0))):
        folder = str(tmp_path / str(i))
        (strategy, topology), (other, others) = ways[first], ways[then]
        four.run(gone_on, files["odd"], strategy, topology, None, folder, [0, 1], ranks=topology.device_count)
        rest = four.run(gone_on, files["odd"], other, others, folder, None, [2, 3], ranks=others.device_count)[0]
        whole = four.run(gone_on, files["odd"], strategy, topology, None, None, [0, 1, 2, 3], ranks=topology.device_count)[0]
        assert rest.losses == pytest.approx(whole.losses[2:], rel=1e-9)
        assert all(torch.allclose(tensor, rest.state[name], rtol=1e-9, atol=1e-11) for name, tensor in whole.state.items())


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
