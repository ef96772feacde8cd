"""Micro-batches of a graph, and the order in which devices run their passes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from soap.errors import StrategyError
from soap.model.batch import MicroBatches
from soap.model.graph import WHOLE, OperatorGraph
from soap.plan.pass_order import PassAction, PassOrder
from soap.plan.scheduling import Orders, scheduled
from soap.schedules.named import SCHEDULES, parse
from soap.schedules.table import parse_action
from soap.strategy.classical import data_parallel
from soap.strategy.config import OpConfig, Strategy
from tests.graph_builder import GraphBuilder
from tests.strategies import cluster


def chain(samples: int = 7, *, centered: bool = False, summed: bool = False, known: bool = True) -> OperatorGraph:
    """Three layers and a loss; with a mean over the batch between two of them; with a loss that is a sum of two, which is ``known``."""
    g = GraphBuilder()
    x = g.linear(g.input("x", samples, 3, 4), 4, name="first")
    if centered:
        x = g.elementwise(x, g.batch_mean(x))
    y = g.linear(x, 4, name="second")
    z = g.linear(y, 4, name="third")
    if not summed:
        return g.build(g.mean(z))
    terms = g.mean(z), g.mean(g.elementwise(y))
    return g.build(g.sum(*terms, name="sum"), terms=terms if known else ())


def phases(cut: MicroBatches) -> tuple[int, ...]:
    """By operator: how many barriers are before it."""
    return cut.phases_within([0] * len(cut.graph.operators))


def test_all_operators_are_cut_at_the_same_samples() -> None:
    cut = MicroBatches(chain(), 3)
    assert cut.samples == 7
    assert [cut.ranges(position) for position in range(4)] == [[(0, 3), (3, 5), (5, 7)]] * 4
    assert phases(cut) == (0, 0, 0, 0) and cut.barriers == ()


def test_what_needs_the_whole_batch_is_a_barrier() -> None:
    graph = chain(centered=True)
    cut = MicroBatches(graph, 2)
    mean = next(i for i, op in enumerate(graph.operators) if op.kind == "batch_mean")
    assert phases(cut)[: mean + 1] == (*[0] * (mean), 0) or phases(cut)[mean] == 1
    assert max(phases(cut)) == 1 and phases(cut)[graph.index["second"]] == 1
    assert cut.barriers
    assert MicroBatches(graph, 1).barriers == ()


def order_of(graph: OperatorGraph, count: int, schedule: str | None = None, **stages: int) -> str:
    """The actions of a strategy's order."""
    order = Orders(graph).order(Strategy({}, microbatches=count, stages=stages, schedule=schedule))
    assert order is not None
    return " ".join(map(str, order.actions))


def test_usual_order_is_one_micro_batch_after_the_other() -> None:
    assert order_of(chain(), 2) == "0F0 0B0 0F1 0B1"
    assert order_of(chain(), 2, second=1) == "0F0 1F0 1B0 0B0 0F1 1F1 1B1 0B1"


def test_a_sum_of_losses_waits_for_nobody() -> None:
    """Its epilogue runs behind all passes: each term begins its own backward pass."""
    graph = chain(summed=True)
    cut = MicroBatches(graph, 3)
    assert cut.barriers == () and not any(phases(cut))
    assert graph.epilogue == {graph.index["sum"]} and graph.known_gradients == {graph.producers[name][0] for name in graph.loss_terms}
    assert order_of(graph, 2, "1f1b", second=1) == order_of(chain(), 2, "1f1b", second=1)
    order = Orders(graph).order(Strategy({}, microbatches=2))
    assert order is not None and order.rank("F", graph.index["sum"], 0) == len(order.actions)
    assert MicroBatches(chain(summed=True, known=False), 3).barriers == ("sum",)


def test_with_a_barrier_all_micro_batches_pass_it_together() -> None:
    assert order_of(chain(centered=True), 2) == order_of(chain(centered=True), 2, "gpipe") == "0F0 0F1 1F0 1F1 1B0 1B1 0B0 0B1"


@pytest.mark.parametrize("name", [schedule.name for schedule in SCHEDULES])
def test_each_stage_keeps_its_order_in_the_merged_list(name: str) -> None:
    schedule = parse(f"{name}:2" if name == "interleaved" else name)
    stages = 4 // schedule.chunks
    cut = MicroBatches(chain(), 5)
    chunks = (0, 1, 2, 3)
    order, table = scheduled(cut, chunks, schedule), schedule.table(stages, 5)
    for stage, actions in enumerate(table.stages):
        assert [str(action) for action in order.actions if table.placement[action.chunk] == stage] == [*map(str, actions)]


def test_what_is_behind_a_barrier_waits_in_its_own_chunk_alone() -> None:
    """Chunk 1 begins with the barrier's operators; chunk 2, behind it, takes one micro-batch after the other again."""
    graph = chain(centered=True)
    barrier = MicroBatches(graph, 2).barriers[0]
    found = order_of(graph, 2, "gpipe", **{barrier: 1, "third": 2})
    assert found == "0F0 0F1 1F0 1F1 2F0 2F1 2B0 1B0 2B1 1B1 0B0 0B1"


def test_a_schedule_that_contradicts_a_barrier_names_the_operator_and_offers_gpipe() -> None:
    graph = chain(centered=True)
    barrier = MicroBatches(graph, 2).barriers[0]
    with pytest.raises(StrategyError, match=f"operator '{barrier}' couples the samples of a step, .* use schedule 'gpipe'"):
        order_of(graph, 3, "1f1b", second=1)
    with pytest.raises(StrategyError, match=f"operator '{barrier}' couples the samples of a step, .* use schedule 'gpipe'"):
        order_of(graph, 3, "zb-h1", second=1)
    with pytest.raises(StrategyError, match=r"use schedule 'gpipe'"):
        order_of(graph, 2, "accumulation")


