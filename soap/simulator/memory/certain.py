"""What is held when the loss is known, whatever the order of the tasks: every tile with a backward pass has run forward, and none backward.

``memory.bound`` takes it for a bound from below. It is worked out for each operator by itself, so that a search can add it up.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain

from soap.cluster.topology import Topology
from soap.model.graph import DimMap, Operand, Operator, OperatorGraph, TensorKind
from soap.strategy.config import Strategy


def with_backward(graph: OperatorGraph) -> frozenset[int]:
    """Positions of the operators of which every tile certainly has a backward pass, or one of its replicas: what it makes is read, element
    by element, by operators of which that is certain too."""
    found: set[int] = set()
    readers: dict[str, list[tuple[Operator, Operand]]] = {}
    for position in range(len(graph.operators) - 1, -1, -1):
        op = graph.operators[position]
        made = {out.tensor for out in op.outputs if graph.tensors[out.tensor].requires_grad} - graph.sums_of.keys()  # may be unread
        read = chain.from_iterable(readers.get(tensor, ()) for tensor in made)
        if graph.loss in made or any(_reads_all(reader, operand, graph.tensors[operand.tensor].shape) for reader, operand in read):
            found.add(position)
            for operand in op.inputs:
                readers.setdefault(operand.tensor, []).append((op, operand))
    return frozenset(found)


def _reads_all(op: Operator, operand: Operand, shape: tuple[int, ...]) -> bool:
    """Whether each element of the tensor is in the region that some tile reads, however the operator is cut."""
    return all(_covers(op, dim, size) for dim, size in zip(operand.dims, shape, strict=True))


def _covers(op: Operator, dim: DimMap, size: int) -> bool:
    if dim.factor is None:
        return dim.scale != 0 or (dim.lo <= 0 and dim.hi >= size)
    last = op.factors[dim.factor].size - 1
    return dim.lo <= 0 and last * dim.scale + dim.hi >= size and dim.hi - dim.lo >= dim.scale > 0


def keepers(graph: OperatorGraph) -> Mapping[int, frozenset[int]]:
    """Position of an operator -> the places, among its inputs, parameters and outputs, of the values that it certainly keeps for its
    backward pass. Each value is there once: at its producer if that keeps it (however it is cut), else at its first reader that does."""
    found: dict[int, set[int]] = {}
    counted: set[str] = set()
    certain = with_backward(graph)
    for position, op in enumerate(graph.operators):
        known = graph.footprints.get(op.name)
        if known is None:
            counted.update(out.tensor for out in op.outputs)  # what it keeps is not known
            continue
        first = len(op.inputs) + len(op.parameters)
        places = [(place, operand.tensor) for place, operand in enumerate(op.inputs) if place in known[0].keeps]
        places += [(first + k, out.tensor) for k, out in enumerate(op.outputs) if any(first + k in one.keeps for one in known)]
        for place, tensor in places:
            if tensor in counted or graph.tensors[tensor].kind is not TensorKind.ACTIVATION:
                continue
            if position in certain:
                found.setdefault(position, set()).add(place)
                counted.add(tensor)
            elif place >= first:
                counted.add(tensor)
    return {position: frozenset(places) for position, places in found.items()}


def certainly_lacks(graph: OperatorGraph, topology: Topology, strategy: Strategy) -> bool:
    """Whether all devices together have less memory than the values take that are certainly kept at once: those of operators that are
    neither recomputed nor offload, if there are no micro-batches, which may go back before others come. Found without a plan."""
    if strategy.microbatches > 1:
        return False
    kept_bytes = 0
    for position, places in keepers(graph).items():
        op = graph.operators[position]
        config, operands = strategy.operators[op.name], (*op.inputs, *op.parameters, *op.outputs)
        if not config.recompute and not config.offload:
            kept_bytes += sum(graph.tensors[operands[place].tensor].bytes for place in places)
    return kept_bytes > sum(topology.memory_limits)
