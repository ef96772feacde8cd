"""Plans in which each host has a copy in parts train like one process in float64, and all copies of a part stay equal to the bit."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from soap.cluster.topology import Topology
from soap.model.graph import OperatorGraph
from soap.plan.syncs.seam import Phase, method_for
from soap.runtime.trainer import Trainer
from soap.simulator.lowering import build_plan
from soap.strategy.config import Strategy, SyncConfig
from soap.strategy.sync import SHARDED, SHARDED_IN_HOSTS, SHARDED_STATE
from tests.extent import often, rows_often
from tests.runtime.mixtures import marked
from tests.runtime.pool import Pool
from tests.runtime.sparse_modules import OPTIMIZERS
from tests.runtime.sparse_plans import by_samples, hosts, random_synchronized
from tests.runtime.test_sharded_state import MODELS, assert_go_on_alike, batch_of, in_columns, trained
from tests.runtime.test_sharded_state import files as files  # a fixture
from tests.runtime.traced import traced

FOUR, UNEVEN = hosts(2, 2), hosts(2, 1)
STATE_IN_HOSTS = replace(SHARDED_STATE, within="host")
BOTH = pytest.mark.parametrize("sync", [SHARDED_IN_HOSTS, STATE_IN_HOSTS], ids=["values", "states"])


def in_hosts(graph: OperatorGraph, strategy: Strategy, sync: SyncConfig = SHARDED_IN_HOSTS, prefetch: int = 1) -> Strategy:
    """With all parameters synchronized so, frozen ones too."""
    syncs = {tensor.name: sync for tensor in graph.parameters}
    return replace(strategy.with_changes(parameters=syncs), prefetch=prefetch)


@BOTH
@pytest.mark.parametrize(
    ("name", "topology"), rows_often([("odd", FOUR), ("shared", FOUR), ("weighted", FOUR), ("odd", UNEVEN)], [("odd", UNEVEN)])
)
def test_trains_like_one_process(four: Pool, files: dict[str, str], name: str, topology: Topology, sync: SyncConfig) -> None:
    """With Adam, clipping and micro-batches, of different sizes in one case; unlike hosts share one copy."""
    graph = traced(files[name]).graph
    strategy = in_hosts(graph, by_samples(graph, range(topology.device_count), 6), sync)
    several = [own for own in build_plan(graph, strategy, topology).syncs if len(own.readers) > 1]
    assert {own.method for own in several} == {sync.contract.name} and {own.aggregated for own in several} == {topology is FOUR}
    trained(four, files, name, strategy, topology, sizes=((6, 4),) * 3 if name == "shared" else ((6, 6),) * 3, clip_norm=0.05)


@pytest.mark.parametrize("devices", often([(0, 2, 1, 3), (0, 1, 2, 3), (3, 0, 2, 1)], [(3, 0, 2, 1)]))
def test_tensor_parallel_shards(four: Pool, files: dict[str, str], devices: tuple[int, ...]) -> None:
    """Halves of weights, read on one host or on both; other parameters have a copy on each host."""
    graph = traced(files["odd"]).graph
    strategy = in_hosts(graph, in_columns(graph, by_samples(graph, range(4), 6), devices))
    plan = build_plan(graph, strategy, FOUR)
    assert any(len(own.readers) == 2 for own in plan.syncs) and any(own.aggregated for own in plan.syncs)
    trained(four, files, "odd", strategy, FOUR, clip_norm=0.05)


@BOTH
def test_small_buckets_and_queues(four: Pool, files: dict[str, str], sync: SyncConfig) -> None:
    """Where each region travels alone, and owners add up as soon as two wait."""
    graph = traced(files["odd"]).graph
    trained(four, files, "odd", in_hosts(graph, by_samples(graph, range(4), 6), sync, 0), FOUR, most_bytes=1)


def test_with_recomputation(four: Pool, files: dict[str, str]) -> None:
    graph = traced(files["odd"]).graph
    strategy = marked(graph, in_hosts(graph, by_samples(graph, range(4), 6)), random.Random(1))
    assert any(config.recompute for config in strategy.operators.values())
    trained(four, files, "odd", strategy, FOUR, clip_norm=0.05)


@pytest.mark.parametrize("seed", often(range(12), (0,), pytest.mark.slow))
def test_any_configurations(four: Pool, files: dict[str, str], seed: int) -> None:
    """Some parameters by other methods, each on its own devices."""
    rng, name = random.Random(seed), MODELS[seed % len(MODELS)]
    graph = traced(files[name]).graph
    topology = (FOUR, UNEVEN)[seed // 3 % 2]
    strategy = random_synchronized(graph, topology, rng)
    for tensor in graph.parameters:
        if rng.random() < 0.7:
            strategy = strategy.with_parameter(tensor.name, rng.choice((SHARDED_IN_HOSTS, STATE_IN_HOSTS, SHARDED)))
    trained(four, files, name, strategy, topology, rng.choice(list(OPTIMIZERS)), clip_norm=0.05)


def test_frozen_values_are_shared_on_each_host(four: Pool, files: dict[str, str]) -> None:
    """They come for their passes, and nothing goes back."""
    graph = traced(files["odd"]).graph
    strategy = in_hosts(graph, by_samples(graph, range(4), 6))
    plan = build_plan(graph, strategy, FOUR)
    frozen = [sync for sync in plan.syncs if plan.is_frozen(sync)]
    assert {region.parameter for sync in frozen for region in sync.regions} == {"frozen.weight", "frozen.bias"}
    steps = [step for sync in frozen for step in method_for(sync).steps(plan, sync)]
    assert {step.phase for step in steps} == {Phase.BEFORE_FORWARD, Phase.BEFORE_BACKWARD}
    held = four.run(parts_after, files["odd"], strategy)
    size = sum(tensor.bytes for tensor in graph.parameters)
    assert sum(sum(tensor.nbytes for tensor in own.values()) for own in held) == 2 * size


def parts_after(path: str, strategy: Strategy) -> dict[int, torch.Tensor]:
    with Trainer(traced(path), (strategy, FOUR), optimizer=OPTIMIZERS["adam"]) as trainer:
        for step in range(3):
            trainer.step(*batch_of("odd", 6, step))
        return {shard: tensor.detach().clone() for shard, tensor in trainer.shards.tensors.items()}


@BOTH
def test_copies_stay_equal(four: Pool, files: dict[str, str], sync: SyncConfig) -> None:
    graph = traced(files["odd"]).graph
    strategy = in_hosts(graph, by_samples(graph, range(4), 6), sync)
    found = four.run(parts_after, files["odd"], strategy)
    shards = build_plan(graph, strategy, FOUR).shards
    several = [number for number, shard in enumerate(shards) if shard.trainable and len(shard.devices) > 1]
    assert len(several) > 4
    for number in several:
        first, *others = (found[device][number] for device in shards[number].devices)
        assert all(torch.equal(first, other) for other in others)


def test_checkpoints_fit_any_plan_and_number_of_ranks(four: Pool, files: dict[str, str], tmp_path: Path) -> None:
    """Two copies, one over three ranks, any methods, states alone, one process' parameters, and back."""
    graph, path = traced(files["odd"]).graph, files["odd"]
    whole = by_samples(graph, range(4), 6)
    ways = [
        (in_hosts(graph, whole), FOUR),
        (in_hosts(graph, by_samples(graph, range(3), 6), SHARDED), hosts(1, 2)),
        (random_synchronized(graph, UNEVEN, random.Random(3)), UNEVEN),
        (in_hosts(graph, whole, STATE_IN_HOSTS), FOUR),
        (by_samples(graph, range(1), 6), hosts(1)),
        (in_hosts(graph, in_columns(graph, whole, (3, 0, 2, 1)), prefetch=0), FOUR),
    ]
    assert_go_on_alike(four, path, ways, tmp_path)
