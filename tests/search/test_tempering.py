"""Searches with compiled chains: the same on any number of cores, never worse than the starts, and within memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from soap import api
from soap.errors import StrategyError
from soap.search.chains import search
from soap.search.options import SearchOptions
from soap.search.space import build_space
from soap.search.starts import reference_strategies, starting_strategies
from soap.search.tempering import ROUND, Tempering
from soap.simulator.incremental import IncrementalSimulator
from soap.strategy.json_file import dumps
from tests.search.toys import compiled_space


@pytest.mark.slow
def test_equal_seeds_give_equal_files_on_one_core_and_on_two() -> None:
    simulator = api.simulator_for("zoo:rnnlm:tiny", "p100-4x4")
    graph, topology = simulator.graph, simulator.topology
    options, texts, histories = SearchOptions(budget=8200, seed=3, starts=("data_parallel", "megatron")), [], []
    for cores in (1, 2):
        found = search(graph, topology, IncrementalSimulator(simulator), replace(options, cores=cores), polish_up_to=0)
        assert len({row.chain for row in found.rows}) == 2
        texts.append(dumps(found.strategy, graph, topology, api.SearchOutcome(simulator, found).record))
        histories.append(found.rows)
    assert texts[0] == texts[1]
    assert histories[0] == histories[1]
    assert len(histories[0]) == 8200
    assert found.cost_ns == simulator.makespan_ns(found.strategy)
    assert found.cost_ns == min(row.best_ns for row in found.rows if row.best_ns is not None)
    assert found.cost_ns < min(start.cost_ns for start in found.starts)


@pytest.mark.slow
def test_the_ladder_cools_down_to_beta_and_keeps_its_order() -> None:
    simulator = api.simulator_for("zoo:rnnlm:tiny", "p100-4x4")
    graph, topology = simulator.graph, simulator.topology
    starts = starting_strategies(graph, topology, None, None, 0)
    space = build_space(graph, topology.device_count, references=reference_strategies(graph, topology, starts.values()))
    compiled = compiled_space(space, topology, simulator.costs)
    chains = Tempering(compiled, list(starts.values())[:3], seed=1, budgets=[1000] * 3, beta=500.0)
    rounds = list(chains.rounds())
    assert len(rounds) == 1000 // ROUND
    assert sorted(chains.betas, reverse=True)[0] == 500.0
    assert len(set(chains.betas)) == 3
    for found in rounds:
        assert [own.chain for own in found] == [0, 1, 2]
        assert all(len(own.log) == ROUND for own in found)
    for chain in chains.chains:
        assert chain.best_ns == simulator.makespan_ns(chain.best)


def test_time_ends_a_search_and_nonsense_is_refused() -> None:
    simulator = api.simulator_for("zoo:rnnlm:tiny", "p100-4x4")
    arguments = simulator.graph, simulator.topology, IncrementalSimulator(simulator)
    found = search(*arguments, SearchOptions(budget=10**6, seconds=1e-9), polish_up_to=0)
    assert [start.name for start in found.starts] == ["data_parallel"] and not found.rows and not found.interrupted
    with pytest.raises(StrategyError, match="seconds 0"):
        search(*arguments, SearchOptions(budget=10, seconds=0))


@pytest.mark.slow
def test_a_cluster_of_little_memory_is_respected() -> None:
    """Devices that hold a part of the model, but not all of it."""
    simulator = api.simulator_for("zoo:rnnlm:tiny", "p100-4x4")
    whole = max(simulator.run(api.classical("single_device", simulator.graph, simulator.topology)).peak_bytes)
    devices = [replace(d, type=replace(d.type, memory_bytes=int(0.4 * whole))) for d in simulator.topology.devices]
    narrow = api.simulator_for(simulator.graph, replace(simulator.topology, devices=tuple(devices)))
    evaluator = IncrementalSimulator(narrow)
    found = search(narrow.graph, narrow.topology, evaluator, SearchOptions(budget=300, seed=0), polish_up_to=0)
    assert narrow.overflow_bytes(found.strategy) == 0
    assert any(row.accepted for row in found.rows if row.phase == "chain")


@pytest.mark.parametrize("calls", [1, 3, 200, 310])
def test_whoever_is_told_to_stop_keeps_the_best_so_far(calls: int) -> None:
    """Among the starts, in the descent, between rounds."""
    simulator = api.simulator_for("zoo:rnnlm:tiny", "p100-4x4")
    asked = []

    def stopped() -> bool:
        asked.append(True)
        return len(asked) >= calls

    found = search(simulator.graph, simulator.topology, IncrementalSimulator(simulator), SearchOptions(budget=1000), stopped=stopped)
    assert found.interrupted
    assert calls <= len(asked) < calls + 10  # chains that were under way ask once more
    accepted = [row.cost_ns for row in found.rows if row.accepted and row.cost_ns is not None]
    assert found.cost_ns == min([*accepted, *(start.cost_ns for start in found.starts)])
