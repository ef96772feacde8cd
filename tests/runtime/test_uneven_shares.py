"""Plans with uneven shares train like one process."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from soap.errors import StrategyError
from soap.model.batch import MicroBatches
from soap.model.graph import OperatorGraph
from soap.strategy.classical import random_strategy
from soap.strategy.config import OpConfig, Strategy, check_config, check_parts
from soap.strategy.grids import sample_factor
from soap.strategy.sync import SHARDED
from soap.strategy.uneven import with_sample_weights
from tests.extent import often
from tests.runtime.pool import Pool
from tests.runtime.sparse_plans import by_samples, hosts, with_random_syncs
from tests.runtime.test_sharded_state import MODELS, assert_trains
from tests.runtime.test_sharded_state import files as files  # a fixture
from tests.runtime.traced import traced

TWO, FOUR = hosts(1, 1), hosts(2, 2)


def two_to_one(graph: OperatorGraph) -> Strategy:
    """Two thirds of the samples on the first of two devices."""
    strategy, found = by_samples(graph, range(2), 6), {}
    for op in graph.operators:
        config, factor = strategy.operators[op.name], sample_factor(op)
        if factor is not None and config.degrees[factor] == 2:
            found[op.name] = with_sample_weights(op, config, (2, 1))
    assert found
    return strategy.with_changes(found)


@pytest.mark.parametrize("microbatches", often((1, 2), (1,)))
def test_a_mixed_pair_trains_like_one_process(four: Pool, files: dict[str, str], microbatches: int) -> None:
    """With Adam and clipping; one batch is smaller."""
    strategy = replace(two_to_one(traced(files["odd"]).graph), microbatches=microbatches)
    assert_trains(four, files, "odd", strategy, TWO, sizes=((6, 6), (6, 4), (6, 6)), clip_norm=0.05)


def test_with_gathered_values(four: Pool, files: dict[str, str]) -> None:
    graph = traced(files["odd"]).graph
    strategy = two_to_one(graph).with_changes(parameters={tensor.name: SHARDED for tensor in graph.parameters})
    assert_trains(four, files, "odd", strategy, TWO, clip_norm=0.05)


def with_random_shares(graph: OperatorGraph, strategy: Strategy, rng: random.Random) -> Strategy:
    """Any shares of any factor that leave no part of it empty."""
    return strategy.with_changes({op.name: _uneven(graph, i, strategy.operators[op.name], rng) for i, op in enumerate(graph.operators)})


def _uneven(graph: OperatorGraph, position: int, config: OpConfig, rng: random.Random) -> OpConfig:
    shares = tuple([tuple([rng.randint(1, 4) for _ in range(degree)]) for degree in config.degrees if degree > 1])
    try:
        found = replace(config, shares=shares)
        check_config(graph.operators[position], found, 4)
        check_parts(MicroBatches(graph, 1), position, found)
    except StrategyError:
        return config
    return found


@pytest.mark.parametrize("seed", often(range(12), (0, 1), pytest.mark.slow))
def test_any_shares(four: Pool, files: dict[str, str], seed: int) -> None:
    rng, name = random.Random(seed), MODELS[seed % len(MODELS)]
    graph = traced(files[name]).graph
    strategy = with_random_shares(graph, with_random_syncs(graph, random_strategy(graph, FOUR, rng), rng), rng)
    assert any(config.shares for config in strategy.operators.values())
    assert_trains(four, files, name, strategy, FOUR, clip_norm=0.05)
