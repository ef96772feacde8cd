"""Memory when the loss is known, whatever the order of the tasks: every tile with a backward pass has run forward, and none backward.

It is worked out without a plan, for each operator by itself: starts that certainly lack memory are left out by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from math import prod

from soap.cluster.topology import Topology
from soap.model.graph import DimMap, Operand, Operator, OperatorGraph, TensorKind
from soap.plan.marks.seam import marked
from soap.strategy.config import OpConfig, Strategy


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
        lies = {output for one in known for output in one.lies}
        counted.update(out.tensor for k, out in enumerate(op.outputs) if k in lies)  # it is there with the input
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
    """Whether the devices that compute have less memory together than what is certainly held at once when the loss is known: values of
    parameters on all that read them, unless they are gathered; what operators keep whose marks let it stay; and the outputs of those that
    run again but keep these. Nothing of activations if there are micro-batches, which may go back before others come. Found without a
    plan."""
    held_bytes, counted = 0, set[str]()
    for op in graph.operators:
        for operand in op.parameters:
            if operand.tensor not in counted and not strategy.sync(operand.tensor).contract.gathers_values:
                held_bytes += _spread_bytes(graph, op, operand, strategy.operators[op.name])
                counted.add(operand.tensor)
    certain = with_backward(graph) if strategy.microbatches == 1 else frozenset[int]()
    for position in certain:
        op = graph.operators[position]
        if marked(config := strategy.operators[op.name]).keeps_outputs:
            lies = {output for one in graph.footprints.get(op.name, ()) for output in one.lies}
            held_bytes += sum(_spread_bytes(graph, op, out, config) for k, out in enumerate(op.outputs) if k not in lies)
    for position, places in keepers(graph).items() if certain else ():
        op = graph.operators[position]
        config, operands = strategy.operators[op.name], (*op.inputs, *op.parameters, *op.outputs)
        if marked(config).stays:
            always = frozenset.intersection(*(own.keeps for own in graph.footprints[op.name]))
            for operand, spread in ((operands[place], place in always) for place in places):
                held_bytes += _spread_bytes(graph, op, operand, config) if spread else graph.tensors[operand.tensor].bytes
    used = {device for config in strategy.operators.values() for device in config.devices}
    return held_bytes > sum(topology.memory_limits[device] for device in used)


def _spread_bytes(graph: OperatorGraph, op: Operator, operand: Operand, config: OpConfig) -> int:
    """Bytes of an operand's regions of all tiles together, at least; of an output one for each sum."""
    parts = prod(config.degrees[place] for place in {dim.factor for dim in operand.dims} if place is not None)
    factors = zip(config.degrees, op.factors, strict=True) if operand in op.outputs else ()
    summed = prod(degree for degree, factor in factors if factor.summed)
    return graph.tensors[operand.tensor].bytes * len(config.devices) // (parts * summed)
