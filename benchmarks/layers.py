"""Pipelines by layers, as people write them: every chunk has as many layers of a transformer as the others."""

from __future__ import annotations

import re

from soap.model.graph import OperatorGraph

LAYER = re.compile(r"\b(?:blocks|layers|h|layer)\.(\d+)\b")
"""A layer's number in an operator's name."""


def layer_chunks(graph: OperatorGraph, count: int) -> list[int]:
    """By operator: its chunk. Chunks begin with layers; what is before the first layer belongs to the first one, the rest to the last."""
    first: dict[int, int] = {}
    for position, op in enumerate(graph.operators):
        if (found := LAYER.search(op.name)) is not None:
            first.setdefault(int(found[1]), position)
    borders = [first[layer] for layer in first_layers(len(first), count)[1:]]
    return [sum(position >= border for border in borders) for position in range(len(graph.operators))]


def first_layers(layers: int, chunks: int) -> list[int]:
    """The first layer of each chunk."""
    return [chunk * layers // chunks for chunk in range(chunks)]
