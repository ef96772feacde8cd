from __future__ import annotations

import pytest
from hypothesis import given

from soap.model.graph import WHOLE, DimMap, Factor, OperatorGraph
from soap.strategy.tensor_parallel_chains import Chain, Dense, Table, dense, find_chains, table
from tests.graph_builder import PARAMETER, SAMPLE, GraphBuilder, convnet, mlp, transformer
from tests.strategies import graphs


def named(graph: OperatorGraph, chain: Chain) -> dict[str, str]:
    """Operator name -> name of the factor that the chain splits."""
    return {graph.operators[i].name: graph.operators[i].factors[f].name for i, f in chain.factors.items()}


def test_matrices_and_tables_are_told_apart_by_their_maps() -> None:
    graph = transformer()
    ops = {op.name: op for op in graph.operators}
    assert dense(graph, ops["0.fc1"]) == Dense(column=3, row=2, outputs=64, inputs=16)
    assert dense(graph, ops["0.q"]) == Dense(column=3, row=2, outputs=16, inputs=16)
    assert dense(graph, ops["embedding"]) is None
    assert table(graph, ops["embedding"]) == Table(factor=2, entries=64, width=16)
    assert [table(graph, ops[name]) for name in ("0.fc1", "head", "copy1", "0.norm1")] == [None] * 4
    assert [dense(graph, ops[name]) for name in ("copy1", "0.norm1", "attention7", "0.add1")] == [None] * 4


def test_convolutions_are_no_matrices() -> None:
    graph = convnet()
    assert [op.name for op in graph.operators if dense(graph, op)] == ["fc0", "fc1"]
    assert [op.name for op in graph.operators if table(graph, op)] == []


def test_matrix_whose_inner_dimension_cannot_be_split() -> None:
    """An activation fused behind a matrix product forbids partial sums; the columns can still be split."""
    g = GraphBuilder()
    x, weight = g.input("x", 4, 6), g.parameter("w", 8, 6)
    factors = [Factor("b", 4, SAMPLE), Factor("n", 8, PARAMETER)]
    outputs = [((4, 8), [DimMap(0), DimMap(1)])]
    y = g.operator("fused", factors, [(x, [DimMap(0), WHOLE])], [(weight, [DimMap(1), WHOLE])], outputs, name="fused")[0]
    graph = g.build(g.mean(g.linear(y, 5, name="fc")))
    assert dense(graph, graph.operators[0]) == Dense(column=1, row=None, outputs=8, inputs=6)
    assert [named(graph, chain) for chain in find_chains(graph)] == [{"fused": "n", "fc": "k"}]


def test_chains_of_a_transformer() -> None:
    graph = transformer(layers=1)
    first, second = find_chains(graph)
    assert named(graph, first) == {"0.q": "n", "0.k": "n", "0.v": "n", "attention7": "h", "0.proj": "k"}
    assert named(graph, second) == {"0.fc1": "n", "0.gelu": "d2", "0.fc2": "k"}
    assert [graph.operators[i].name for i in (*first.rows, *second.rows)] == ["0.proj", "0.fc2"]
    assert first.periods == second.periods == {}


def test_joint_matrix_has_three_blocks() -> None:
    graph = transformer(layers=1, joint=True)
    chain = find_chains(graph)[0]
    assert named(graph, chain) == {"0.qkv": "n", "attention5": "h", "0.proj": "k"}
    assert chain.periods == {graph.index["0.qkv"]: 3}


def test_joint_matrix_cut_by_slices() -> None:
    g = GraphBuilder()
    joint = g.linear(g.input("x", 4, 6), 16, name="joint")
    product = g.elementwise(g.slice(joint, 1, 0, 8), g.slice(joint, 1, 8, 8), name="gate")
    graph = g.build(g.mean(g.linear(product, 6, name="down")))
    (chain,) = find_chains(graph)
    assert named(graph, chain) == {"joint": "n", "slice1": "d1", "slice2": "d1", "gate": "d1", "down": "k"}
    assert chain.periods == {0: 2}
    assert [chain.width(graph, devices) for devices in (8, 4, 6, 3)] == [8, 4, 2, 1]


