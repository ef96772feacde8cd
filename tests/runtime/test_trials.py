"""Strategies that take turns on real ranks (``soap-search --verify``)."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from soap import api
from soap.cli.training import Job
from soap.cli.trials import DUELS, ROUNDS, Times, Trial, run_trial
from soap.cluster.presets import local_topology
from soap.simulator.reference import execution_order
from tests.runtime.pool import Pool

MODEL = "zoo:rnnlm:tiny"


def tried(names: Sequence[str], to_beat: bool, seconds: float) -> Times:
    topology = local_topology(3)
    simulator = api.simulator_for(MODEL, topology, costs="estimate")
    strategies = {name: api.classical(name, simulator.graph, topology) for name in names}
    runs = {name: simulator.run(strategy) for name, strategy in strategies.items()}
    ordered = {name: (strategies[name], execution_order(run.tasks, run.schedule)) for name, run in runs.items()}
    reading = {"batch_dims": None, "autocast": None, "batch_norm": "global"}
    job = Job(MODEL, reading, topology, ordered, steps=1, seed=0, optimizer="adam", backend="gloo")  # type: ignore[arg-type]
    return run_trial(Trial(job, to_beat, seconds))


@pytest.mark.long
def test_all_ranks_see_the_same_turns_and_decide_alike(pool: Pool) -> None:
    names = ["data_parallel", "megatron", "single_device"]
    first, *others = pool.run(tried, names, True, 1e6)
    assert others == [first, first]
    assert {name: len(own) for name, own in first.rounds.items()} == dict.fromkeys(names, ROUNDS)
    assert min(min(own) for own in first.rounds.values()) > 0
    assert {len(own) for own in first.duels.values()} <= {DUELS} and len(first.duels) in (0, 2)
    first, *others = pool.run(tried, names, False, 0.0)  # no time: two strategies, a turn of each
    assert others == [first, first] and first.duels == {}
    assert {name: len(own) for name, own in first.rounds.items()} == dict.fromkeys(names[:2], 1)
