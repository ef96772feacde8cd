"""What one training step consumes: samples and tokens, read off the graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from math import prod

from soap.model.dtypes import is_differentiable
from soap.model.graph import DimMap, FactorKind, Operand, Operator, OperatorGraph, TensorKind
from soap.model.regions import Interval

LOOKUP = "embedding"
BAGS = frozenset({"embedding_bag", "equal_bags"})
"""Lookups that add the rows of a bag up: the indices of a bag are features of a sample, and no sequence."""


def samples_of(graph: OperatorGraph) -> int | None:
    """Samples in a step: the most common length of the inputs' dimensions that follow a sample factor; None if there is none."""
    lengths: dict[tuple[str, int], int] = {}
    for op in graph.operators:
        for operand in op.inputs:
            tensor = graph.tensors[operand.tensor]
            if tensor.kind is TensorKind.INPUT:
                lengths.update({(tensor.name, d): size for d, size in enumerate(tensor.shape) if _is_sample(op, operand.dims[d])})
    return Counter(lengths.values()).most_common(1)[0][0] if lengths else None


def sample_factor(op: Operator) -> int | None:
    """Index of the factor along which the batch is split; None if the operator has none, or may not be split."""
    samples = [i for i, factor in enumerate(op.factors) if factor.kind is FactorKind.SAMPLE and op.partitionable]
    return min(samples, key=lambda i: (op.factors[i].size == 1, op.factors[i].summed, i), default=None)


def tokens_of(graph: OperatorGraph) -> int | None:
    """Tokens in a step: positions of the token input that has most of them; None if there is no such input.

    A token input has whole numbers, samples in one dimension and a sequence in another, and is looked up row by row in a table. Only one
    counts, because further ones often belong to the same positions (segments, position numbers, labels of a sampled softmax). So of a
    translation's source and target the longer one counts.
    """
    read: dict[tuple[str, str], list[Interval]] = {}  # input and table -> what lookups in it read of each of the input's dimensions
    rest: dict[str, list[int]] = {}  # input -> its dimensions without samples
    for op, table, operand in _lookups(graph):
        tensor = graph.tensors[operand.tensor]
        if tensor.kind is not TensorKind.INPUT or is_differentiable(tensor.dtype) or tensor.dtype == "bool":
            continue
        others = [d for d, dim in enumerate(operand.dims) if not _is_sample(op, dim)]
        if len(others) < len(operand.dims):
            rest[tensor.name] = others
            box = operand.box([(0, factor.size) for factor in op.factors], tensor.shape)
            known = read.get((tensor.name, table), box)
            read[tensor.name, table] = [(min(a, c), max(b, d)) for (a, b), (c, d) in zip(known, box, strict=True)]
    lengths = {key: [stop - start for start, stop in box] for key, box in read.items()}
    return max((prod(own) for (name, _), own in lengths.items() if any(own[d] > 1 for d in rest[name])), default=None)


def _lookups(graph: OperatorGraph) -> Iterator[tuple[Operator, str, Operand]]:
    """(operator, its table, operand with indices) of lookups of single rows. Other inputs fused into an embedding come with them."""
    for op in graph.operators:
        if op.kind == LOOKUP and op.parameters:
            yield from ((op, op.parameters[0].tensor, operand) for operand in op.inputs)
    for name, access in graph.sparse.items():
        for lookup in access.lookups:
            op = graph.operators[lookup.operator]
            if op.kind != LOOKUP and op.kind not in BAGS:
                yield from ((op, name, op.inputs[place]) for place in lookup.inputs)


def _is_sample(op: Operator, dim: DimMap) -> bool:
    return dim.factor is not None and op.factors[dim.factor].kind is FactorKind.SAMPLE


def sample_dims(graph: OperatorGraph, *, own_labels: bool = False) -> dict[str, int]:
    """By input, its dimension of samples; inputs that are not divided among samples are left out. ``own_labels``: of labels that a mean
    counts, too, of which each tile reads its own if it is told what to divide by (``Operator.own_inputs``)."""
    found: dict[str, int] = {}
    for op in graph.operators:
        for operand in (*(op.own_inputs if own_labels else ()), *op.inputs):
            if graph.tensors[operand.tensor].kind is TensorKind.INPUT:
                own = [d for d, dim in enumerate(operand.dims) if _is_sample(op, dim)]
                found |= {operand.tensor: own[0]} if own else {}
    return found
