"""Hypothesis generators of strategies whose data-parallel copies do the same."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from soap.cluster.topology import Topology
from soap.model.batch import MicroBatches, sample_factor
from soap.model.graph import FactorKind, OperatorGraph
from soap.strategy.config import OpConfig, Strategy, SyncConfig
from soap.strategy.recomputation import LIGHT, RECOMPUTED, STAYS, refusal
from soap.strategy.stages import chunks_of, stages_of_chunks
from soap.strategy.sync import SHARDED, SHARDED_STATE
from tests.simulator.examples import pairwise_cluster
from tests.strategies import MOVES, cluster, graphs, named, pipelines, with_rails

Case = tuple[OperatorGraph, Topology, Strategy]


def switched(*counts: int) -> Topology:
    """Hosts with one NIC each."""
    return cluster([*counts])


def on_rails(*counts: int) -> Topology:
    """Hosts with a NIC for each device, too."""
    return with_rails(cluster([*counts]))


@st.composite
def copied(draw: st.DrawFn) -> Case:
    """A graph, a cluster and a strategy of three to five copies, often in micro-batches and stages; it may be that it cannot be folded."""
    copies, width, count = draw(st.integers(3, 5)), draw(st.integers(1, 4)), draw(st.sampled_from((1, 1, 2, 3)))
    batches = st.sampled_from((count * copies, 2 * count * copies))
    graph = draw(graphs(batches=batches, moves=[move for move in MOVES if move not in ("opaque", "state")]))
    used = copies * width
    images = np.arange(used).reshape(copies, width)
    if draw(st.booleans()):
        images = np.ascontiguousarray(np.arange(used).reshape(width, copies).T)  # the copies' devices lie between each other
    hosts = draw(st.sampled_from([hosts for hosts in (1, copies, width, used) if used % hosts == 0]))
    per_host = [used // hosts] * hosts
    made = draw(st.sampled_from((pairwise_cluster, switched, on_rails)))
    topology = made(*per_host)
    if made is not pairwise_cluster:
        topology = named(topology, draw(st.sampled_from(("", "pcie", "nvlink4"))))
    cut = MicroBatches(graph, count)
    stages, schedule = draw(pipelines(cut, width)) if count > 1 and draw(st.booleans()) else ({}, None)
    stage_of, order = stages_of_chunks(len(stages) + 1, schedule), draw(st.permutations(range(width)))
    configs = {}
    for position, chunk in enumerate(chunks_of(graph, stages)):
        own = np.sort(order[stage_of[chunk] :: max(stage_of) + 1])
        configs[graph.operators[position].name] = draw(config(cut, position, images[:, own]))
    return graph, topology, Strategy(configs, microbatches=count, stages=stages, schedule=schedule)


@st.composite
def with_parts(draw: st.DrawFn, case: Case) -> Case:
    """The same with parameters of which readers own parts: none, some, or all in one way."""
    graph, topology, strategy = case
    ways = st.sampled_from(draw(st.sampled_from(([SyncConfig()], [SyncConfig(), SHARDED_STATE, SHARDED], [SHARDED_STATE], [SHARDED]))))
    parameters = {tensor.name: draw(ways) for tensor in graph.parameters}
    return graph, topology, replace(strategy, parameters=parameters, prefetch=draw(st.integers(0, 2)))


@st.composite
def config(draw: st.DrawFn, cut: MicroBatches, position: int, images: NDArray[np.int64]) -> OpConfig:
    """One copy's tiles anywhere among its devices, and the others' in their place; operators without samples repeated, or on one device.
    Some are recomputed."""
    op, (copies, width) = cut.graph.operators[position], images.shape
    repeats = refusal(cut.graph, op) is None and cut.may_repeat(position)
    recompute = draw(st.sampled_from((STAYS, STAYS, RECOMPUTED, LIGHT))) if repeats else STAYS
    sample, parts = sample_factor(op), cut.parts(position)
    degrees, room = [1] * len(op.factors), 4
    for i in draw(st.permutations(range(len(op.factors)))) if op.partitionable else ():
        if i != sample and op.factors[i].kind is not FactorKind.SAMPLE:
            degrees[i] = draw(st.integers(1, min(op.factors[i].size, room)))
            room //= degrees[i]
    if sample is None or op.factors[sample].size % (copies * parts):
        if draw(st.booleans()):
            return OpConfig((1,) * len(op.factors), tuple(images.ravel().tolist()), images.size, recompute)
        if draw(st.booleans()):
            return OpConfig((1,) * len(op.factors), (int(images[0, 0]),), 1, recompute)
        tiles = prod(degrees)
        places = draw(st.lists(st.integers(0, width - 1), min_size=tiles, max_size=tiles))
        return OpConfig(tuple(degrees), tuple(images[:, places].ravel().tolist()), copies, recompute)
    each = draw(st.sampled_from([k for k in (1, 2) if op.factors[sample].size % (copies * k * parts) == 0]))
    replicas = draw(st.sampled_from((1, 1, 1, 2)))
    before, after = replicas * prod(degrees[:sample]), each * prod(degrees[sample:])
    places = draw(st.lists(st.integers(0, width - 1), min_size=before * after, max_size=before * after))
    degrees[sample] = copies * each
    tiles = np.moveaxis(images[:, places].reshape(copies, before, after), 0, 1)
    return OpConfig(tuple(degrees), tuple(tiles.ravel().tolist()), replicas, recompute)
