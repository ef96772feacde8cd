"""Linear layers in float8, as other trainers have them: what that does to a plan's time. Ranks of ours compute in the model's own types."""

from __future__ import annotations

from dataclasses import replace

from soap.cluster.kinds import types_of
from soap.cluster.topology import Topology
from soap.errors import ModelError, TopologyError
from soap.model.graph import NARROW, Operand, Operator, OperatorGraph

FLOAT8 = "float8_e4m3fn"
SCALINGS = {"delayed": 1, "tensorwise": 2, "mx": 1}
"""How values are scaled -> how often narrowing reads them. ``tensorwise`` (torchao's ``Float8Linear``; Transformer Engine's
``Float8CurrentScaling``) looks for the largest number first; ``delayed`` takes those of earlier steps, and ``mx`` (``MXFP8BlockScaling``)
that of each block, while they cast."""
COPIES = 2
"""Narrowed values are written by rows and by columns, for the products of the forward and of the backward pass (Transformer Engine's
``cast_transpose``; blocks of MXFP8 along either)."""
MULTIPLE = 16
"""Both dimensions of a weight must be multiples of it (torchao's and Transformer Engine's condition)."""


def in_float8(graph: OperatorGraph, topology: Topology, scaling: str) -> OperatorGraph:
    """The graph with linear layers whose three products are made of float8 numbers: those whose weights allow it, but for the last one,
    which makes scores. ``scaling``: one of ``SCALINGS``.

    Inputs and gradients are narrowed in each pass, what several layers read once; weights once a step, which counts as nothing. All else
    stays as it is: sums, gathers and updates of parameters, and memory. The graph has the same hash: its strategies are the model's.
    ModelError if there is no such layer or scaling, TopologyError if a device has no rate for float8, both in one line.
    """
    if scaling not in SCALINGS:
        raise ModelError(f"float8 scaling {scaling!r}: expected one of {', '.join(SCALINGS)}")
    for own in types_of(topology):
        if FLOAT8 not in own.flops_per_second:
            raise TopologyError(f"device type {own.name!r} has no rate for {FLOAT8}; expected one that computes in float8, such as h100")
    linear = [op for op in graph.operators if op.kind == "linear"]
    chosen = [op for op in linear[:-1] if _is_aligned(graph, op)]
    if not chosen:
        raise ModelError(f"model {graph.name!r} has no linear layer for float8; expected one before the last, of multiples of {MULTIPLE}")
    narrowed: dict[str, Operator] = {}
    read: set[tuple[Operand, ...]] = set()
    for op in chosen:
        each = SCALINGS[scaling] * (2 if op.arithmetic in NARROW else 4) + COPIES
        first = op.inputs not in read or len(op.calls) - op.views > 1  # other calls make what its product reads
        narrowed[op.name] = replace(op, arithmetic=FLOAT8, narrowing_bytes=(each * first, each))
        read.add(op.inputs)
    return replace(graph, operators=tuple(narrowed.get(op.name, op) for op in graph.operators))


def _is_aligned(graph: OperatorGraph, op: Operator) -> bool:
    shapes = [graph.tensors[operand.tensor].shape for operand in op.parameters]
    return any(len(shape) > 1 for shape in shapes) and all(size % MULTIPLE == 0 for shape in shapes for size in shape)
