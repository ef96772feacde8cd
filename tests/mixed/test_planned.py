"""Virtual workers are a field of strategies: files, differences and hashes have it, and who cannot do it says so in one line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given

from soap.elastic.planned import plan_of
from soap.errors import StrategyError
from soap.mixed.partitioning import Partitioner, WorkerPlan
from soap.mixed.planned import minibatch_of, stages_of, strategy_of
from soap.model.graph import OperatorGraph
from soap.model.json_text import option_kinds, option_texts, read_as, written_options
from soap.profiles.roofline import RooflineCosts
from soap.simulator.simulate import Simulator
from soap.strategy.config import OpConfig, Strategy
from soap.strategy.diff import compare
from soap.strategy.json_file import dumps, load_contents, loads, strategy_hash
from soap.strategy.workers import Workers
from soap.tracing.load import load_model
from tests.mixed.test_partitioning import mixed
from tests.strategies import workers_of

TOPOLOGY = mixed([2**30] * 4)
GROUPS = (0, 3), (1, 2)


@pytest.fixture(scope="module")
def both() -> OperatorGraph:
    return load_model("zoo:alexnet:tiny@8", plan_only=True).graph


@pytest.fixture(scope="module")
def plans() -> list[WorkerPlan]:
    graph = load_model("zoo:alexnet:tiny@4", plan_only=True).graph
    partitioner = Partitioner(graph, TOPOLOGY, RooflineCosts(TOPOLOGY))
    found = [partitioner.plan(own, 3) for own in GROUPS]
    return [own for own in found if own is not None]


@pytest.fixture(scope="module")
def strategy(both: OperatorGraph, plans: list[WorkerPlan]) -> Strategy:
    return strategy_of(plans, both, 4, "bounded:4", TOPOLOGY.device_count)


def test_a_strategy_says_the_workers_and_their_stages(both: OperatorGraph, plans: list[WorkerPlan], strategy: Strategy) -> None:
    assert strategy.stale and strategy.workers is not None and strategy.workers.in_flight == 3
    assert {frozenset(own) for own in strategy.workers.groups} == {frozenset(own) for own in GROUPS}
    expected = tuple(tuple((stage.device, stage.first) for stage in plan.stages) for plan in plans)
    assert stages_of(strategy, both) == expected and minibatch_of(strategy, both) == 4
    assert all(sync.contract.has_servers for sync in strategy.parameters.values())


def test_files_hashes_and_differences_have_it(both: OperatorGraph, strategy: Strategy) -> None:
    text = dumps(strategy, both, TOPOLOGY)
    assert loads(text, both, TOPOLOGY)[0] == strategy
    assert '"in_flight": 3' in text
    other = replace(strategy, workers=replace(strategy.workers, in_flight=2))  # type: ignore[type-var]
    assert strategy_hash(other, both) != strategy_hash(strategy, both)
    found = compare(load_contents(text), load_contents(dumps(other, both, TOPOLOGY)))
    assert [name for name, *_ in found.options] == ["workers"] and not found.differences
    assert option_texts(Strategy, load_contents(text).options)[-1].endswith("minibatches in flight")


@given(workers_of(6))
def test_every_legal_value_is_written_and_read(workers: Workers) -> None:
    asked = Strategy({}, consistency="async", workers=workers)
    assert read_as(option_kinds(Strategy)["workers"], written_options(asked, ("operators", "parameters"))["workers"]) == workers
    assert Strategy({}, consistency="async", workers=workers).with_changes().workers == workers


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Workers(((0, 1), (1,))), "workers: device 1 is in several of them"),
        (lambda: Workers(((0,), ())), "2 workers, or one without devices"),
        (lambda: Workers(((0,),), 0), "workers with 0 minibatches in flight; expected 1 to 1024"),
        (lambda: Strategy({}, workers=Workers(((0,),))), "workers with consistency sync: .*; expected bounded:D"),
    ],
)
def test_values_that_cannot_be(make: Callable[[], object], message: str) -> None:
    with pytest.raises(StrategyError, match=message):
        make()


def test_configurations_that_are_no_workers(both: OperatorGraph, strategy: Strategy) -> None:
    workers = strategy.workers
    assert workers is not None
    name = both.operators[0].name
    moved = strategy.operators[name]
    swapped = OpConfig(moved.degrees, moved.devices[::-1])
    cases = [
        (strategy.with_operator(name, swapped), rf"operator '{name}' has degrees .*; expected its samples in 2 parts"),
        (replace(strategy, workers=replace(workers, groups=(*workers.groups, (9,)))), "workers: device 9 does not exist; expected 0 to 3"),
        (replace(strategy, microbatches=2), "workers with micro-batches, stages or a schedule; expected none"),
        (replace(strategy, workers=Workers(((0,), (1,), (2,)))), "3 workers for 8 samples; expected a number that divides them"),
    ]
    for case, message in cases:
        with pytest.raises(StrategyError, match=message):
            case.validate(both, TOPOLOGY.device_count)
    with pytest.raises(StrategyError, match="has no virtual workers"):
        stages_of(replace(strategy, workers=None), both)


def test_who_cannot_do_it_says_so(both: OperatorGraph, strategy: Strategy) -> None:
    with pytest.raises(StrategyError, match=r"^the strategy has 2 virtual workers; expected none"):
        plan_of(strategy, both)
    with pytest.raises(StrategyError, match=r"^consistency bounded:4: the strategy is stale"):
        Simulator(both, TOPOLOGY, RooflineCosts(TOPOLOGY)).run(strategy)
