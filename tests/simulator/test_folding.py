"""A folded simulation beside the whole one: every task of both copies that are left, and what the other copies do."""

from __future__ import annotations

from collections import Counter
from math import prod

import numpy as np
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from soap.graph import FactorKind, Operator, OperatorGraph
from soap.profiles.roofline import RooflineCosts
from soap.simulator.copies import LEFT
from soap.simulator.folded import FoldedSimulation
from soap.simulator.folding import Folding, fold
from soap.simulator.lowering import build_plan, lower
from soap.simulator.reference import simulate
from soap.simulator.simulate import Simulator
from soap.simulator.tasks import Task, TaskKind
from soap.strategies import sample_factor
from soap.strategy import OpConfig, Strategy
from soap.topology import Topology
from tests.simulator.examples import pairwise_cluster
from tests.strategies import MOVES, cluster, graphs

Case = tuple[OperatorGraph, Topology, Strategy]


@st.composite
def copied(draw: st.DrawFn) -> Case:
    """A graph, a cluster and a strategy of three to five copies; it may be that it cannot be folded."""
    copies, width = draw(st.integers(3, 5)), draw(st.integers(1, 4))
    graph = draw(graphs(batches=st.sampled_from((copies, 2 * copies)), moves=[move for move in MOVES if move != "opaque"]))
    count = copies * width
    images = np.arange(count).reshape(copies, width)
    if draw(st.booleans()):
        images = np.ascontiguousarray(np.arange(count).reshape(width, copies).T)  # the copies' devices lie between each other
    hosts = draw(st.sampled_from([hosts for hosts in (1, copies, width, count) if count % hosts == 0]))
    per_host = [count // hosts] * hosts
    topology = pairwise_cluster(*per_host) if draw(st.booleans()) else cluster(per_host)
    configs = {op.name: draw(config(op, images)) for op in graph.operators}
    return graph, topology, Strategy(configs)


@st.composite
def config(draw: st.DrawFn, op: Operator, images: np.ndarray) -> OpConfig:
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


def place(task: Task) -> tuple[int, ...]:
    """What of a task's id is the same in all copies: not the numbers of tiles and devices."""
    return task.id[:1] if task.kind is TaskKind.UPDATE else task.id[:3]


def check(graph: OperatorGraph, topology: Topology, strategy: Strategy, folding: Folding) -> None:
    """Everything about two copies is the same as in the whole simulation, and the other copies do as copy 1."""
    costs = RooflineCosts(topology)
    whole = lower(build_plan(graph, strategy, topology), topology, costs)
    small = lower(folding.plan, folding.topology, costs, folding.communication)
    times, small_times = simulate(whole), simulate(small)
    assert small_times.makespan_ns == times.makespan_ns
    images, count = folding.copies.images, topology.device_count
    copy_of = {device: min(j, LEFT) for j, own in enumerate(images.tolist()) for device in own}
    links = {link: min(j, LEFT) for j, own in enumerate(folding.local.tolist()) for link in own}
    rank = {device: i for i, device in enumerate(folding.copies.devices)}
    expected, others, first = Counter(), Counter(), Counter()
    for task, start, end in zip(whole.tasks, times.start_ns.tolist(), times.end_ns.tolist(), strict=True):
        kinds = {copy_of[r] if r < count else links.get(r - count, -1) for r in task.resources}
        told = (place(task), task.kind, start, end, task.bytes)
        if kinds == {LEFT}:
            others[told] += 1
            continue
        if kinds == {1}:
            first[told] += 1
        held = {rank.get(r, -1) if r < count else folding.alike[r - count] for r in task.resources}
        held = {r if task.resources[0] < count else r + folding.topology.device_count for r in held if r >= 0}
        expected[told, frozenset(held)] += 1
    found = Counter(
        ((place(task), task.kind, start, end, task.bytes), frozenset(task.resources))
        for task, start, end in zip(small.tasks, small_times.start_ns.tolist(), small_times.end_ns.tolist(), strict=True)
    )
    assert found == expected
    assert others == Counter({told: number * (len(images) - LEFT) for told, number in first.items()})


def check_outcome(graph: OperatorGraph, topology: Topology, strategy: Strategy, folding: Folding) -> None:
    """What reports say of all devices and links."""
    costs = RooflineCosts(topology)
    whole = Simulator(graph, topology, costs).run(strategy)
    small = lower(folding.plan, folding.topology, costs, folding.communication)
    folded = FoldedSimulation(folding, small, simulate(small), whole.optimizer_states)
    assert folded.topology is whole.topology
    assert folded.memory == whole.memory
    assert folded.peak_bytes == whole.peak_bytes
    assert folded.overflow_bytes == whole.overflow_bytes
    assert folded.bytes_moved == whole.bytes_moved
    assert folded.busy_ns == whole.busy_ns
    assert folded.link_bytes == whole.link_bytes
    assert folded.critical_path_ns == whole.critical_path_ns


@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
@given(copied())
def test_folded_is_whole(case: Case) -> None:
    graph, topology, strategy = case
    folding = fold(graph, topology, strategy)
    if isinstance(folding, str):
        event(f"not folded: {folding.split(' ')[0:6]}")
        return
    event(f"folded over {folding.count}")
    check(graph, topology, strategy, folding)
    check_outcome(graph, topology, strategy, folding)
