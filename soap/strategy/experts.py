"""Expert parallelism: mixtures of experts whose matrices are divided among the devices of a group.

A product of rows with the matrix that each row names (``tracing.rules.experts``) has a factor over experts. A part of it is some experts on
one device, which multiplies the rows that name them and leaves zeros for all others. So rows are all-gathered inside a group, and products
are sums of which one term is not zero, as with the all-gather dispatch of Megatron Core. No plan depends on which experts rows name, and
rows of a batch may be divided among experts as unevenly as they like.
"""

from __future__ import annotations

from soap.cluster.topology import Topology
from soap.model.graph import Operator, OperatorGraph
from soap.strategy.config import OpConfig, Strategy, settled
from soap.strategy.grids import device_order, fill, grouped, largest_divisor, tensor_parallel_width


def expert_factor(op: Operator) -> int | None:
    """The factor over experts; None if the operator has none.

    It is summed and belongs to a parameter alone, which has a summed factor in common with what the operator reads, too: a table of
    vectors has no such second one.
    """
    if not op.partitionable:
        return None
    read = {dim.factor for operand in op.inputs for dim in operand.dims}
    for operand in op.parameters:
        summed = {dim.factor for dim in operand.dims if dim.factor is not None and dim.exact and op.factors[dim.factor].summed}
        alone = summed - read
        if len(alone) == 1 and summed & read:
            return alone.pop()
    return None


def expert_parallel(graph: OperatorGraph, topology: Topology) -> Strategy:
    """Experts divided among the devices of each host, and samples among hosts; everything else is data parallel on all devices.

    A group has as many neighbouring devices as divide the number of a host's, and at most one for each expert. GShard (Lepikhin et al.,
    ICLR 2021) divides experts so.
    """
    most, order = tensor_parallel_width(topology), device_order(topology)
    chosen: dict[int, OpConfig] = {}
    for i, op in enumerate(graph.operators):
        factor = expert_factor(op)
        width = 1 if factor is None else largest_divisor(most, op.factors[factor].size)
        if width > 1:
            chosen[i] = grouped(op, order, width, factor)
    return settled(graph, fill(graph, [order] * len(graph.operators), chosen), topology.device_count)
