"""Which parameters are compressed, and how their largest elements are found: RedSync's policy by kind of layer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Literal

from soap.model.graph import PRODUCT_KINDS, OperatorGraph
from soap.plan.compression.powersgd import LowRankLayout
from soap.strategy.compression import EXACT, Bf16, Compression, Int8, PowerSgd, Rgc, RgcAsq, Selection

LEAST_BYTES = 128 * 1024
"""Smaller parameters travel whole: RedSync compresses convolutions above 128 KB. For hidden layers it names no limit; this one is used."""


@dataclass(frozen=True, slots=True)
class Layer:
    """What a parameter is. ``output``: the model's output layer, or a table whose weight that shares."""

    kind: Literal["convolution", "hidden", "output"]
    shape: tuple[int, ...]
    element_bytes: int

    @property
    def size_bytes(self) -> int:
        """Bytes of the parameter."""
        return prod(self.shape) * self.element_bytes


def chosen(compression: Compression, layer: Layer, least_bytes: int = LEAST_BYTES) -> Compression | None:
    """How this layer is compressed under a method; None: it is not.

    Vectors (biases, normalizations) are compressed only in width. Sparse methods: a convolution by trimmed top-k; hidden and output layers
    by a threshold, sampled unless signs alternate. The output layer's values are not averaged: it gets plain RGC. A selection that the
    user names is taken for all of these.
    """
    if isinstance(compression, Bf16 | Int8):
        return compression
    if sum(length > 1 for length in layer.shape) < 2 or layer.size_bytes < least_bytes:
        return None
    if isinstance(compression, PowerSgd):
        layout = LowRankLayout.of(compression, layer.shape, layer.element_bytes, 2)
        return compression if layout.rank * (layout.rows + layout.columns) < layout.elements else None
    return suited(compression, layer)


def suited(compression: Compression, layer: Layer) -> Compression:
    """A method as it treats a layer that it compresses: with a selection; an output layer's values are not averaged."""
    if isinstance(compression, RgcAsq) and layer.kind == "output":
        compression = Rgc(density=compression.density, selection=compression.selection, ragged=compression.ragged)
    if isinstance(compression, Rgc | RgcAsq) and compression.selection == "policy":
        selection = _selection(compression, layer)
        return replace(compression, selection=selection, ragged=compression.ragged and selection not in EXACT)
    return compression


def settled(graph: OperatorGraph, parameter: str, compression: Compression) -> Compression:
    """``suited`` for a parameter of a graph."""
    return suited(compression, layer_of(graph, parameter))


def layer_of(graph: OperatorGraph, parameter: str) -> Layer:
    """What a parameter is, by the operators that use it: the output layer is the last one that multiplies by a matrix, and whatever shares
    its weight (a tied encoder)."""
    tensor, positions = graph.tensors[parameter], [position for position, _ in graph.parameter_users.get(parameter, ())]
    if _output(graph) in positions:
        return Layer("output", tensor.shape, tensor.itemsize)
    convolved = any(graph.operators[position].kind.startswith("conv") for position in positions)
    return Layer("convolution" if convolved else "hidden", tensor.shape, tensor.itemsize)


def _output(graph: OperatorGraph) -> int:
    """Position of the last operator with a matrix to multiply by; -1 if there is none."""
    for position in range(len(graph.operators) - 1, -1, -1):
        op = graph.operators[position]
        if op.kind in PRODUCT_KINDS and any(len(graph.tensors[own.tensor].shape) > 1 for own in op.parameters):
            return position
    return -1


def _selection(compression: Rgc | RgcAsq, layer: Layer) -> Selection:
    if layer.kind == "convolution":
        return "trimmed"
    return "sampled" if isinstance(compression, Rgc) else "search"
