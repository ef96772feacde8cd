"""A method that only tests know: its plan alone makes the engine play it, search with it and bound its memory."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from soap.plan.syncs.seam import method_for
from soap.profiles.roofline import RooflineCosts
from soap.simulator.lowering import build_plan, lower
from soap.simulator.memory.sweep import memory_over_time
from soap.simulator.reference import simulate
from soap.simulator.simulate import Simulator
from soap.strategy.classical import data_parallel, random_config, random_strategy
from soap.strategy.config import SyncConfig
from tests.simulator.compiled.walks import Edit, check
from tests.simulator.reference_memory.any_order import peak_bytes
from tests.simulator.test_sync_methods import GRAPH, clusters
from tests.simulator.two_step import registered

NAMES = [tensor.name for tensor in GRAPH.parameters]


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    with registered():
        yield


def methods() -> tuple[SyncConfig, ...]:
    return tuple(SyncConfig(payload="two steps", within=within, offload=away) for within in ("none", "host") for away in (False, True))


def test_its_steps_are_those_of_its_template() -> None:
    topology = clusters()[0]
    strategy = data_parallel(GRAPH, topology).with_changes(parameters=dict.fromkeys(NAMES, methods()[2]))
    plan = build_plan(GRAPH, strategy, topology)
    tasks = {task.name: task for task in lower(plan, topology, RooflineCosts(topology)).tasks}
    for sync in plan.syncs:
        collect, own, spread = method_for(sync).steps(plan, sync)
        assert [tasks[step.name].bytes for step in (collect, own, spread)] == [2 * own.summed_bytes] * 3
        assert own.among == (0, 2) and [flows for flows, _ in collect.rounds] == [((1, 0, own.summed_bytes), (3, 2, own.summed_bytes))]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_delta_full_and_reference_are_equal(seed: int) -> None:
    for number, topology in enumerate(clusters()):
        rng = random.Random(f"{seed} {number}")
        strategy = random_strategy(GRAPH, topology, rng).with_changes(parameters={name: rng.choice(methods()) for name in NAMES})
        edits = []
        for _ in range(6):
            op = rng.choice(GRAPH.operators)
            configs = {op.name: random_config(op, topology.device_count, rng)}
            edits.append(Edit(configs, {rng.choice(NAMES): rng.choice((SyncConfig(), *methods()))}, rng.random() < 0.6))
        check((GRAPH, topology, strategy, edits), afresh=True)


def test_memory_is_never_under() -> None:
    for number, topology in enumerate(clusters()):
        rng = random.Random(number)
        strategy = random_strategy(GRAPH, topology, rng).with_changes(parameters={name: rng.choice(methods()) for name in NAMES})
        simulation = Simulator(GRAPH, topology, RooflineCosts(topology)).run(strategy)
        curves = memory_over_time(simulation.tasks, simulate(simulation.tasks))
        assert all(curve.peak_bytes <= most for curve, most in zip(curves, peak_bytes(simulation.plan), strict=True))
