from __future__ import annotations

from soap.model.likeness import repeated_groups
from tests.graph_builder import GraphBuilder, transformer
from tests.search.toys import layers


def names(graph, groups):  # type: ignore[no-untyped-def]
    return [[graph.operators[i].name for i in group] for group in groups]


def test_equal_layers_form_one_group() -> None:
    graph = layers(3)
    assert names(graph, repeated_groups(graph)) == [["layer.0", "layer.1", "layer.2"]]


def test_layers_of_a_transformer() -> None:
    graph = transformer(layers=3)
    groups = names(graph, repeated_groups(graph))
    assert ["0.fc1", "1.fc1", "2.fc1"] in groups
    assert ["0.q", "1.q", "2.q"] in groups
    assert ["0.norm1", "1.norm1", "2.norm1"] in groups
    assert all("0.norm2" not in g or "0.norm1" not in g for g in groups)
    flat = [name for group in groups for name in group]
    assert len(set(flat)) == len(flat)
    assert "head" not in flat and "embedding" not in flat


def test_layers_of_other_shapes_stay_apart() -> None:
    g = GraphBuilder()
    x = g.input("x", 4, 8)
    for i, width in enumerate((8, 8, 16)):
        x = g.linear(x, width, name=f"block.{i}")
    graph = g.build(g.mean(x))
    assert names(graph, repeated_groups(graph)) == [["block.0", "block.1"]]


def test_names_that_differ_in_two_numbers_are_grouped_last() -> None:
    g = GraphBuilder()
    x = g.input("x", 4, 8)
    for name in ("0.add_1", "1.add_7", "2.add_9"):
        x = g.elementwise(x, name=name)
    graph = g.build(g.mean(x))
    assert names(graph, repeated_groups(graph)) == [["0.add_1", "1.add_7", "2.add_9"]]
