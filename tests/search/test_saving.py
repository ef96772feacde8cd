"""A search may share optimizer states and values unasked: where data parallelism does not fit, or starts that share are faster."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

import soap
from soap.api import SearchOutcome
from soap.cli import search_report
from soap.cluster.memory_budget import with_memory_budget
from soap.cluster.topology import Topology
from soap.errors import InfeasibleError, StrategyError
from soap.model.graph import OperatorGraph
from soap.search.allowed_space import allowed_syncs
from soap.search.options import SearchOptions
from soap.strategy.config import SyncConfig
from soap.strategy.sync import ALL_REDUCE, SAVING_MEMORY, SHARDED, SHARDED_IN_HOSTS, SHARDED_STATE, parameter_server, sync_choices
from tests.graph_builder import mlp
from tests.search.test_syncs import lookups
from tests.strategies import GPU, cluster

GRAPH, TOPOLOGY = mlp(256, (64, 256, 256, 64)), cluster([4], GPU, 1e11, 0.0)


def limited(share: float) -> Topology:
    """Devices with this share of what data parallelism needs."""
    needed = max(soap.simulate(GRAPH, TOPOLOGY, "data_parallel", costs="estimate").peak_bytes)
    return replace(TOPOLOGY, limits=(int(share * needed),) * TOPOLOGY.device_count)


def found(topology: Topology, graph: OperatorGraph = GRAPH, **options) -> SearchOutcome:  # type: ignore[no-untyped-def]
    return soap.find(graph, topology, SearchOptions(**{"budget": 100, "costs": "estimate", "risk": None, "cores": 1, **options}))


def test_all_parameters_have_the_choice_if_memory_binds_and_nothing_was_asked_for() -> None:
    graph = lookups()
    usual, saving = sync_choices(graph, TOPOLOGY), sync_choices(graph, TOPOLOGY, saving=True)
    assert usual.keys() == {"table"} and saving["table"] == (*usual["table"], *SAVING_MEMORY)
    assert saving["dense.weight"] == (ALL_REDUCE, *SAVING_MEMORY)
    asked = [parameter_server(2)]
    assert sync_choices(graph, TOPOLOGY, asked, saving=True) == sync_choices(graph, TOPOLOGY, asked)
    assert sync_choices(graph, TOPOLOGY, uncut=["dense.weight"], saving=True).keys() == {"table", "dense.bias"}
    assert allowed_syncs(graph, TOPOLOGY, SearchOptions(), saving=True) == saving


@pytest.mark.slow
def test_a_model_that_does_not_fit_gets_shared_states_unasked() -> None:
    topology = limited(0.8)
    outcome = found(topology)
    names = [start.name for start in outcome.result.starts]
    assert "zero1" in names and "megatron+zero1" in names
    usual = next(start for start in outcome.result.starts if start.name == "data_parallel")
    assert not usual.fits and outcome.result.saving_bytes == usual.overflow_bytes > 0
    chosen = [sync for sync in outcome.strategy.parameters.values() if sync in SAVING_MEMORY]
    assert outcome.simulation.fits and chosen
    document = search_report.document(outcome)
    words = sorted({sync.contract.word for sync in chosen})
    assert document["saving_memory"] == {
        "data_parallel_lacks_bytes": usual.overflow_bytes, "methods": words, "parameters": len(chosen), "of": len(GRAPH.parameters),
    }
    said = f"parameters' states or values (zero or fsdp): {len(chosen)} of {len(GRAPH.parameters)} are, by {' and '.join(words)}"
    assert said in search_report.text(outcome, document)
    assert document["search"]["memory_limit_bytes"] == list(topology.limits) == outcome.record["search"]["memory_limit_bytes"]


@pytest.mark.slow
def test_where_it_fits_and_is_no_faster_nothing_changes() -> None:
    """Links are slow, so that what moves decides, and sharing moves no less."""
    slow = cluster([4], GPU, 1e9, 1e-5)
    with_room, without = found(slow), found(slow, syncs=[ALL_REDUCE])
    assert with_room.result.rows == without.result.rows and with_room.strategy == without.strategy
    assert with_room.result.saving_bytes == 0 and "saving_memory" not in search_report.document(with_room)
    assert not {"zero1", "fsdp", "megatron+zero1"} & {start.name for start in with_room.result.starts}


@pytest.mark.slow
def test_where_it_is_faster_it_is_done_though_all_fits() -> None:
    """Links are fast, and parameters so many that their update takes longest."""
    fast = cluster([4], GPU, 1e13, 0.0)
    outcome = found(fast, mlp(4, (1024, 1024, 1024)), pins=[("*", "sample:4")])
    times = {start.name: start.cost_ns for start in outcome.result.starts}
    assert times["zero1"] < times["data_parallel"] and outcome.result.cost_ns <= min(times.values())
    assert set(outcome.result.strategy.parameters.values()) & {*SAVING_MEMORY} and outcome.result.saving_bytes == 0
    asked = found(fast, mlp(4, (1024, 1024, 1024)), pins=[("*", "sample:4")], syncs=[ALL_REDUCE])
    named = found(fast, mlp(4, (1024, 1024, 1024)), pins=[("*", "sample:4")], starts=["data_parallel"])
    assert not asked.result.strategy.parameters and not named.result.strategy.parameters


@pytest.mark.slow
def test_what_was_asked_for_is_all_that_is_allowed() -> None:
    outcome = found(limited(0.8), syncs=[ALL_REDUCE], budget=100)
    assert outcome.result.saving_bytes == 0 and not outcome.strategy.parameters and outcome.simulation.fits


@pytest.mark.slow
def test_below_what_anything_reaches_it_says_the_least_and_what_would_help() -> None:
    with pytest.raises(InfeasibleError) as refused:
        found(with_memory_budget(TOPOLOGY, "100 kB"), budget=30)
    text = str(refused.value)
    assert re.search(r"available 97.7 KiB by memory_budget, in the closest of \d+ proposals and all starts", text)
    assert "; most of that, " in text and "\n" not in text and text.endswith("(5) a larger memory_budget")
    assert found(TOPOLOGY, memory_budget="50%", budget=10).simulator.topology.limits == (GPU.memory_bytes // 2,) * 4


@pytest.mark.parametrize(("sync", "word"), [(SHARDED_STATE, "zero"), (replace(SHARDED, offload=True), "fsdp"), (SHARDED_IN_HOSTS, "hsdp")])
def test_one_device_has_nobody_to_share_with(sync: SyncConfig, word: str) -> None:
    said = f"^synchronization by {word}, on cluster 'test' of one device, which has nobody to share with: expected two devices or more; l"
    with pytest.raises(StrategyError, match=said):
        found(cluster([1]), syncs=[sync], budget=1)
