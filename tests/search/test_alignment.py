from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from soap.model.graph import OperatorGraph
from soap.search.alignment import Edge, aligned_with, edges_of
from soap.strategy.config import OpConfig, check_config
from tests.extent import FEW
from tests.graph_builder import mlp
from tests.search.toys import aligned_configs
from tests.strategies import graphs, strategies_for


def edge_between(graph: OperatorGraph, operator: str, neighbour: str) -> Edge:
    j = graph.index[neighbour]
    return next(edge for edge in edges_of(graph)[graph.index[operator]] if edge.neighbour == j)


def test_edges_match_the_factors_of_shared_dimensions() -> None:
    graph = mlp()
    assert [(op.name, [f.name for f in op.factors]) for op in graph.operators[:2]] == [("fc0", ["b", "k", "n"]), ("act0", ["b", "d1"])]
    assert edges_of(graph)[1] == (Edge(0, ((0, 0), (2, 1))), Edge(2, ((0, 0), (1, 1))))


def test_shared_dimensions_are_split_alike() -> None:
    graph = mlp()
    source = OpConfig((2, 1, 2), (3, 2, 1, 0))
    configs = aligned_with(graph, source, 1, edge_between(graph, "act0", "fc0"))
    assert configs[0] == OpConfig((2, 2), (3, 2, 1, 0))


def test_axes_that_are_not_shared_are_replicated_dropped_or_moved() -> None:
    graph = mlp()
    source = OpConfig((2, 2, 1), (0, 1, 2, 3))
    configs = aligned_with(graph, source, 1, edge_between(graph, "act0", "fc0"))
    assert configs[:3] == [OpConfig((2, 1), (0, 2, 1, 3), 2), OpConfig((2, 1), (0, 2)), OpConfig((2, 2), (0, 1, 2, 3))]
    assert OpConfig((1, 4), (0, 1, 2, 3)) in configs[3:]


def test_all_devices_may_go_to_one_axis() -> None:
    graph = mlp()
    source = OpConfig((4, 1), (0, 1, 2, 3))
    configs = aligned_with(graph, source, 2, edge_between(graph, "fc1", "act0"))
    assert OpConfig((1, 1, 4), (0, 1, 2, 3)) in configs
    assert OpConfig((1, 1, 1), (0, 1, 2, 3), 4) in configs


@given(st.data())
@FEW
def test_aligned_configurations_are_legal_and_ignore_the_operators_own(data: st.DataObject) -> None:
    graph = data.draw(graphs())
    strategy = data.draw(strategies_for(graph, 4))
    edges = edges_of(graph)
    for i, op in enumerate(graph.operators):
        configs = aligned_configs(graph, strategy, i, edges[i])
        for config in configs:
            check_config(op, config, 4)
        other = strategy.with_operator(op.name, OpConfig((1,) * len(op.factors), (3,)))
        assert aligned_configs(graph, other, i, edges[i]) == configs
