"""Splitting sequences: which factor of an operator follows the dimension along which its inputs are split, and context parallelism.

In context parallelism the devices of a group share the positions of each sample's sequence. Everything follows its own positions; only
attention gathers keys and values, because each position looks at all others (as Llama 3 does it: Grattafiori et al. 2024, section 3.3.2).
"""

from __future__ import annotations

from collections import Counter
from math import prod

from soap.cluster.topology import Topology
from soap.model.graph import FactorKind, Operand, Operator, OperatorGraph, TensorKind
from soap.strategy.config import OpConfig, Strategy, settled
from soap.strategy.grids import device_order, fill, grouped, tensor_parallel_width


class SequenceSplits:
    """Along which dimension tensors are split in ``width`` parts inside groups of devices. It is told operator by operator, in order."""

    def __init__(self, graph: OperatorGraph, width: int) -> None:
        self._graph, self._width = graph, width
        self._dimensions: dict[str, int] = {}

    def following(self, op: Operator) -> int | None:
        """The factor that follows most elements of the inputs that are split; None if it has none that can be split."""
        found: Counter[int] = Counter()
        for operand in op.inputs:
            dimension = self._dimensions.get(operand.tensor)
            factor = None if dimension is None else operand.dims[dimension].factor
            if factor is not None and self._is_sequence(op, factor):
                found[factor] += prod(self._graph.tensors[operand.tensor].shape)
        return max(found, key=lambda factor: (found[factor], -factor), default=None)

    def beginning(self, op: Operator) -> int | None:
        """The longest factor along which an operator that reads nothing but the model's inputs and constants can be split."""
        if any(self._graph.tensors[operand.tensor].kind is TensorKind.ACTIVATION for operand in op.inputs):
            return None
        return self._longest(op, op.inputs)

    def scattered(self, op: Operator) -> None:
        """The outputs of this operator are wanted in parts, along their longest dimension that is one of a sequence."""
        factor = self._longest(op, op.outputs)
        if factor is not None:
            self.split(op, factor)

    def split(self, op: Operator, factor: int) -> None:
        """The operator is split along this factor."""
        for output in op.outputs:
            dimension = next((d for d, dim in enumerate(output.dims) if dim.factor == factor), None)
            if dimension is not None:
                self._dimensions[output.tensor] = dimension

    def _longest(self, op: Operator, operands: tuple[Operand, ...]) -> int | None:
        factors = {dim.factor for operand in operands for dim in operand.dims if dim.factor is not None}
        found = [factor for factor in factors if self._is_sequence(op, factor) and not op.factors[factor].summed]
        return max(found, key=lambda factor: (op.factors[factor].size, -factor), default=None)

    def _is_sequence(self, op: Operator, factor: int) -> bool:
        own = op.factors[factor]
        return op.partitionable and own.kind is FactorKind.ATTRIBUTE and own.size >= self._width


def context_parallel(graph: OperatorGraph, topology: Topology) -> Strategy:
    """Positions of sequences split inside each host, data parallelism across hosts. Parameters are on all devices.

    What cannot follow positions, such as a loss that takes all positions of a sample for one another, is data parallel on all devices.
    """
    width, order = tensor_parallel_width(topology), device_order(topology)
    splits = SequenceSplits(graph, width)
    chosen: dict[int, OpConfig] = {}
    for i, op in enumerate(graph.operators) if width > 1 else ():
        factor = splits.following(op)
        if factor is None:
            factor = splits.beginning(op)
        if factor is not None:
            chosen[i] = grouped(op, order, width, factor)
            splits.split(op, factor)
    return settled(graph, fill(graph, [order] * len(graph.operators), chosen), topology.device_count)
