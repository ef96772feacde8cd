"""Parameters and states that ranks own in parts, or keep on hosts, train like one process in float64, whatever else a plan does: by
messages, and by collectives of equal parts, which plans use between GPUs: here the same code on gloo's."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from soap.cluster.topology import Topology
from soap.model.graph import OperatorGraph
from soap.plan.plan import Plan
from soap.plan.syncs.even_parts import is_even, part_bytes
from soap.plan.syncs.seam import Phase, method_for
from soap.plan.syncs.sharing import owned_bytes
from soap.runtime.comm import parcels
from soap.runtime.trainer import Trainer
from soap.simulator.lowering import build_plan
from soap.strategy.config import Strategy, SyncConfig
from soap.strategy.sync import ALL_REDUCE, SHARDED, SHARDED_IN_HOSTS, SHARDED_STATE, offloaded
from tests.extent import often
from tests.micro_batches import in_micro_batches
from tests.runtime.mixtures import marked
from tests.runtime.pool import Pool
from tests.runtime.sparse_modules import OPTIMIZERS
from tests.runtime.sparse_plans import by_samples, random_synchronized
from tests.runtime.test_sharded_state import MODELS, assert_go_on_alike, assert_trains, batch_of, in_columns
from tests.runtime.test_sharded_state import files as files  # a fixture
from tests.runtime.traced import traced
from tests.strategies import CPU, GPU, cluster

STATE_IN_HOSTS = replace(SHARDED_STATE, within="host")
WAYS = {"zero": SHARDED_STATE, "fsdp": SHARDED, "zero in hosts": STATE_IN_HOSTS, "hsdp": SHARDED_IN_HOSTS}


@dataclass(frozen=True)
class Case:
    """``columns``: two devices read each half of a weight. ``small``: each region travels alone, and owners add up as soon as two wait.
    ``again``: operators run twice. ``offload``: states are on hosts."""

    sync: SyncConfig
    model: str = "odd"
    hosts: tuple[int, ...] = (2, 2)
    gpus: bool = False
    prefetch: int = 1
    columns: bool = False
    small: bool = False
    again: bool = False
    offload: bool = False
    micro_batches: bool = False

    @property
    def topology(self) -> Topology:
        return cluster([*self.hosts], GPU if self.gpus else CPU)

    def strategy(self, graph: OperatorGraph) -> Strategy:
        """With all parameters synchronized so, frozen ones too where values are gathered."""
        strategy, draw = by_samples(graph, range(sum(self.hosts)), 6), random.Random(1)
        if self.columns:
            strategy = in_columns(graph, strategy, (3, 0, 2, 1))
        names = [tensor.name for tensor in graph.parameters if tensor.requires_grad or self.sync.contract.gathers_values]
        strategy = replace(strategy.with_changes(parameters=dict.fromkeys(names, self.sync)), prefetch=self.prefetch)
        strategy = offloaded(graph, strategy) if self.offload else strategy
        strategy = marked(graph, strategy, draw) if self.again else strategy
        return in_micro_batches(graph, strategy, 2, draw, 2) if self.micro_batches else strategy


CASES = {
    "zero": Case(SHARDED_STATE),
    "zero, shared layers": Case(SHARDED_STATE, "shared", (1, 1)),
    "zero by columns": Case(SHARDED_STATE, columns=True),
    "zero by columns, on hosts": Case(SHARDED_STATE, columns=True, offload=True),
    "zero in micro-batches, on hosts": Case(SHARDED_STATE, "shared", (1, 1), offload=True, micro_batches=True),
    "zero in hosts, of which one is smaller": Case(STATE_IN_HOSTS, hosts=(2, 1)),
    "zero in hosts, one by one": Case(STATE_IN_HOSTS, small=True),
    "fsdp, nothing ahead": Case(SHARDED, hosts=(1, 1), prefetch=0),
    "fsdp, shared layers": Case(SHARDED, "shared", (1, 1), prefetch=2),
    "fsdp by columns": Case(SHARDED, columns=True),
    "fsdp, on hosts": Case(SHARDED, offload=True),
    "hsdp by columns": Case(SHARDED_IN_HOSTS, columns=True),
    "hsdp, one by one": Case(SHARDED_IN_HOSTS, prefetch=0, small=True),
    "hsdp, run again": Case(SHARDED_IN_HOSTS, again=True),
    "hsdp, on hosts": Case(SHARDED_IN_HOSTS, offload=True),
    "hsdp, one host is smaller": Case(SHARDED_IN_HOSTS, hosts=(2, 1)),
    "allreduce, on hosts": Case(ALL_REDUCE, offload=True),
    "GPUs: zero, one by one": Case(SHARDED_STATE, gpus=True, small=True),
    "GPUs: zero by columns": Case(SHARDED_STATE, gpus=True, columns=True),
    "GPUs: zero in hosts": Case(STATE_IN_HOSTS, gpus=True),
    "GPUs: zero in hosts, one by one": Case(STATE_IN_HOSTS, gpus=True, small=True),
    "GPUs: fsdp by columns": Case(SHARDED, gpus=True, columns=True),
    "GPUs: fsdp, run again": Case(SHARDED, gpus=True, again=True),
    "GPUs: fsdp, one by one": Case(SHARDED, gpus=True, prefetch=0, small=True),
    "GPUs: hsdp": Case(SHARDED_IN_HOSTS, gpus=True),
    "GPUs: hsdp, one host is smaller": Case(SHARDED_IN_HOSTS, hosts=(2, 1), gpus=True),
}
"""What is often is in all of them: every way and every other property, though not each with each."""
OFTEN = {*CASES} - {"zero", "zero by columns", "zero in hosts, one by one", "hsdp, one by one", "fsdp, on hosts", "GPUs: zero in hosts"}
OFTEN -= {"GPUs: zero by columns", "GPUs: fsdp, one by one", "hsdp, one host is smaller", "GPUs: hsdp"}
CASES |= {
    f"{way}, {model}, {len(hosts)} hosts, {'GPUs' if gpus else 'CPUs'}": Case(sync, model, hosts, gpus)
    for way, sync in WAYS.items()
    for model in MODELS
    for hosts in ((1, 1), (2, 2))
    for gpus in (False, True)
}


def require_collectives(plan: Plan, *, padded: bool) -> None:
    """All that readers own in parts moves by collectives of equal parts, some of which are ``padded``."""
    parts = [sync for sync in plan.syncs if sync.contract.owned_in_parts and len(sync.readers) > 1]
    assert parts and all(is_even(plan, sync) for sync in parts)
    for sync in parts:
        steps = method_for(sync).steps(plan, sync)
        kinds = {step.collective.kind for step in steps if step.collective is not None}
        assert "all_gather" in kinds and (plan.is_frozen(sync) or "reduce_scatter" in kinds)
        assert not any(step.rounds for step in steps)
    lacking = [part_bytes(plan, sync) - owned_bytes(plan, sync).get(device, 0) for sync in parts for device in sync.readers]
    assert any(lacking) or not padded


@pytest.mark.parametrize("name", often([*CASES], OFTEN))
def test_trains_like_one_process(four: Pool, files: dict[str, str], name: str) -> None:
    """With Adam, clipping and accumulation, of different sizes in one case; rows that do not divide, fewer rows than ranks, a number."""
    case = CASES[name]
    graph, topology = traced(files[case.model]).graph, case.topology
    strategy = case.strategy(graph)
    plan = build_plan(graph, strategy, topology)
    several = [sync for sync in plan.syncs if len(sync.readers) > 1]
    assert {sync.method for sync in several} == {case.sync.contract.name}
    assert {sync.aggregated for sync in several} == {True} or case.sync.within != "host" or case.columns or case.hosts in ((2, 1), (1, 1))
    assert len({sync.readers for sync in several}) > 1 or not case.columns
    assert all(sync.offload or plan.is_frozen(sync) for sync in several) or not case.offload
    if case.gpus:
        require_collectives(plan, padded=case.hosts == (2, 1))
    sizes = ((6, 4),) * 3 if case.model == "shared" else ((6, 6),) * 3
    most = 1 if case.small else None
    assert_trains(four, files, case.model, strategy, topology, sizes=sizes, most_bytes=most, clip_norm=0.05, device_kind="cpu")


CLUSTERS = [cluster(hosts, kind) for hosts in ([1, 1], [2, 2], [2, 1], [4]) for kind in (CPU, GPU)]


@pytest.mark.parametrize("seed", often(range(40), (0, 1, 2), pytest.mark.slow))
def test_any_configurations(four: Pool, files: dict[str, str], seed: int) -> None:
    """Each parameter by another method, on its own devices, some with states on hosts."""
    rng, name = random.Random(seed), MODELS[seed % len(MODELS)]
    graph, topology = traced(files[name]).graph, CLUSTERS[seed * 3 % len(CLUSTERS)]
    strategy = random_synchronized(graph, topology, rng)
    assert_trains(four, files, name, strategy, topology, rng.choice(list(OPTIMIZERS)), clip_norm=0.05, device_kind="cpu")


def test_checkpoints_fit_any_plan_and_number_of_ranks(four: Pool, files: dict[str, str], tmp_path: Path) -> None:
    """Each way goes on from the last one's: other owners, other hosts, tensor parallelism, states on hosts and back, one process."""
    graph, path = traced(files["odd"]).graph, files["odd"]
    any_way, three = cluster([1, 2], CPU), random.Random(3)
    cases = [
        Case(SHARDED),
        Case(SHARDED_STATE, hosts=(1, 1), offload=True),
        Case(ALL_REDUCE, hosts=(1,)),
        Case(SHARDED_IN_HOSTS),
        Case(STATE_IN_HOSTS, columns=True),
        Case(ALL_REDUCE, hosts=(1, 1), offload=True),
        Case(SHARDED_IN_HOSTS, columns=True, prefetch=0),
    ]
    ways = [(case.strategy(graph), case.topology) for case in cases]
    ways.insert(3, (random_synchronized(graph, any_way, three), any_way))
    assert_go_on_alike(four, path, ways, tmp_path)


