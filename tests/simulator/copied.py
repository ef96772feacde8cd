"""Hypothesis generators of strategies whose data-parallel copies do the same."""

from __future__ import annotations

from math import prod

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from soap.cluster.topology import Topology
from soap.model.graph import FactorKind, Operator, OperatorGraph
from soap.strategy.classical import sample_factor
from soap.strategy.config import OpConfig, Strategy
from tests.simulator.examples import pairwise_cluster
from tests.strategies import MOVES, cluster, graphs, named, with_rails

Case = tuple[OperatorGraph, Topology, Strategy]


def switched(*counts: int) -> Topology:
    """Hosts with one NIC each."""
    return cluster([*counts])


def on_rails(*counts: int) -> Topology:
    """Hosts with a NIC for each device, too."""
    return with_rails(cluster([*counts]))


@st.composite
def copied(draw: st.DrawFn) -> Case:
    """A graph, a cluster and a strategy of three to five copies; it may be that it cannot be folded."""
    copies, width = draw(st.integers(3, 5)), draw(st.integers(1, 4))
    graph = draw(graphs(batches=st.sampled_from((copies, 2 * copies)), moves=[move for move in MOVES if move not in ("opaque", "state")]))
    count = copies * width
    images = np.arange(count).reshape(copies, width)
    if draw(st.booleans()):
        images = np.ascontiguousarray(np.arange(count).reshape(width, copies).T)  # the copies' devices lie between each other
    hosts = draw(st.sampled_from([hosts for hosts in (1, copies, width, count) if count % hosts == 0]))
    per_host = [count // hosts] * hosts
    made = draw(st.sampled_from((pairwise_cluster, switched, on_rails)))
    topology = made(*per_host)
    if made is not pairwise_cluster:
        topology = named(topology, draw(st.sampled_from(("", "pcie", "nvlink4"))))
    configs = {op.name: draw(config(op, images)) for op in graph.operators}
    return graph, topology, Strategy(configs)


@st.composite
def config(draw: st.DrawFn, op: Operator, images: NDArray[np.int64]) -> OpConfig:
    """One copy's tiles anywhere among its devices, and the others' in their place; operators without samples repeated, or on one device."""
    copies, width = images.shape
    sample = sample_factor(op)
    degrees, room = [1] * len(op.factors), 4
    for i in draw(st.permutations(range(len(op.factors)))) if op.partitionable else ():
        if i != sample and op.factors[i].kind is not FactorKind.SAMPLE:
            degrees[i] = draw(st.integers(1, min(op.factors[i].size, room)))
            room //= degrees[i]
    if sample is None or op.factors[sample].size % copies:
        if draw(st.booleans()):
            return OpConfig((1,) * len(op.factors), tuple(images.ravel().tolist()), images.size)
        if draw(st.booleans()):
            return OpConfig((1,) * len(op.factors), (0,))
        tiles = prod(degrees)
        places = draw(st.lists(st.integers(0, width - 1), min_size=tiles, max_size=tiles))
        return OpConfig(tuple(degrees), tuple(images[:, places].ravel().tolist()), copies)
    each = draw(st.sampled_from([k for k in (1, 2) if op.factors[sample].size % (copies * k) == 0]))
    replicas = draw(st.sampled_from((1, 1, 1, 2)))
    before, after = replicas * prod(degrees[:sample]), each * prod(degrees[sample:])
    places = draw(st.lists(st.integers(0, width - 1), min_size=before * after, max_size=before * after))
    degrees[sample] = copies * each
    tiles = np.moveaxis(images[:, places].reshape(copies, before, after), 0, 1)
    return OpConfig(tuple(degrees), tuple(tiles.ravel().tolist()), replicas)
