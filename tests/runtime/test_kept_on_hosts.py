"""Plans whose operators offload what they keep train like one process in float64: copies are really made, also on a CPU."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from soap.cluster.topology import Topology
from soap.model.graph import OperatorGraph
from soap.plan.plan import Plan
from soap.profiles.roofline import RooflineCosts
from soap.runtime.program.program import compile_program
from soap.runtime.trainer import Trainer
from soap.simulator.lowering import build_plan, lower
from soap.simulator.memory.sizes import away_bytes
from soap.simulator.tasks import TaskKind
from soap.strategy.classical import CLASSICAL
from soap.strategy.config import Strategy
from soap.strategy.offloading import away, offloadable, with_offload
from soap.zoo import names
from tests.extent import FEW, often
from tests.micro_batches import in_micro_batches
from tests.runtime.cases import train
from tests.runtime.mixtures import marked
from tests.runtime.plans import random_order
from tests.runtime.pool import Pool
from tests.runtime.sparse_modules import OPTIMIZERS
from tests.runtime.sparse_plans import by_samples
from tests.runtime.test_recomputation import FOUR as LOCAL
from tests.runtime.test_sharded_state import FOUR, TWO, assert_trains, batch_of, files, in_columns, sharded
from tests.runtime.test_training import NAMED, assert_equal_to_one_process
from tests.runtime.traced import checked, traced
from tests.strategies import CPU, cases, cluster

__all__ = ["files"]  # a fixture


def mixed(graph: OperatorGraph, strategy: Strategy, draw: random.Random, recomputed: float = 0.3) -> Strategy:
    """Some operators recompute, all or but for their products, and of the others most offload."""
    again = marked(graph, strategy, draw, recomputed)
    there = [name for name in sorted(offloadable(graph)) if not again.operators[name].recompute and draw.random() < 0.8]
    return with_offload(again, there, True)


def offloading(plan: Plan, seed: int, recomputed: float = 0.3) -> Plan:
    strategy = mixed(plan.graph, plan.strategy, random.Random(seed), recomputed)
    return build_plan(plan.graph, strategy, cluster([plan.device_count], CPU))


@pytest.mark.parametrize("name", often([*NAMED], ["grids on any devices", "tied weight split in two ways"]))
def test_named_strategies_train_like_one_process(pool: Pool, name: str) -> None:
    assert_equal_to_one_process(pool.run(train, offloading(NAMED[name], len(name))))


def test_it_changes_no_bit(pool: Pool) -> None:
    plan = NAMED["tied weight split in two ways"]
    usual, there = pool.run(train, plan), pool.run(train, offloading(plan, 0, recomputed=0.0))
    for one, other in zip(usual, there, strict=True):
        assert one.losses == other.losses and one.traffic is not None and other.traffic is not None
        assert other.traffic.offloaded_bytes == other.traffic.restored_bytes > 0
        assert replace(other.traffic, offloaded_bytes=0, restored_bytes=0) == one.traffic


@given(cases(max_devices=3), st.randoms(use_true_random=False))
@settings(FEW, suppress_health_check=list(HealthCheck))
def test_random_strategies_train_like_one_process(pool: Pool, case: tuple[OperatorGraph, Topology, Strategy], rng: random.Random) -> None:
    graph, topology, strategy = case
    plan = build_plan(graph, mixed(graph, strategy, rng), topology)
    assert_equal_to_one_process(pool.run(train, plan, random_order(plan, rng)))


def test_with_parts_of_parameters_and_of_batches(four: Pool, files: dict[str, str]) -> None:
    """With Adam, clipping, sharded states, tensor-parallel shards and accumulation; and with micro-batches."""
    graph = traced(files["odd"]).graph
    split = in_columns(graph, by_samples(graph, range(4), 6), (3, 0, 2, 1))
    assert_trains(four, files, "odd", sharded(graph, mixed(graph, split, random.Random(1))), FOUR, clip_norm=0.05)
    graph = traced(files["shared"]).graph
    strategy = in_micro_batches(graph, by_samples(graph, range(2), 6), 2, random.Random(0), 2)
    assert_trains(four, files, "shared", with_offload(strategy, offloadable(graph), True), TWO)


def told(path: str, strategy: Strategy, topology: Topology) -> tuple[list[int], list[tuple[str, TaskKind]]]:
    """Of this rank the bytes that two steps have copied to the host and back, and the tasks of a traced step."""
    with Trainer(traced(path), (strategy, topology), optimizer=OPTIMIZERS["adam"]) as trainer:
        for step in range(2):
            trainer.step(*batch_of("odd", 6, step))
        found = [trainer.traffic.offloaded_bytes, trainer.traffic.restored_bytes]
        events = trainer.trace(*batch_of("odd", 6, 2))
    return found, [(event.name, event.kind) for event in events]


def test_bytes_and_tasks_are_the_planned_ones(four: Pool, files: dict[str, str]) -> None:
    """One lowering: what is simulated of offloading is what ranks do."""
    graph = traced(files["odd"]).graph
    strategy = with_offload(by_samples(graph, range(2), 6), offloadable(graph), True)
    plan = build_plan(graph, strategy, TWO)
    results = four.run(told, files["odd"], strategy, TWO, ranks=2)
    tiles = compile_program(plan).come_back_with
    planned = [sum(away_bytes(graph, plan.tiles[tile]) for tile in tiles if plan.tiles[tile].device == rank) for rank in range(2)]
    assert [copied for copied, _ in results] == [[2 * size] * 2 for size in planned] and min(planned) > 0
    simulated = {(task.name, task.kind) for task in lower(plan, TWO, RooflineCosts(TWO)).tasks if task.kind is TaskKind.COPY}
    assert len(simulated) == 2 * len(tiles) and simulated <= {event for _, events in results for event in events}


@pytest.mark.slow
@pytest.mark.parametrize("name", often(names(), ["gpt"]))
def test_zoo_models_train_like_one_process(four: Pool, name: str) -> None:
    """Under data parallelism with all runs offloaded, and with random marks."""
    spec = f"zoo:{name}:tiny"
    graph = traced(spec, "float64").graph
    usual = CLASSICAL["data_parallel"](graph, LOCAL)
    for number, strategy in enumerate((away(graph, usual), mixed(graph, usual, random.Random(name)))):
        result = four.run(checked, spec, "float64", strategy, LOCAL)[0]
        assert result.passed, (number, result.worst)