def test_frozen_values_are_shared_on_each_host(four: Pool, files: dict[str, str]) -> None:
    """They come for their passes, and nothing goes back."""
    graph = traced(files["odd"]).graph
    case = Case(SHARDED_IN_HOSTS)
    plan = build_plan(graph, strategy := case.strategy(graph), case.topology)
    frozen = [sync for sync in plan.syncs if plan.is_frozen(sync)]
    assert {region.parameter for sync in frozen for region in sync.regions} == {"frozen.weight", "frozen.bias"}
    steps = [step for sync in frozen for step in method_for(sync).steps(plan, sync)]
    assert {step.phase for step in steps} == {Phase.BEFORE_FORWARD, Phase.BEFORE_BACKWARD}
    held = four.run(parts_after, files["odd"], strategy)
    size = sum(tensor.bytes for tensor in graph.parameters)
    assert sum(sum(tensor.nbytes for tensor in own.values()) for own in held) == 2 * size


def parts_after(path: str, strategy: Strategy) -> dict[int, torch.Tensor]:
    with Trainer(traced(path), (strategy, cluster([2, 2], CPU)), optimizer=OPTIMIZERS["adam"]) as trainer:
        for step in range(3):
            trainer.step(*batch_of("odd", 6, step))
        return {shard: tensor.detach().clone() for shard, tensor in trainer.shards.tensors.items()}


