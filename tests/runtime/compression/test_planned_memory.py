"""What plans say of memory against what ranks have, at every step of a training: momentum, warm-ups, and messages of all peers."""

from __future__ import annotations

import warnings
from dataclasses import replace
from itertools import product

import pytest
import torch

from soap.cli import compressing
from soap.cli.options import warm_up
from soap.errors import SoapWarning
from soap.plan.plan import Plan, ShardSync
from soap.plan.planning import PlanBuilder
from soap.plan.syncs.seam import method_for
from soap.profiles.roofline import RooflineCosts
from soap.runtime.compression.dgc import Momentum, WarmUp
from soap.runtime.compression.peer import AS_IT_IS, CompressedTraining, Peer, exchanged
from soap.simulator.simulate import Simulator
from soap.strategy.classical import data_parallel
from soap.strategy.compression import Bf16, Chunked, Compression, PowerSgd, Rgc, RgcAsq
from soap.strategy.sync import compressed
from tests.extent import rows_often
from tests.graph_builder import GraphBuilder
from tests.strategies import CPU, cluster

PEERS, WIDE = 4, 96
TOPOLOGY = cluster([1] * PEERS, CPU)
TRAININGS = {
    "alone": AS_IT_IS,
    "momentum": CompressedTraining(Momentum(0.9)),
    "nesterov": CompressedTraining(Momentum(0.9, nesterov=True)),
    "dense": CompressedTraining(warm_up=WarmUp(1)),
    "densities": CompressedTraining(warm_up=WarmUp(0, 1)),
    "all": CompressedTraining(Momentum(0.9), WarmUp(1, 1)),
}
METHODS: list[Compression] = [
    Rgc(0.001, "search"),
    Rgc(0.001, "search", ragged=True),
    Rgc(0.001, "exact"),
    RgcAsq(0.001),
    Chunked(0.001),
    PowerSgd(2),
    Bf16(),
]


def planned(how: Compression, training: CompressedTraining) -> tuple[Plan, ShardSync]:
    g = GraphBuilder()
    graph = g.build(g.mean(g.linear(g.input("x", 8, WIDE), WIDE, name="layer", bias=False)))
    strategy = data_parallel(graph, TOPOLOGY).with_changes(parameters={"layer.weight": compressed(how)})
    plan = PlanBuilder(graph, TOPOLOGY, training.planned).build(strategy)
    [sync] = plan.syncs
    return plan, sync


PAIRS = list(product(METHODS, TRAININGS))
OFTEN = [(how, name) for how, name in PAIRS if name in ("alone", "all") or how == METHODS[0]]


@pytest.mark.parametrize(("how", "name"), rows_often(PAIRS, OFTEN), ids=repr)
def test_plans_count_what_ranks_keep_and_send(how: Compression, name: str) -> None:
    """State: to the byte. Messages, at most: this rank's and all that it receives, in the step with the largest ones."""
    plan, sync = planned(how, TRAININGS[name])
    state, moved, *_ = [hold.size_bytes for hold in method_for(sync).holds(plan, sync) if hold.device == 0]
    assert sync.compression is not None
    ranks = [Peer(sync.compression, (WIDE, WIDE), torch.float32, place, PEERS, TRAININGS[name]) for place in range(PEERS)]
    largest = 0
    for _ in range(8):
        courses = [peer.course(torch.randn(WIDE, WIDE)) for peer in ranks]
        given, size = [next(course) for course in courses], 0
        while given:
            received = exchanged(given[0][0], [message for _, message in given])
            size += given[0][1].nbytes + received[0].nbytes
            given = [found for course, got in zip(courses, received, strict=True) if (found := following(course, got)) is not None]
        largest = max(largest, size)
    kept = [tensor for part in (ranks[0].state.summed, ranks[0].state.common) for tensor in part.values()]
    assert sum(tensor.nbytes for tensor in kept) == state
    assert largest <= moved - WIDE * WIDE * 4 <= 4 * largest  # without the total
    assert sum(hold.size_bytes for hold in method_for(sync).holds(plan, sync) if hold.device == 0) >= state + moved


def following(course, received):  # type: ignore[no-untyped-def]
    try:
        return course.send(received)
    except StopIteration:
        return None


def test_a_warm_up_that_may_not_fit_is_told_before_ranks_start() -> None:
    plan, _ = planned(Rgc(0.001, "search"), AS_IT_IS)
    for training, told in ((compressing.training_of(None, (0, 0)), 0), (compressing.training_of(0.9, warm_up("1,1")), 1)):
        costs = RooflineCosts(TOPOLOGY)
        fitting = Simulator(plan.graph, TOPOLOGY, costs, 0).run(plan.strategy)
        need = max(fitting.peak_bytes)
        device = TOPOLOGY.devices[0]
        small = cluster([1] * PEERS, replace(device.type, memory_bytes=need))
        found = Simulator(plan.graph, small, costs, 0, training.planned).run(plan.strategy)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            compressing.warn_of_memory(found)
        assert [one.category for one in caught] == [SoapWarning] * told
        assert all("may need up to" in str(one.message) and "\n" not in str(one.message) for one in caught)
        assert found.fits == (not told)
