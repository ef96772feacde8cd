"""Rough times of configurations, which weigh proposals before any simulation.

A wrong estimate wastes proposals but does not bias the chain: the acceptance probability corrects for it (``moves``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import prod

import numpy as np

from soap.cluster.topology import Topology
from soap.model.graph import OperatorGraph
from soap.plan.tiling import tiles_of
from soap.search.space import Grid
from soap.simulator.compiled.graph_arrays import Floats
from soap.simulator.costs import CostModel
from soap.strategy.config import OpConfig


def rough_ns(graph: OperatorGraph, position: int, grids: Sequence[Grid], topology: Topology, costs: CostModel) -> Floats:
    """Rough time of each grid of an operator, ns, shape (grids,): forward and backward pass of the largest tile, on average over the
    devices, plus an all-reduce of each
    parameter over the copies of its shards, on the slowest link. Placements and neighbours are ignored."""
    op = graph.operators[position]
    (whole,) = tiles_of(graph, position, OpConfig((1,) * len(op.factors), (0,)))
    counts, backward = Counter(device.type for device in topology.devices), graph.needs_backward(op)
    times = {kind: costs.forward_ns(graph, whole, kind) + (costs.backward_ns(graph, whole, kind) if backward else 0) for kind in counts}
    compute_ns = sum(count * times[kind] for kind, count in counts.items()) / topology.device_count
    table = np.array(grids, np.int64).reshape(len(grids), 1 + len(op.factors))
    degrees = table[:, 1:]
    sizes = np.array([max(1, factor.size) for factor in op.factors], np.int64)
    found = compute_ns * np.prod(np.ceil(sizes / degrees) / sizes, axis=1)
    slowest = min(topology.effective_bandwidths, default=float("inf"))
    for operand in dict.fromkeys(op.parameters):
        tensor = graph.tensors[operand.tensor]
        if tensor.requires_grad:
            along = sorted({dim.factor for dim in operand.dims if dim.factor is not None})
            shards = np.prod(degrees[:, along], axis=1)
            copies = np.prod(table, axis=1) / shards
            found = found + 2e9 * (copies - 1) / copies * prod(tensor.shape) * tensor.itemsize / shards / slowest
    return np.asarray(found, np.float64)
