"""Which synchronizations are searched, and that what is found is locally optimal in them, too."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from benchmarks.oracles.exhaustive import best_neighbour
from soap.cluster.topology import Topology
from soap.errors import StrategyError
from soap.model.graph import OperatorGraph
from soap.profiles.roofline import RooflineCosts
from soap.search.chains import search
from soap.search.descent import synchronize
from soap.search.options import SearchOptions
from soap.search.space import build_space
from soap.search.starts import starting_strategies
from soap.simulator.incremental import IncrementalSimulator
from soap.simulator.simulate import Simulator
from soap.strategy.classical import SYNCHRONIZED, data_parallel, fsdp
from soap.strategy.config import SyncConfig
from soap.strategy.sync import SHARDED, SPARSE_ALL_GATHER, parameter_server, partition_counts, sync_choices, usual_server
from tests.graph_builder import GraphBuilder, transformer
from tests.strategies import CPU, GPU, cluster

GATHER = SPARSE_ALL_GATHER


def lookups(batch: int = 8, rows: int = 4096, width: int = 16) -> OperatorGraph:
    """A large table of which each step touches few rows, and a small dense layer."""
    g = GraphBuilder()
    found = g.embedding(g.input("ids", batch, 1, dtype="int64"), rows, width, weight=g.parameter("table", rows, width))
    return g.build(g.mean(g.linear(found, 4, name="dense")))


def servers(*counts: int, local: bool = False, rows: bool = True) -> list[SyncConfig]:
    return [parameter_server(count, "host" if local else "none", rows=rows) for count in counts]


def test_partitions_reach_every_server_and_core() -> None:
    assert partition_counts(cluster([1, 1, 1], CPU)) == (1, 2, 4)
    assert partition_counts(cluster([1], CPU)) == (1,)
    assert partition_counts(cluster([2, 2], GPU)) == (1, 2, 4, 8)
    assert usual_server(cluster([2, 2], GPU)) == parameter_server(8, "host")
    assert usual_server(cluster([1, 1, 1], CPU)) == parameter_server(4)


def test_sparse_parameters_have_every_choice_and_dense_ones_what_is_asked() -> None:
    graph, topology = lookups(), cluster([1, 1], CPU)
    assert sync_choices(graph, topology) == {"table": (SyncConfig(), GATHER, *servers(1, 2))}
    asked = sync_choices(graph, topology, [parameter_server(3), GATHER])
    assert asked["table"] == (SyncConfig(), *servers(3), GATHER) and asked["dense.weight"] == (SyncConfig(), *servers(3, rows=False))
    assert sync_choices(graph, topology, [SyncConfig()]) == {}
    assert sync_choices(transformer(), topology) == {}
    both = sync_choices(graph, cluster([2, 1], CPU))["table"]
    assert set(both) == {SyncConfig(), GATHER, *servers(1, 2), *servers(1, 2, local=True)}


@pytest.mark.slow
def test_sharded_parameters_are_searched_where_nothing_else_fits() -> None:
    """Devices have what data parallelism with sharded parameters needs, which is less than without."""
    g, usual = GraphBuilder(), cluster([4], GPU)
    x = g.input("x", 8, 128)
    for i in range(12):
        x = g.linear(x, 128, bias=False, name=f"l{i}")
    graph = g.build(g.mean(x))
    start = fsdp(graph, usual)
    most = max(Simulator(graph, usual, RooflineCosts(usual)).run(start).peak_bytes)
    devices = tuple(replace(device, type=replace(device.type, memory_bytes=most)) for device in usual.devices)
    topology = replace(usual, devices=devices)
    evaluator = IncrementalSimulator(Simulator(graph, topology, RooflineCosts(topology)))
    assert evaluator.overflow_bytes(data_parallel(graph, topology)) > 0 == evaluator.overflow_bytes(start)
    options = SearchOptions(budget=100, seed=1, syncs=[SHARDED], pins=[("l*", "sample:4")])
    found = search(graph, topology, evaluator, options)
    assert "fsdp" in {own.name for own in found.starts} and evaluator.overflow_bytes(found.strategy) == 0
    assert found.cost_ns <= evaluator.makespan_ns(start)
    assert any(sync == SHARDED for sync in found.strategy.parameters.values())


def test_starts_synchronize_as_is_allowed() -> None:
    graph, topology = lookups(), cluster([1, 1], CPU)
    usual = starting_strategies(graph, topology, None, None, 0, sync_choices(graph, topology))
    assert {"hybrid", "sparse_allgather"} <= set(usual) and "parameter_server" not in usual
    assert dict(usual["hybrid"].parameters) == {"table": parameter_server(2, rows=True)}
    assert dict(usual["sparse_allgather"].parameters) == {"table": GATHER}
    assert usual["hybrid"].operators == data_parallel(graph, topology).operators
    assert set(SYNCHRONIZED["parameter_server"](graph, topology).parameters) == {"table", "dense.weight", "dense.bias"}
    asked = sync_choices(graph, topology, servers(2))
    assert "parameter_server" in starting_strategies(graph, topology, None, None, 0, asked)
    dense = transformer()
    assert not set(SYNCHRONIZED) & set(starting_strategies(dense, topology, None, None, 0, sync_choices(dense, topology)))
    with pytest.raises(StrategyError, match=r"expected one of single_device, .*, zero1, fsdp, .*recompute, pipeline, ralp; .*; or random"):
        starting_strategies(dense, topology, ["gossip"], None, 0)


def test_moves_change_what_has_a_choice() -> None:
    graph, topology = lookups(), cluster([1, 1], CPU)
    space = build_space(graph, 2, syncs=sync_choices(graph, topology))
    strategy, rng = data_parallel(graph, topology), random.Random(0)
    larger = [synchronize(rng, space, strategy) for _ in range(50)]
    assert {p.strategy.sync("table") for p in larger if p is not None} == set(space.syncs["table"]) - {SyncConfig()}


@pytest.mark.parametrize("topology", [cluster([2, 2], CPU, 1e8), cluster([2, 2], GPU, 1e8)], ids=["cpu", "gpu"])
def test_a_search_is_locally_optimal_in_synchronizations(topology: Topology) -> None:
    graph = lookups()
    simulator = Simulator(graph, topology, RooflineCosts(topology))
    found = search(graph, topology, IncrementalSimulator(simulator), SearchOptions(budget=60))
    space = build_space(graph, topology.device_count, syncs=sync_choices(graph, topology))
    assert found.cost_ns == simulator.makespan_ns(found.strategy)
    assert found.locally_optimal and best_neighbour(IncrementalSimulator(simulator), space, found.strategy) is None
    named = [make(graph, topology) for name, make in SYNCHRONIZED.items() if name != "parameter_server"]
    assert found.cost_ns <= min(map(simulator.makespan_ns, named))
    others = [simulator.makespan_ns(found.strategy.with_parameter("table", sync)) for sync in space.syncs["table"]]
    assert min(others) == found.cost_ns < max(others)


def test_rows_of_a_large_table_stay_on_servers() -> None:
    """Work for several devices, and links too slow to sum the table."""
    g = GraphBuilder()
    found = g.embedding(g.input("ids", 64, 8, dtype="int64"), 65536, 16, weight=g.parameter("table", 65536, 16))
    graph = g.build(g.mean(g.linear(g.linear(found, 2048, name="up"), 16, name="down")))
    topology = cluster([1, 1], GPU, 1e9)
    simulator = Simulator(graph, topology, RooflineCosts(topology))
    usual, hybrid = (simulator.makespan_ns(make(graph, topology)) for make in (data_parallel, SYNCHRONIZED["hybrid"]))
    assert 2 * hybrid < usual
