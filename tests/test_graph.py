from __future__ import annotations

import pickle
from dataclasses import replace

import pytest
from hypothesis import given

from soap.errors import ModelError
from soap.model.graph import WHOLE, DimMap, Factor, FactorKind, Operand, OperatorGraph, Tensor, TensorKind
from tests.graph_builder import GraphBuilder, mlp, transformer
from tests.strategies import graphs


def test_factor_has_at_least_one_element() -> None:
    with pytest.raises(ModelError, match=r"^factor 'b' has size 0; expected at least 1: export with non-empty inputs$"):
        Factor("b", 0, FactorKind.SAMPLE)


@pytest.mark.parametrize(
    ("dim", "tile", "size", "expected"),
    [
        (WHOLE, (1, 2), 9, (0, 9)),
        (DimMap(0), (1, 3), 9, (1, 3)),
        (DimMap(0, scale=4, lo=0, hi=4), (1, 3), 12, (4, 12)),  # heads in a joint dimension
        (DimMap(0, scale=1, lo=-1, hi=2), (0, 4), 8, (0, 5)),  # window of 3, padding 1: clipped at the border
        (DimMap(0, scale=1, lo=-1, hi=2), (4, 8), 8, (3, 8)),
        (DimMap(0, scale=2, lo=-3, hi=4), (1, 3), 16, (0, 8)),  # window of 7, stride 2, padding 3
        (DimMap(0, lo=5, hi=6), (0, 2), 9, (5, 7)),  # slice from 5
        (DimMap(0, lo=-4, hi=-3), (3, 6), 9, (0, 2)),  # second part of a concatenation
        (DimMap(0, lo=-4, hi=-3), (0, 3), 9, (0, 0)),  # … which this tile does not meet
        (DimMap(0, lo=5, hi=6), (5, 8), 9, (9, 9)),  # beyond the end: empty
    ],
)
def test_interval_of_a_tile(dim: DimMap, tile: tuple[int, int], size: int, expected: tuple[int, int]) -> None:
    assert dim.interval((tile,), size) == expected


def test_exact_maps_have_no_halo_and_no_offset() -> None:
    assert DimMap(0).exact
    assert DimMap(0, 4, 0, 4).exact
    assert not any(dim.exact for dim in (WHOLE, DimMap(0, 1, -1, 2), DimMap(0, 1, 1, 2), DimMap(0, 2, 0, 1)))


def test_operand_box_follows_each_dimension() -> None:
    operand = Operand("x", (DimMap(1), WHOLE, DimMap(0, 2, 0, 2)))
    assert operand.box(((1, 2), (0, 3)), (6, 5, 8)) == ((0, 3), (0, 5), (2, 4))
    assert Operand("loss", ()).box(((0, 1), (0, 1)), ()) == ()


def test_tensor_size() -> None:
    assert Tensor("x", (3, 4), "float32", 4, TensorKind.INPUT).bytes == 48
    assert Tensor("loss", (), "float64", 8, TensorKind.ACTIVATION).bytes == 8


def test_operator_knows_its_factors() -> None:
    op = mlp().operators[0]
    assert op.summed == (1,)
    assert [factor.name for factor in op.factors] == ["b", "k", "n"]


def test_graph_tables() -> None:
    graph = transformer(layers=1)
    assert [op.name for op in graph.operators][:4] == ["embedding", "copy1", "add_positions", "0.norm1"]
    assert graph.index["0.norm1"] == 3
    assert graph.producers["0.norm1"] == (3, 0)
    assert graph.consumers["0.norm1"] == ((4, 0), (5, 0), (6, 0))
    assert "cross_entropy17" not in graph.consumers
    assert graph.parameter_users["embedding.weight"] == ((0, 0), (16, 0))
    assert [t.name for t in graph.parameters][:3] == ["positions", "embedding.weight", "0.norm1.weight"]
    assert len(graph.parameters) == len(graph.parameter_users)


def test_one_operator_may_read_a_tensor_twice_and_write_several() -> None:
    g = GraphBuilder()
    x = g.linear(g.input("x", 4, 6), 6, name="fc")
    parts = g.chunk(g.elementwise(x, x, name="square"), 1, 2)
    graph = g.build(g.mean(g.concat(parts[1], parts[0], 1)))
    assert graph.consumers["fc"] == ((1, 0), (1, 1))
    assert [graph.producers[part] for part in parts] == [(2, 0), (2, 1)]
    assert [graph.shape for graph in (g.tensors[part] for part in parts)] == [(4, 2), (4, 4)]


def test_gradients_flow_from_parameters() -> None:
    g = GraphBuilder()
    x = g.elementwise(g.input("x", 4, 6), name="scale")
    weight = g.parameter("frozen", 3, 6, frozen=True)
    y = g.linear(x, 3, weight=weight, bias=False, name="fixed")
    graph = g.build(g.mean(g.linear(y, 3, name="fc"), name="loss"))
    assert [graph.needs_backward(op) for op in graph.operators] == [False, False, True, True]


def test_malformed_graphs_are_refused() -> None:
    graph = mlp()
    first, *rest = graph.operators
    with pytest.raises(ModelError, match="operator name 'fc0' occurs twice; expected unique names"):
        OperatorGraph("m", (first, *rest, first), graph.tensors, graph.loss)
    with pytest.raises(ModelError, match="operator 'act0' reads 'fc0' before it is produced"):
        OperatorGraph("m", tuple(rest), graph.tensors, graph.loss)
    with pytest.raises(ModelError, match="loss 'nothing' is produced by no operator"):
        OperatorGraph("m", graph.operators, graph.tensors, "nothing")


def test_hash_is_the_structure() -> None:
    graph = mlp()
    assert len(graph.hash) == 16
    assert int(graph.hash, 16) >= 0
    assert mlp().hash == graph.hash
    assert replace(graph, name="other").hash == graph.hash
    assert mlp(batch=4).hash != graph.hash
    renamed = (replace(graph.operators[0], name="other"), *graph.operators[1:])
    assert replace(graph, operators=renamed).hash != graph.hash


def test_gradients_flow_to_what_the_loss_depends_on() -> None:
    g = GraphBuilder()
    frozen = g.linear(g.input("x", 4, 6), 6, weight=g.parameter("frozen", 6, 6, frozen=True), bias=False, name="a")
    x = g.linear(frozen, 6, bias=False, name="b")
    g.linear(x, 6, bias=False, name="aside")
    graph = g.build(g.mean(g.elementwise(x, name="c")))
    assert [graph.operators[position].name for position in sorted(graph.backward_operators)] == ["b", "c", graph.operators[-1].name]


@given(graphs())
def test_random_graphs_are_consistent(graph: OperatorGraph) -> None:
    assert pickle.loads(pickle.dumps(graph)) == graph
    assert graph.tensors[graph.loss].shape == ()
    assert graph.needs_backward(graph.operators[graph.producers[graph.loss][0]])
    for op in graph.operators:
        whole = tuple((0, factor.size) for factor in op.factors)
        for output in op.outputs:
            shape = graph.tensors[output.tensor].shape
            assert output.box(whole, shape) == tuple((0, size) for size in shape)
        for operand in (*op.inputs, *op.parameters):
            assert len(operand.dims) == len(graph.tensors[operand.tensor].shape)
