"""Which collective carries what: patterns by hand, on clusters of four devices."""

from __future__ import annotations

from dataclasses import replace

from soap.model.graph import OperatorGraph
from soap.plan.plan import Exchange, Message, Pattern, Plan
from soap.plan.planning import build_plan
from soap.profiles.roofline import RooflineCosts
from soap.simulator.engine import Engine
from soap.simulator.shared import Shared
from soap.strategy.config import OpConfig
from tests.graph_builder import GraphBuilder
from tests.simulator.compiled.test_engine import check
from tests.simulator.examples import chain, finish, on, pairwise_cluster, stencil, strategy

FOUR = pairwise_cluster(2, 2)
LOSS = on(0, degrees=(1,))


def planned(graph: OperatorGraph, **configs: OpConfig) -> Plan:
    return build_plan(graph, strategy(**configs), FOUR)


def exchanges(plan: Plan, tensor: str) -> list[Exchange]:
    return [exchange for exchange in plan.exchanges if exchange.tensor == tensor]


def messages(plan: Plan, tensor: str) -> list[Message]:
    return [message for message in plan.messages if plan.fetches[message.parts[0][0]].tensor == tensor]


def test_samples_that_all_need_are_gathered() -> None:
    plan = planned(chain(7, 2, 6, 9), l1=on(0, 2, 3, degrees=(3, 1, 1)), l2=on(0, 2, 3, degrees=(1, 1, 3)), loss=LOSS)
    (exchange,) = exchanges(plan, "l1")
    assert (exchange.pattern, exchange.devices, len(exchange.parts)) == (Pattern.ALL_GATHER, (0, 2, 3), 6)
    assert messages(plan, "l1") == []


def test_a_group_for_each_region_that_is_gathered() -> None:
    """Two tiles of rows, each on two devices by columns, are two pairs: messages; in groups of three they are gathered."""
    pairs = planned(chain(4, 2, 6, 8), l1=on(0, 1, 2, 3, degrees=(2, 1, 2)), l2=on(0, 1, 2, 3, degrees=(2, 1, 2)), loss=LOSS)
    assert exchanges(pairs, "l1") == []
    assert [(m.source, m.target) for m in messages(pairs, "l1")] == [(1, 0), (0, 1), (3, 2), (2, 3)]


def test_rows_to_columns_is_an_all_to_all() -> None:
    g = GraphBuilder()
    graph = finish(g, g.elementwise(g.linear(g.input("x", 7, 3), 8, bias=False, name="l1"), name="e"))
    plan = planned(graph, l1=on(0, 1, 2, degrees=(3, 1, 1)), e=on(0, 1, 2, degrees=(1, 3)), loss=LOSS)
    (exchange,) = exchanges(plan, "l1")
    assert (exchange.pattern, exchange.devices, len(exchange.parts)) == (Pattern.ALL_TO_ALL, (0, 1, 2), 6)
    two = planned(graph, l1=on(0, 1, degrees=(2, 1, 1)), e=on(0, 1, degrees=(1, 2)), loss=LOSS)
    assert exchanges(two, "l1") == [] and len(messages(two, "l1")) == 2


def test_rows_of_experts_may_go_to_others_than_send_them_in_an_all_to_all() -> None:
    g = GraphBuilder()
    dense = finish(g, g.elementwise(g.linear(g.input("x", 7, 3), 9, bias=False, name="l1"), name="e"))
    graph = replace(dense, routed={"l1": "x"})
    configs = {"l1": on(0, 1, 2, degrees=(3, 1, 1)), "e": on(3, 1, 2, degrees=(1, 3)), "loss": LOSS}
    plan = planned(graph, **configs)
    (exchange,) = exchanges(plan, "l1")
    assert (exchange.pattern, exchange.devices, len(exchange.parts)) == (Pattern.ALL_TO_ALL, (0, 1, 2, 3), 7) and not messages(plan, "l1")
    fewer = planned(graph, **configs | {"e": on(3, 1, degrees=(1, 2))})  # two that receive
    assert exchanges(fewer, "l1") == [] and len(messages(fewer, "l1")) == 5
    assert exchanges(planned(dense, **configs), "l1") == []
    check(Engine(Shared(graph, FOUR, costs := RooflineCosts(FOUR))), costs, strategy(**configs))


def test_one_piece_to_three_others_is_a_broadcast_and_to_two_are_messages() -> None:
    plan = planned(chain(4, 2, 6, 8), l1=on(1, degrees=(1, 1, 1)), l2=on(0, 1, 2, 3, degrees=(1, 1, 4)), loss=LOSS)
    (exchange,) = exchanges(plan, "l1")
    assert (exchange.pattern, exchange.devices, len(exchange.parts)) == (Pattern.BROADCAST, (0, 1, 2, 3), 3)
    fewer = planned(chain(4, 2, 6, 8), l1=on(1, degrees=(1, 1, 1)), l2=on(0, 1, 2, degrees=(1, 1, 3)), loss=LOSS)
    assert exchanges(fewer, "l1") == []  # the tree takes two rounds as well
    assert [(m.source, m.target) for m in messages(fewer, "l1")] == [(1, 0), (1, 2)]


def test_halos_are_messages() -> None:
    g = GraphBuilder()
    graph = finish(g, stencil(g, g.elementwise(g.linear(g.input("x", 2, 3), 12, name="l1"), name="e"), -1, 2, "s"))
    rows = on(0, 1, 2, 3, degrees=(1, 4))
    plan = planned(graph, l1=on(0, degrees=(1, 1, 1)), e=rows, s=rows, loss=LOSS)
    assert exchanges(plan, "e") == []
    neighbours = [(1, 0), (0, 1), (2, 1), (1, 2), (3, 2), (2, 3)]
    assert sorted((m.source, m.target) for m in messages(plan, "e")) == sorted(neighbours)


def test_what_is_ready_together_goes_in_one_message() -> None:
    """Two readers of different parts of one tile's output on another device."""
    g = GraphBuilder()
    x = g.linear(g.input("x", 4, 3), 8, bias=False, name="l1")
    graph = finish(g, g.slice(x, 1, 0, 4), g.slice(x, 1, 4, 4))
    one, two = (op.name for op in graph.operators[1:3])
    plan = planned(graph, l1=on(0, degrees=(1, 1, 1)), loss=LOSS, **{one: on(1, degrees=(1, 1)), two: on(1, degrees=(1, 1))})
    (message,) = messages(plan, "l1")
    assert (message.source, message.target, len(message.parts)) == (0, 1, 2)


def test_a_sum_read_in_parts_is_scattered_only_without_replicas() -> None:
    halves = {"l2": on(0, 1, degrees=(2, 1, 1)), "loss": LOSS}
    plan = planned(chain(4, 2, 6, 8), l1=on(0, 1, degrees=(1, 2, 1)), **halves)
    assert plan.reductions[0].cells == (((0, 2), (0, 6)), ((2, 4), (0, 6)))
    assert messages(plan, "l1") == [] and exchanges(plan, "l1") == []
    replicas = planned(chain(4, 2, 6, 8), l1=on(0, 1, 1, 0, degrees=(1, 2, 1), replicas=2), **halves)
    assert all(reduction.cells == () for reduction in replicas.reductions)
