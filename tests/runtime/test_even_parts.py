"""Collectives of equal parts, which plans use between GPUs, train like one process in float64: here the same code on gloo's."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from soap.cluster.topology import Topology
from soap.model.graph import OperatorGraph
from soap.plan.plan import Plan
from soap.plan.syncs.even_parts import is_even, part_bytes
from soap.plan.syncs.seam import method_for
from soap.plan.syncs.sharing import owned_bytes
from soap.runtime.comm import parcels
from soap.runtime.trainer import Trainer
from soap.simulator.lowering import build_plan
from soap.strategy.config import Strategy, SyncConfig
from soap.strategy.sync import SHARDED, SHARDED_IN_HOSTS, SHARDED_STATE
from tests.extent import often, rows_often
from tests.runtime.mixtures import marked
from tests.runtime.pool import Pool
from tests.runtime.sparse_modules import OPTIMIZERS
from tests.runtime.sparse_plans import by_samples, random_synchronized
from tests.runtime.test_sharded_state import MODELS, batch_of, in_columns, trained
from tests.runtime.test_sharded_state import files as files  # a fixture
from tests.runtime.traced import traced
from tests.strategies import CPU, GPU, cluster

TWO, FOUR, UNEVEN = cluster([2], GPU), cluster([2, 2], GPU), cluster([2, 1], GPU)
WAYS = (SHARDED_STATE, SHARDED, replace(SHARDED_STATE, within="host"), SHARDED_IN_HOSTS)
WAY = pytest.mark.parametrize("sync", WAYS, ids=["zero", "fsdp", "zero in hosts", "hsdp"])


def by(sync: SyncConfig, graph: OperatorGraph, strategy: Strategy, prefetch: int = 1) -> Strategy:
    """With all trainable parameters synchronized so."""
    syncs = {tensor.name: sync for tensor in graph.parameters if tensor.requires_grad}
    return replace(strategy.with_changes(parameters=syncs), prefetch=prefetch)


def require_collectives(plan: Plan, *, padded: bool) -> None:
    """All that readers own in parts moves by collectives of equal parts, some of which are ``padded``."""
    parts = [sync for sync in plan.syncs if sync.contract.owned_in_parts]
    assert parts and all(is_even(plan, sync) for sync in parts)
    for sync in parts:
        kinds = [step.collective.kind for step in method_for(sync).steps(plan, sync) if step.collective is not None]
        assert "all_gather" in kinds and "reduce_scatter" in kinds
        assert not any(step.rounds for step in method_for(sync).steps(plan, sync))
    lacking = [part_bytes(plan, sync) - owned_bytes(plan, sync).get(device, 0) for sync in parts for device in sync.readers]
    assert any(lacking) or not padded


@WAY
@pytest.mark.parametrize(("name", "topology"), rows_often([("odd", FOUR), ("shared", FOUR), ("odd", UNEVEN)], [("odd", FOUR)]))
def test_trains_like_one_process(four: Pool, files: dict[str, str], name: str, topology: Topology, sync: SyncConfig) -> None:
    """With Adam, clipping and micro-batches, of different sizes in one case; rows that do not divide, fewer rows than ranks, a number."""
    graph = traced(files[name]).graph
    strategy = by(sync, graph, by_samples(graph, range(topology.device_count), 6))
    require_collectives(build_plan(graph, strategy, topology), padded=topology is UNEVEN)
    sizes = ((6, 4),) * 3 if name == "shared" else ((6, 6),) * 3
    trained(four, files, name, strategy, topology, sizes=sizes, clip_norm=0.05, device_kind="cpu")


@pytest.mark.parametrize("sync", WAYS[:2], ids=["zero", "fsdp"])
def test_tensor_parallel_shards(four: Pool, files: dict[str, str], sync: SyncConfig) -> None:
    graph = traced(files["odd"]).graph
    strategy = by(sync, graph, in_columns(graph, by_samples(graph, range(4), 6), (3, 0, 2, 1)))
    plan = build_plan(graph, strategy, FOUR)
    assert len({own.readers for own in plan.syncs if own.contract.owned_in_parts}) > 1
    trained(four, files, "odd", strategy, FOUR, clip_norm=0.05, device_kind="cpu")


@WAY
def test_small_buckets_and_queues(four: Pool, files: dict[str, str], sync: SyncConfig) -> None:
    """Where each region travels alone, and what is under way is waited for as soon as two are."""
    graph = traced(files["odd"]).graph
    trained(four, files, "odd", by(sync, graph, by_samples(graph, range(4), 6), 0), FOUR, most_bytes=1, device_kind="cpu")


def test_with_recomputation(four: Pool, files: dict[str, str]) -> None:
    graph = traced(files["odd"]).graph
    strategy = marked(graph, by(SHARDED, graph, by_samples(graph, range(4), 6)), random.Random(1))
    assert any(config.recompute for config in strategy.operators.values())
    trained(four, files, "odd", strategy, FOUR, clip_norm=0.05, device_kind="cpu")


@pytest.mark.parametrize("seed", often(range(12), (0,), pytest.mark.slow))
def test_any_configurations(four: Pool, files: dict[str, str], seed: int) -> None:
    """Some parameters by other methods, each on its own devices."""
    rng, name = random.Random(seed), MODELS[seed % len(MODELS)]
    graph, topology = traced(files[name]).graph, (TWO, FOUR, UNEVEN)[seed // 3 % 3]
    strategy = random_synchronized(graph, topology, rng)
    for tensor in graph.parameters:
        if tensor.requires_grad and rng.random() < 0.7:
            strategy = strategy.with_parameter(tensor.name, rng.choice(WAYS))
    trained(four, files, name, strategy, topology, rng.choice(list(OPTIMIZERS)), clip_norm=0.05, device_kind="cpu")


def called(path: str, strategy: Strategy, topology: Topology) -> tuple[dict[str, int], set[torch.dtype], list[float]]:
    """How often a rank calls which collective in a step, of which types, and the losses of two steps, in half precision."""
    counts, types = dict.fromkeys(("all_gather_into_tensor", "reduce_scatter_tensor"), 0), set()

    def counted(name: str, function: Any) -> Any:
        def call(output: torch.Tensor, given: torch.Tensor, **options: Any) -> Any:
            counts[name] += 1
            types.add(given.dtype)
            assert output.numel() in (given.numel() * 4, given.numel() // 4)
            return function(output, given, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in counts:
            patch.setattr(parcels.dist, name, counted(name, getattr(parcels.dist, name)))
        options = {"optimizer": OPTIMIZERS["momentum"], "dtype": torch.bfloat16, "device_kind": "cpu"}
        with Trainer(traced(path), (strategy, topology), **options) as trainer:  # type: ignore[arg-type]
            x, labels = batch_of("odd", 6, 0)
            counts.update(dict.fromkeys(counts, 0))
            return counts, types, [trainer.step(x.bfloat16(), labels) for _ in range(2)]


def test_gradients_are_summed_in_their_own_type(four: Pool, files: dict[str, str]) -> None:
    """Two gathers and a scatter of each group in a step, of bfloat16 where the gradients are; processors call neither."""
    graph = traced(files["odd"]).graph
    strategy = by(SHARDED, graph, by_samples(graph, range(4), 6))
    groups = sum(sync.contract.owned_in_parts for sync in build_plan(graph, strategy, FOUR).syncs)
    for counts, types, losses in four.run(called, files["odd"], strategy, FOUR):
        assert counts == {"all_gather_into_tensor": 4 * groups, "reduce_scatter_tensor": 2 * groups}
        assert types == {torch.bfloat16} and losses[1] < losses[0]
    for counts, _, _ in four.run(called, files["odd"], strategy, cluster([2, 2], CPU)):
        assert not any(counts.values())
