"""Expert parallelism: which devices have which experts, what travels to them and back, and what is left to data parallelism."""

from __future__ import annotations

import pytest
from hypothesis import given

from soap.cluster.topology import Topology
from soap.model.graph import DimMap, Factor, OperatorGraph
from soap.plan.planning import build_plan
from soap.strategy.classical import data_parallel, expert_parallel, single_device
from soap.strategy.tensor_parallel_chains import expert_factor
from tests.graph_builder import PARAMETER, REDUCTION, SAMPLE, GraphBuilder, transformer
from tests.strategies import cluster, graphs, topologies
from tests.test_strategies import moved, shared_parameters, split

ROWS, WIDTH, INNER = 16, 8, 12


def experts(count: int = 4) -> OperatorGraph:
    """A linear layer, and two products with the matrices that each row's number names."""
    g = GraphBuilder()
    ids, x = g.input("ids", ROWS, dtype="int64"), g.linear(g.input("x", ROWS, WIDTH), WIDTH, name="first")
    for name, k, n in (("up", WIDTH, INNER), ("down", INNER, WIDTH)):
        sums = [Factor("e", count, REDUCTION, summed=True), Factor("k", k, REDUCTION, summed=True)]
        reads = [(x, [DimMap(0), DimMap(2)]), (ids, [DimMap(0)])]
        matrices = [(g.parameter(f"{name}.weight", count, k, n), [DimMap(1), DimMap(2), DimMap(3)])]
        makes = [((ROWS, n), [DimMap(0), DimMap(3)])]
        factors = [Factor("s", ROWS, SAMPLE), *sums, Factor("n", n, PARAMETER)]
        x = g.elementwise(g.operator("expert_mm", factors, reads, matrices, makes, name=name)[0], name=f"{name}.act")
    return g.build(g.mean(x))


@given(graphs(), topologies(max_devices=6))
def test_it_is_legal_and_can_be_planned(graph: OperatorGraph, topology: Topology) -> None:
    for own in (graph, experts()):
        build_plan(own, expert_parallel(own, topology), topology)


def test_rows_are_gathered_and_products_scattered() -> None:
    graph, topology = experts(), cluster([4])
    strategy = expert_parallel(graph, topology)
    found = split(graph, strategy)
    assert found["up"] == found["down"] == ({"e": 4}, (0, 1, 2, 3))
    assert found["up.act"] == ({"b": 4}, (0, 1, 2, 3)) == found["down.act"]
    plan = build_plan(graph, strategy, topology)
    assert [graph.operators[own.operator].name for own in plan.reductions if own.cells] == ["up", "down"]
    assert moved(graph, topology, strategy) == {"up": 3 * ROWS * WIDTH, "down": 3 * ROWS * INNER}
    shared = shared_parameters(graph, topology, strategy)
    assert shared["up.weight"] == shared["down.weight"] == 0 and shared["first.weight"] == WIDTH * WIDTH


@pytest.mark.parametrize(
    ("devices", "count", "degrees", "copied"),
    [
        ([2, 2], 4, {"s": 2, "e": 2}, True),  # each host has all experts
        ([4], 3, {"s": 2, "e": 2}, True),  # in groups of two
        ([6], 4, {"s": 2, "e": 3}, True),  # in groups of three, of which one device has two
        ([4], 8, {"e": 4}, False),
        ([1, 1, 1, 1], 4, {"e": 4}, False),
    ],
)
def test_groups_have_all_experts(devices: list[int], count: int, degrees: dict[str, int], copied: bool) -> None:
    graph, topology = experts(count), cluster(devices)
    strategy = expert_parallel(graph, topology)
    assert split(graph, strategy)["up"][0] == degrees
    assert (shared_parameters(graph, topology, strategy)["up.weight"] == count * WIDTH * INNER) == copied


def test_all_else_is_data_parallel() -> None:
    for graph in (transformer(), experts(1)):
        assert expert_parallel(graph, cluster([4])) == data_parallel(graph, cluster([4]))
    assert expert_parallel(experts(), cluster([1])) == single_device(experts(), cluster([1]))


def test_tables_of_vectors_are_no_experts() -> None:
    g = GraphBuilder()
    x = g.embedding(g.input("ids", 4, 1, dtype="int64"), 8, 4, name="table")
    graph = g.build(g.mean(g.linear(x, 4)))
    assert [expert_factor(graph, op) for op in graph.operators] == [None] * len(graph.operators)
    graph = experts()
    assert [op.name for op in graph.operators if expert_factor(graph, op) is not None] == ["up", "down"]
