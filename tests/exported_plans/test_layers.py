from __future__ import annotations

import soap
from soap.exported_plans.layers import Layers
from soap.model.graph import OperatorGraph


def gpt() -> OperatorGraph:
    return soap.load("zoo:gpt:tiny", plan_only=True).graph


def test_layers_are_modules_with_numbers() -> None:
    found = Layers(gpt())
    assert found.names == ("blocks.0", "blocks.1")
    assert found.of[:4] == (None, None, None, 0) and found.of[14] == 1 and found.of[-3:] == (None, None, None)
    assert Layers(soap.load("zoo:resnet50:tiny", plan_only=True).graph).names[:2] == ("stages.0", "stages.1")


def test_a_layer_is_where_most_of_its_work_is() -> None:
    """Matrices decide, whichever side of the border norms and sums are on."""
    graph = gpt()
    names = [op.name for op in graph.operators]
    border = names.index("blocks.1.up")
    found = Layers(graph).rounded([int(i >= border) for i in range(len(names))])
    assert found == tuple(int(i >= names.index("blocks.1.attention_norm")) for i in range(len(names)))
    assert Layers(graph).rounded([int(i >= names.index("norm")) for i in range(len(names))]) is None
    assert Layers(graph).rounded([0, 1, 2] + [3] * (len(names) - 3)) is None


def test_modules_of_a_chunk_are_its_layers_and_what_has_parameters() -> None:
    graph = gpt()
    chunks = [int(op.name.startswith("blocks.1") or i > 23) for i, op in enumerate(graph.operators)]
    found = Layers(graph)
    assert found.modules(chunks, 0) == ["token_embedding", "position_embedding", "blocks.0"]
    assert found.modules(chunks, 1) == ["blocks.1", "norm", "head"]
    assert found.in_chunk(chunks, 1) == [1]
