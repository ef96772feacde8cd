from __future__ import annotations

import random
from collections import Counter
from itertools import product
from math import exp, inf

import pytest

from benchmarks.oracles.exhaustive import all_strategies
from soap.search.metropolis import ChainState, step
from soap.search.proposals import Kernel, Proposal
from soap.search.space import build_space
from soap.strategy.config import OpConfig, Strategy
from tests.extent import often
from tests.search.toys import Both, TableCosts, key_of, layers

BETA = 10.0


def visits(kernel: Kernel, costs: TableCosts, start: Strategy, steps: int, seed: int = 5) -> Counter[object]:
    rng = random.Random(seed)
    cost_ns, _ = costs.cost(start)
    state, counts = ChainState(start, cost_ns, 1000), Counter[object]()
    for _ in range(steps):
        state, _ = step(rng, state, kernel, costs, BETA)
        counts[key_of(state.strategy)] += 1
    return counts


def distance(counts: Counter[object], weights: dict[object, float]) -> float:
    """Total variation between visits and the normalised weights."""
    steps, total = sum(counts.values()), sum(weights.values())
    assert set(counts) <= set(weights)
    return sum(abs(counts[key] / steps - w / total) for key, w in weights.items()) / 2


@pytest.mark.parametrize("move", often([None, "redraw", "informed"], [None], pytest.mark.slow))
def test_visits_follow_the_boltzmann_distribution(move: str | None) -> None:
    graph = layers(2)
    reference = Strategy({op.name: OpConfig((2,), (0, 1)) for op in graph.operators})
    space = build_space(graph, 2, references=(reference,), shuffled=0.0)
    costs, states = TableCosts(1), list(all_strategies(space))
    target: dict[object, float] = {key_of(s): exp(-BETA * costs.cost(s)[0] / 1000) for s in states}
    assert len(target) == 16 and max(target.values()) > 4 * min(target.values())
    counts = visits(Kernel(space, {move: 1.0} if move else None), costs, states[0], 40_000)
    assert distance(counts, target) < 0.02


def test_wrong_temperature_would_be_noticed() -> None:
    space = build_space(layers(2), 2, shuffled=0.0)
    costs, states = TableCosts(1), list(all_strategies(space))
    wrong: dict[object, float] = {key_of(s): exp(-0.5 * BETA * costs.cost(s)[0] / 1000) for s in states}
    assert distance(visits(Kernel(space), costs, states[0], 40_000), wrong) > 0.05


@pytest.mark.long
def test_shuffled_placements_are_visited_by_their_weight() -> None:
    space = build_space(layers(2), 2, shuffled=0.5)
    own = space.operators[0]
    configs = [*own.structured(), OpConfig((2,), (1, 0)), OpConfig((1,), (1, 0), 2)]
    costs, target = TableCosts(2), dict[object, float]()
    for a, b in product(configs, configs):
        strategy = Strategy({"layer.0": a, "layer.1": b})
        target[key_of(strategy)] = exp(own.log_weight(a) + own.log_weight(b) - BETA * costs.cost(strategy)[0] / 1000)
    start = Strategy({"layer.0": configs[0], "layer.1": configs[0]})
    assert distance(visits(Kernel(space), costs, start, 120_000), target) < 0.025


def test_what_does_not_fit_is_never_visited_and_the_rest_keeps_its_distribution() -> None:
    space = build_space(layers(2), 2, shuffled=0.0)

    def lacking(strategy: Strategy) -> int:
        return sum(len(config.devices) == 1 and config.devices[0] == 1 for config in strategy.operators.values())

    costs = TableCosts(3, lacking)
    states = [s for s in all_strategies(space) if lacking(s) == 0]
    target: dict[object, float] = {key_of(s): exp(-BETA * costs.cost(s)[0] / 1000) for s in states}
    assert len(target) == 9
    assert distance(visits(Kernel(space), costs, states[0], 40_000), target) < 0.02


A = Strategy({"layer.0": OpConfig((1,), (0,))})
B = Strategy({"layer.0": OpConfig((1,), (1,))})


class Two(Both):
    """Costs of A and B."""

    def __init__(self, a_ns: int, b_ns: int, overflow_bytes: int = 0) -> None:
        self.a_ns, self.b_ns, self.lacking = a_ns, b_ns, overflow_bytes

    def cost(self, strategy: Strategy) -> tuple[int, int]:
        return (self.a_ns, 0) if strategy == A else (self.b_ns, self.lacking)


def propose_b(log_ratio: float = 0.0):  # type: ignore[no-untyped-def]
    return lambda rng, strategy: Proposal(B, "test", ("layer.0",), log_ratio)


def accepted_share(costs: Two, log_ratio: float = 0.0, start_ns: int = 1000) -> float:
    rng, draws = random.Random(0), 4000
    state = ChainState(A, costs.a_ns, start_ns)
    return sum(step(rng, state, propose_b(log_ratio), costs, BETA)[1].accepted for _ in range(draws)) / draws


def test_acceptance_is_relative_to_the_start() -> None:
    assert accepted_share(Two(500, 600)) == pytest.approx(exp(-1), abs=0.03)
    assert accepted_share(Two(500, 600), start_ns=500) == pytest.approx(exp(-2), abs=0.03)
    assert accepted_share(Two(500, 600), log_ratio=0.5) == pytest.approx(exp(-0.5), abs=0.03)
    assert accepted_share(Two(500, 400), log_ratio=-2.0) == pytest.approx(exp(-1), abs=0.03)
    assert accepted_share(Two(500, 500)) == 1.0
    assert accepted_share(Two(500, 400)) == 1.0


def test_step_is_pure() -> None:
    state = ChainState(A, 500, 1000)
    once = [step(random.Random(seed), state, propose_b(), Two(500, 600), BETA) for seed in range(20)]
    again = [step(random.Random(seed), state, propose_b(), Two(500, 600), BETA) for seed in range(20)]
    assert once == again
    assert state == ChainState(A, 500, 1000)
    assert {info.accepted for _, info in once} == {True, False}
    for new, info in once:
        assert new == (ChainState(B, 600, 1000) if info.accepted else state)
        assert info.log_acceptance == pytest.approx(-1.0)


def test_strategy_that_does_not_fit_is_rejected_however_fast() -> None:
    state = ChainState(A, 500, 1000)
    new, info = step(random.Random(0), state, propose_b(), Two(500, 1, overflow_bytes=8), BETA)
    assert new is state
    assert (info.cost_ns, info.overflow_bytes, info.accepted, info.log_acceptance) == (1, 8, False, -inf)


def test_move_without_effect_evaluates_nothing() -> None:
    state = ChainState(A, 500, 1000)
    new, info = step(random.Random(0), state, lambda rng, strategy: None, Two(500, 1), BETA)
    assert new is state and info.proposal is None and not info.accepted
