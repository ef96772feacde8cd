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
from tests.runtime.traced import traced
from tests.simulator.test_sharded import FOUR as HOSTS
from tests.simulator.test_sharded import layers

FOUR = local_topology(4)


def test_values_come_before_second_runs_and_go_behind_backward_passes() -> None:
    graph = layers()
    plan = build_plan(graph, recomputed(graph, fsdp(graph, HOSTS), ("l2", "l3", "l4")), HOSTS)
    actions = part_of(compile_program(plan).backward, 0)
    again = [place for place, action in enumerate(actions) if action.kind is ActionKind.RECOMPUTE]
    brought = {plan.syncs[action.subject].parameter: place for place, action in enumerate(actions) if action.kind is ActionKind.BRING_BACK}
    assert len(again) >= 1
    assert all(brought[f"l{i}.weight"] < again[0] for i in (2, 3, 4) if f"l{i}.weight" in brought)


@pytest.mark.slow
def test_both_together_hold_least() -> None:
    """Of enough samples: a layer that runs again needs all of its values at once."""
    graph = traced("zoo:gpt:tiny@32", "float64").graph
    simulator = Simulator(graph, FOUR, RooflineCosts(FOUR))
    made = {"none": data_parallel(graph, FOUR), "fsdp": fsdp(graph, FOUR)}
    made |= {f"{name}+recompute": recomputed(graph, strategy) for name, strategy in made.items()}
    peaks = {name: max(simulator.run(strategy).peak_bytes) for name, strategy in made.items()}
    assert peaks["fsdp+recompute"] < min(peaks["fsdp"], peaks["none+recompute"]) < peaks["none"]