def staged(cut: MicroBatches, *actions: str) -> PassOrder:
    """The first layers in chunk 0, the others in chunk 1."""
    second = cut.graph.index["second"]
    chunks = tuple(int(position >= second) for position in range(len(cut.graph.operators)))
    return PassOrder(cut, chunks, tuple(PassAction(parse_action(text).kind, int(text[0]), int(text[2])) for text in actions))


def test_orders_that_contradict_dependencies_are_refused() -> None:
    cut = MicroBatches(chain(), 2)
    staged(cut, "0F0", "0F1", "1F0", "1B0", "0B0", "1F1", "1B1", "0B1")
    with pytest.raises(StrategyError, match="schedule runs 1F0 before 0F0; expected the reverse: chunk 1 reads chunk 0"):
        staged(cut, "1F0", "0F0", "0F1", "1B0", "0B0", "1F1", "1B1", "0B1")
    with pytest.raises(StrategyError, match="0B1 before 0F1"):
        staged(cut, "0F0", "1F0", "1B0", "0B0", "1F1", "1B1", "0B1", "0F1")
    with pytest.raises(StrategyError, match="schedule of 7 actions; expected each of 8 once: 0B1"):
        staged(cut, "0F0", "0F1", "1F0", "1B0", "0B0", "1F1", "1B1")


def test_backward_passes_in_two() -> None:
    """The first layer's input needs no gradient, the loss has no parameters: each has one pass, in the half that makes its gradients."""
    cut = MicroBatches(chain(), 2)
    order = staged(cut, "0F0", "1F0", "1I0", "0I0", "0F1", "1F1", "0W0", "1W0", "1I1", "0I1", "0W1", "1W1")
    index = cut.graph.index
    assert order.divided == {index["second"], index["third"]}
    assert [order.backward[index[name]] for name in ("first", "second", "third")] == ["W", "I", "I"] and order.backward[-1] == "I"
    assert (order.rank("B", index["first"], 0), order.rank("B", index["second"], 1), order.rank("W", index["second"], 1)) == (6, 8, 11)
    with pytest.raises(StrategyError, match="schedule runs 1W0 before 1I0; expected the reverse: weight gradients follow input gradients"):
        staged(cut, "0F0", "1F0", "1W0", "1I0", "0I0", "0F1", "1F1", "0W0", "1I1", "0I1", "0W1", "1W1")
    with pytest.raises(StrategyError, match="schedule of 11 actions; expected each of 12 once: 1W1"):
        staged(cut, "0F0", "1F0", "1I0", "0I0", "0F1", "1F1", "0W0", "1W0", "1I1", "0I1", "0W1")


def test_an_order_that_contradicts_a_barrier_names_the_operator() -> None:
    cut = MicroBatches(chain(centered=True), 2)
    with pytest.raises(StrategyError, match=f"operator '{cut.barriers[0]}' needs all micro-batches at once, .*GPipe"):
        PassOrder(cut, (0,) * len(cut.graph.operators), tuple(PassAction(kind, 0, m) for m in range(2) for kind in ("F", "B")))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"microbatches": 0}, "microbatches 0: expected 1 to 4096"),
        ({"microbatches": 8}, "microbatches 8: model .* has 7 samples per step; expected at most so many"),
        ({"microbatches": 4}, "degree 2 of factor 'b' exceeds 1, its size in the smallest of 4 micro-batches"),
        ({"stages": {"nowhere": 1}}, "stages: model .* has no operator 'nowhere'; expected the first operator of each chunk"),
        ({"stages": {"third": 2}}, "stages: chunk 1 of 3 has no operator; expected one at least in each"),
        ({"stages": {"first": 1, "second": 0}}, "operator 'second' of chunk 0 reads what 'first' of chunk 1 makes; expected it in"),
        ({"stages": {"third": 1}}, "operator 'third' of stage 1 runs on device 0, as 'first' of stage 0 does; expected each stage to have"),
        ({"stages": {"third": 1}, "schedule": "interleaved:3"}, "schedule 'interleaved:3' with 2 chunks; expected a multiple of 3"),
        ({"schedule": "nothing"}, r"no schedule is named 'nothing'; expected one of .*interleaved:N, zb-h1, .*dualpipe-v$"),
    ],
)
def test_what_cannot_be_cut_is_refused(change: dict[str, object], message: str) -> None:
    graph, topology = chain(), cluster([2])
    with pytest.raises(StrategyError, match=message):
        replace(data_parallel(graph, topology), **change).validate(graph, 2)


def test_barriers_are_not_recomputed() -> None:
    graph = chain(centered=True)
    cut = MicroBatches(graph, 2)
    strategy = replace(data_parallel(graph, cluster([2])), microbatches=2)
    free = strategy.operators["second"]
    strategy.with_operator("second", replace(free, recompute=True)).validate(graph, 2)
    name = cut.barriers[0]
    with pytest.raises(StrategyError, match=rf"operator '{name}' needs all of 2 micro-batches at once"):
        strategy.with_operator(name, replace(strategy.operators[name], recompute=True)).validate(graph, 2)


def test_a_model_without_samples_is_refused() -> None:
    g = GraphBuilder()
    graph = g.build(g.operator("loss", [], [(g.input("x", 2), [WHOLE])], [], [((), ())])[0])
    with pytest.raises(StrategyError, match=r"microbatches 2: model .* has no dimension of samples; expected 1"):
        Strategy({graph.operators[0].name: OpConfig((), (0,))}, microbatches=2).validate(graph, 1)