@pytest.mark.parametrize("sync", [SHARDED_IN_HOSTS, STATE_IN_HOSTS], ids=["values", "states"])
def test_copies_stay_equal(four: Pool, files: dict[str, str], sync: SyncConfig) -> None:
    graph = traced(files["odd"]).graph
    strategy = Case(sync).strategy(graph)
    found = four.run(parts_after, files["odd"], strategy)
    shards = build_plan(graph, strategy, cluster([2, 2], CPU)).shards
    several = [number for number, shard in enumerate(shards) if shard.trainable and len(shard.devices) > 1]
    assert len(several) > 4
    for number in several:
        first, *others = (found[device][number] for device in shards[number].devices)
        assert all(torch.equal(first, other) for other in others)


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
    case = Case(SHARDED, gpus=True)
    strategy = case.strategy(graph)
    plan = build_plan(graph, strategy, case.topology)
    frozen = sum(plan.is_frozen(sync) for sync in plan.syncs)
    groups = sum(sync.contract.owned_in_parts for sync in plan.syncs)
    for counts, types, losses in four.run(called, files["odd"], strategy, case.topology):
        assert counts == {"all_gather_into_tensor": 4 * groups, "reduce_scatter_tensor": 2 * (groups - frozen)}
        assert types == {torch.bfloat16} and losses[1] < losses[0]
    for counts, _, _ in four.run(called, files["odd"], strategy, cluster([2, 2], CPU)):
        assert not any(counts.values())
