"""Plans that gather parameters for their uses and recompute operators: in which order, and what they hold."""

from __future__ import annotations

import pytest

from soap.cluster.presets import local_topology
from soap.profiles.roofline import RooflineCosts
from soap.runtime.program.actions import ActionKind, part_of
from soap.runtime.program.program import compile_program
from soap.simulator.lowering import build_plan
from soap.simulator.simulate import Simulator
from soap.strategy.classical import data_parallel, fsdp
from soap.strategy.recomputation import recomputed
from tests.runtime.cases import train
from tests.runtime.pool import Pool
from tests.runtime.test_training import assert_equal_to_one_process
from tests.runtime.traced import traced
from tests.simulator.test_sharded import FOUR as HOSTS
from tests.simulator.test_sharded import layers
from tests.simulator.test_sharded_recomputation import crossing
from tests.strategies import cluster

FOUR = local_topology(4)


def test_values_come_before_second_runs_and_go_behind_backward_passes() -> None:
    graph = layers()
    plan = build_plan(graph, recomputed(graph, fsdp(graph, HOSTS), ("l2", "l3", "l4")), HOSTS)
    actions = part_of(compile_program(plan).backward, 0)
    again = [place for place, action in enumerate(actions) if action.kind is ActionKind.RECOMPUTE]
    brought = {plan.syncs[action.subject].parameter: place for place, action in enumerate(actions) if action.kind is ActionKind.BRING_BACK}
    assert len(again) >= 1
    assert all(brought[f"l{i}.weight"] < again[0] for i in (2, 3, 4) if f"l{i}.weight" in brought)


@pytest.mark.parametrize("count", [2, 3])
def test_second_runs_that_are_read_behind_a_barrier_train_like_one_process(pool: Pool, count: int) -> None:
    """All micro-batches run again before any goes back in front of the barrier: each has its values by then, and keeps them."""
    two = cluster([2])
    graph, strategy = crossing(two, count, "n0", "n1", "after", prefetch=0)
    plan = build_plan(graph, strategy, two)
    program = compile_program(plan)
    actions = part_of(program.interleaved, 0)
    brought = {action.subject: place for place, action in enumerate(actions) if action.kind is ActionKind.BRING_BACK}
    norms = {number for number, sync in enumerate(plan.syncs) if sync.parameter.startswith("n")}
    again = [
        place
        for place, action in enumerate(actions)
        if action.kind is ActionKind.RECOMPUTE and plan.operator(plan.tiles[program.segments[action.subject].tiles[0]]).name.startswith("n")
    ]
    assert len(again) >= count and norms and all(number in brought for number in norms)
    for number in norms:
        uses = {tile for tile, _ in plan.syncs[number].uses}
        segments = {program.segment_of[tile] for tile in uses if plan.tiles[tile].device == 0}
        assert brought[number] < min(place for place in again if actions[place].subject in segments)
    assert_equal_to_one_process(pool.run(train, plan))


@pytest.mark.slow
def test_both_together_hold_least() -> None:
    """Of enough samples: a layer that runs again needs all of its values at once."""
    graph = traced("zoo:gpt:tiny@32", "float64").graph
    simulator = Simulator(graph, FOUR, RooflineCosts(FOUR))
    made = {"none": data_parallel(graph, FOUR), "fsdp": fsdp(graph, FOUR)}
    made |= {f"{name}+recompute": recomputed(graph, strategy) for name, strategy in made.items()}
    peaks = {name: max(simulator.run(strategy).peak_bytes) for name, strategy in made.items()}
    assert peaks["fsdp+recompute"] < min(peaks["fsdp"], peaks["none+recompute"]) < peaks["none"]