def test_unequal_blocks_are_no_chain() -> None:
    g = GraphBuilder()
    joint = g.linear(g.input("x", 4, 6), 12, name="joint")
    a, b = g.slice(joint, 1, 0, 8), g.slice(joint, 1, 8, 4)
    graph = g.build(g.mean(g.elementwise(g.linear(a, 6), g.linear(b, 6))))
    assert find_chains(graph) == []


def test_gated_pair_takes_in_both_matrices() -> None:
    g = GraphBuilder()
    x = g.input("x", 4, 6)
    up, gate = g.linear(x, 8, name="up"), g.linear(x, 8, name="gate")
    graph = g.build(g.mean(g.linear(g.elementwise(up, gate, name="product"), 6, name="down")))
    (chain,) = find_chains(graph)
    assert named(graph, chain) == {"up": "n", "gate": "n", "product": "d1", "down": "k"}


def test_residual_stream_is_not_dragged_into_a_chain() -> None:
    """The other operand comes from a matrix too, but its other reader needs it whole: it stays out."""
    g = GraphBuilder()
    x = g.linear(g.input("x", 4, 6), 8, name="stem")
    y = g.elementwise(g.linear(g.norm(x), 8, name="fc1"), x, name="scaled")
    graph = g.build(g.mean(g.linear(y, 6, name="fc2")))
    (chain,) = find_chains(graph)
    assert named(graph, chain) == {"fc1": "n", "scaled": "d1", "fc2": "k"}


@pytest.mark.parametrize("breaker", ["norm", "opaque", "conv", "loss"])
def test_chain_breaks_where_more_than_a_share_is_needed(breaker: str) -> None:
    g = GraphBuilder()
    x = g.linear(g.input("x", 4, 5, 6), 8, name="fc")
    match breaker:
        case "norm":
            x = g.norm(x)
        case "opaque":
            x = g.opaque(x)
        case "conv":
            x = g.conv(x, 5)
    graph = g.build(g.mean(x))
    assert find_chains(graph) == []


def test_chain_does_not_end_in_a_matrix_that_widens() -> None:
    """The partial sums of an output layer over a vocabulary would be larger than what they save."""
    same = mlp(widths=(8, 8), classes=8)
    assert [named(same, chain) for chain in find_chains(same)] == [{"fc0": "n", "act0": "d1", "head": "k"}]
    assert find_chains(mlp(widths=(8, 8), classes=9)) == []


def test_matrices_pair_up_in_order() -> None:
    graph = mlp(widths=(8, 8, 8, 8))
    assert [named(graph, chain) for chain in find_chains(graph)] == [
        {"fc0": "n", "act0": "d1", "fc1": "k"},
        {"fc2": "n", "act2": "d1", "head": "k"},
    ]


def test_width_cuts_all_members_at_the_same_borders() -> None:
    graph = transformer(layers=1, heads=4)
    attention, feed_forward = find_chains(graph)
    assert [attention.width(graph, n) for n in (1, 2, 3, 4, 6, 8)] == [1, 2, 1, 4, 2, 4]
    assert [feed_forward.width(graph, n) for n in (1, 2, 3, 4, 6, 8)] == [1, 2, 3, 4, 6, 8]


@given(graphs(max_moves=8))
def test_chains_are_disjoint_and_follow_from_member_to_member(graph: OperatorGraph) -> None:
    seen: set[int] = set()
    for chain in find_chains(graph):
        assert not seen & set(chain.factors)
        seen |= set(chain.factors)
        assert chain.rows
        assert all(graph.operators[i].factors[chain.factors[i]].summed == (i in chain.rows) for i in chain.factors)
        for i in set(chain.factors) - chain.rows:
            readers = {reader for out in graph.operators[i].outputs for reader, _ in graph.consumers.get(out.tensor, ())}
            assert readers <= set(chain.factors)
