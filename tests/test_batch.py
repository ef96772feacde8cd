"""Samples and tokens of a step, read off the graph."""

from __future__ import annotations

import pytest

import soap
from soap.model.batch import samples_of, tokens_of
from soap.model.graph import WHOLE, DimMap, OperatorGraph
from tests.extent import every
from tests.graph_builder import SAMPLE, Factor, GraphBuilder, convnet, transformer

ZOO = [
    ("zoo:gpt:tiny", 8, 8 * 12),
    ("zoo:gpt:tiny@3", 3, 3 * 12),
    ("zoo:rnnlm:tiny", 8, 8 * 6),
    ("zoo:nmt:tiny", 8, 8 * 8),  # of 7 source and 8 target steps, read in chunks
    ("zoo:dlrm:tiny", 8, None),  # columns of one input, one for each table
    ("zoo:alexnet:tiny", 8, None),
    ("zoo:lm1b:tiny", 8, 8 * 4),  # labels are looked up as well
    ("zoo:nmt_gnmt:tiny", 8, 8 * 4),  # of 4 source and 3 target steps
    ("zoo:rnntc:tiny", 8, 8 * 7),  # the last chunk has one step
    ("zoo:full_sparse:tiny", 8, None),  # bags of features
]


@pytest.mark.parametrize(("model", "samples", "tokens"), every(3, ZOO))
def test_models_of_the_zoo(model: str, samples: int, tokens: int | None) -> None:
    graph = soap.load(model, plan_only=True).graph
    assert (samples_of(graph), tokens_of(graph)) == (samples, tokens)


def test_graphs_by_hand() -> None:
    assert (samples_of(transformer(batch=6, length=5)), tokens_of(transformer(batch=6, length=5))) == (6, 30)
    assert (samples_of(convnet(batch=4)), tokens_of(convnet(batch=4))) == (4, None)


def test_segments_and_masks_of_the_same_positions_count_once() -> None:
    g = GraphBuilder()
    ids, kinds = (g.input(name, 4, 6, dtype="int64") for name in ("ids", "kinds"))
    both = g.elementwise(g.embedding(ids, 50, 8), g.embedding(kinds, 2, 8))
    assert tokens_of(g.build(g.mean(both))) == 24


def test_of_a_source_and_a_target_the_longer_one_counts() -> None:
    g = GraphBuilder()
    source, target = g.input("source", 4, 9, dtype="int64"), g.input("target", 4, 6, dtype="int64")
    rows = g.attention(g.embedding(target, 50, 8), g.embedding(source, 50, 8), g.embedding(source, 50, 8, name="values"), 2)
    assert tokens_of(g.build(g.mean(rows))) == 36


def test_chunks_of_one_input_add_up_but_columns_for_tables_of_their_own_do_not() -> None:
    for shared, tokens in ((True, 4 * 5), (False, None)):
        g = GraphBuilder()
        ids = g.input("ids", 4, 5, dtype="int64")
        table = g.parameter("table", 50, 8)
        parts = []
        for at in range(5):
            factors, own = [Factor("b", 4, SAMPLE)], table if shared else g.parameter(f"table{at}", 50, 8)
            reads, rows = [(ids, [DimMap(0), DimMap(None, 0, at, at + 1)])], [(own, [WHOLE, WHOLE])]
            parts += g.operator("embedding", factors, reads, rows, [((4, 8), [DimMap(0), WHOLE])])
        assert tokens_of(g.build(g.mean(g.elementwise(*parts)))) == tokens


def test_one_index_for_each_sample_is_no_token() -> None:
    g = GraphBuilder()
    assert tokens_of(g.build(g.mean(g.embedding(g.input("user", 16, dtype="int64"), 50, 8)))) is None


def test_bags_of_features_and_numbers_are_no_tokens() -> None:
    g = GraphBuilder()
    table, bags = g.parameter("table", 50, 8), g.input("bags", 4, 3, dtype="int64")
    factors = [Factor("b", 4, SAMPLE)]
    out = g.operator("equal_bags", factors, [(bags, [DimMap(0), WHOLE])], [(table, [WHOLE, WHOLE])], [((4, 8), [DimMap(0), WHOLE])])[0]
    assert tokens_of(g.build(g.mean(out))) is None
    g = GraphBuilder()
    assert tokens_of(g.build(g.mean(g.linear(g.input("x", 4, 6, 8), 3)))) is None


def test_a_model_without_samples() -> None:
    g = GraphBuilder()
    graph: OperatorGraph = g.build(g.opaque(g.opaque(g.input("x", 4))))
    assert samples_of(graph) is None
