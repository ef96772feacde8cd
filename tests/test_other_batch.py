"""A graph with another number of samples is the one that an export with so many would have given."""

from __future__ import annotations

from dataclasses import replace

import pytest

from soap.api.models import graph_of
from soap.model.graph import DimMap, Factor, FactorKind, OperatorGraph
from soap.model.other_batch import with_samples
from tests.graph_builder import WHOLE, GraphBuilder, transformer


@pytest.mark.parametrize("batch", [4, 12, 24])
def test_a_transformer_of_other_samples_is_as_built_with_these(batch: int) -> None:
    found, built = with_samples(transformer(batch=12), batch), transformer(batch=batch)
    assert not isinstance(found, str)
    bare = [[replace(op, saved_bytes=0) for op in graph.operators] for graph in (found, built)]
    assert bare[0] == bare[1] and found.tensors == built.tensors and found.footprints == built.footprints
    assert all(abs(one.saved_bytes - other.saved_bytes) <= 4 for one, other in zip(found.operators, built.operators, strict=True))


def compared(name: str, batch: int, other: int) -> tuple[OperatorGraph, OperatorGraph]:
    found = with_samples(graph_of(f"zoo:{name}@{batch}"), other)
    assert not isinstance(found, str), found
    return found, graph_of(f"zoo:{name}@{other}")


@pytest.mark.parametrize("name", ["gpt:tiny", "nmt:tiny", "alexnet:tiny", "rnnlm:tiny"])
def test_a_model_of_other_samples_is_as_exported_with_these(name: str) -> None:
    found, exported = compared(name, 8, 16)
    for one, other in zip(found.operators, exported.operators, strict=True):
        assert (one.factors, one.inputs, one.outputs, one.flops) == (other.factors, other.inputs, other.outputs, other.flops), one.name
    assert dict(found.tensors) == dict(exported.tensors)


def test_memory_of_whole_operators_follows_the_samples() -> None:
    found, exported = compared("gpt:tiny", 8, 16)
    for name, own in found.footprints.items():
        pairs = zip(own[0].sizes_bytes, exported.footprints[name][0].sizes_bytes, strict=True)
        assert all(abs(one - other) <= 8 for one, other in pairs), name  # a loss adds up a few numbers that do not


def test_what_mixes_samples_is_refused() -> None:
    g = GraphBuilder("mixing")
    x = g.input("x", 8, 4)
    y = g.linear(x, 4)
    mixed = g.operator("mixes", [Factor("d", 4, FactorKind.ATTRIBUTE)], [(y, [WHOLE, DimMap(0)])], [], [((8, 4), [WHOLE, DimMap(0)])])
    graph = g.build(g.mean(mixed[0]))
    assert "does not follow the samples" in str(with_samples(graph, 4))
