"""What micro-batches send is known to have left when its sender sends for a later one."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch

from soap.plan.departures import PASSES_UNDER_WAY, sending_pass
from soap.plan.planning import build_plan
from soap.runtime.comm.redistribute import Communicator, Pending
from soap.runtime.step.state import Departures
from tests.graph_builder import mlp
from tests.micro_batches import by_hand
from tests.simulator.reference_memory.moving import waited_for
from tests.strategies import cluster

BACK = (1, 0, True)
"""A route of gradients."""


class Waits:
    """A communicator that notes for what it waits."""

    def __init__(self) -> None:
        self.over: list[int] = []

    def release(self, pending: Pending) -> None:
        self.over.append(int(pending.wait()))


def send(departures: Departures, route: tuple[int, int, bool], sending: int, number: int) -> None:
    departures.of(route, sending).append(Pending((), torch.tensor(number)))


def test_a_third_pass_waits_for_the_first() -> None:
    waits = Waits()
    departures = Departures(cast(Communicator, waits))
    for number, sending in enumerate((3, 3, 5, 8, 8, 13)):
        send(departures, BACK, sending, number)
    assert waits.over == [0, 1, 2] and PASSES_UNDER_WAY == 2
    send(departures, (1, 2, False), 20, 6)  # another route
    assert waits.over == [0, 1, 2]


def test_simulations_free_it_when_ranks_do() -> None:
    sends = [(BACK, 3, 70), (BACK, 3, 60), (BACK, 5, 100), (BACK, 8, 200), (BACK, 13, 250), ((1, 2, False), 20, 10)]
    assert waited_for(sends) == {(BACK, 3): 200, (BACK, 5): 250}


def test_messages_of_a_pass_share_their_route() -> None:
    graph = mlp(batch=8)
    borders = [graph.operators[len(graph.operators) // 2].name]
    whole = build_plan(graph, by_hand(graph, borders, [(0,), (1,)]), cluster([2]))
    assert {sending_pass(whole, message, gradient=back) for message in whole.messages for back in (False, True)} == {None}
    plan = build_plan(graph, replace(by_hand(graph, borders, [(0,), (1,)], "1f1b"), microbatches=4), cluster([2]))
    assert plan.order is not None
    found = {back: [sending_pass(plan, message, gradient=back) for message in plan.messages] for back in (False, True)}
    for back, route in ((False, (0, 1, False)), (True, (1, 0, True))):
        assert {own[0] for own in found[back] if own is not None} == {route}
        passes = [plan.order.actions[own[1]] for own in found[back] if own is not None]
        assert {(own.kind, own.chunk, own.microbatch) for own in passes} == {("FB"[back], int(back), m) for m in range(4)}
