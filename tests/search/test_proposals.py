from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from itertools import product
from math import exp, inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.oracles.exhaustive import all_strategies
from soap.search.constraints import parse
from soap.search.proposals import MOVES, Kernel, Move, Proposal, informed_candidates, move_weights
from soap.search.space import Space, build_space
from soap.strategy.config import OpConfig, Strategy
from tests.extent import FEW, often, rows_often
from tests.graph_builder import mlp
from tests.search.toys import Key, key_of, layers
from tests.strategies import graphs, strategies_for


def weight(space: Space, strategy: Strategy) -> float:
    """Logarithm of the reference measure."""
    return sum(
        own.log_weight(strategy.operators[op.name]) for op, own in zip(space.graph.operators, space.operators, strict=True)
    )


def proposed(move: Move, space: Space, states: Iterable[Strategy], draws: int) -> dict[tuple[Key, Key], tuple[int, Proposal]]:
    """(state, proposed state) -> how often in so many draws, and one of the proposals."""
    rng = random.Random(7)
    found: dict[tuple[Key, Key], tuple[int, Proposal]] = {}
    for state in states:
        for _ in range(draws):
            proposal = move(rng, space, state)
            if proposal is not None:
                pair = (key_of(state), key_of(proposal.strategy))
                found[pair] = (found.get(pair, (0, proposal))[0] + 1, proposal)
    return found


def assert_balanced(move: Move, space: Space, states: list[Strategy], draws: int) -> None:
    """q(back) weight(new) / (q(forth) weight(old)), counted, is what the proposals state."""
    found = proposed(move, space, states, draws)
    by_key = {key_of(state): state for state in states}
    assert found
    for (old, new), (count, proposal) in found.items():
        back, reverse = found.get((new, old), (0, None))
        assert reverse is None or reverse.log_ratio == pytest.approx(-proposal.log_ratio, abs=1e-9)
        stated = proposal.log_ratio - weight(space, by_key[new]) + weight(space, by_key[old])
        total = count + back
        expected = total / (1 + exp(stated))  # of the draws that go forth or back, those that go forth
        sigma = max(1.0, (expected * (total - expected) / total) ** 0.5)
        assert abs(count - expected) < 5 * sigma, (proposal.move, old, new, count, back, stated)


@pytest.mark.parametrize("name", ["redraw", "place", "split", "group"])
def test_structured_states_balance(name: str) -> None:
    space = build_space(layers(2), 2, shuffled=0.0)
    assert_balanced(MOVES[name], space, list(all_strategies(space)), 2000)


def test_informed_move_states_its_ratio() -> None:
    graph = layers(2)
    references = [Strategy({op.name: config for op in graph.operators}) for config in (OpConfig((2,), (0, 1)), OpConfig((1,), (1,)))]
    space = build_space(graph, 2, references=references, shuffled=0.0)
    assert_balanced(MOVES["informed"], space, list(all_strategies(space)), 2000)


@pytest.mark.slow
@pytest.mark.parametrize("name", often(["redraw", "place", "split", "informed", "group"], {"split"}))
def test_shuffled_states_balance(name: str) -> None:
    graph = layers(2)
    reference = Strategy({op.name: OpConfig((2,), (0, 1)) for op in graph.operators})
    space = build_space(graph, 2, references=(reference,), shuffled=0.5)
    shuffled = [OpConfig((2,), (1, 0)), OpConfig((1,), (1, 0), 2)]
    configs = [*space.operators[0].structured(), *shuffled]
    states = [Strategy({"layer.0": a, "layer.1": b}) for a, b in product(configs, configs)]
    assert_balanced(MOVES[name], space, states, 1500)


RESTRICTED = list(product(["layer.*", "layer.0"], ["redraw", "place", "split", "informed", "group"]))


@pytest.mark.slow
@pytest.mark.parametrize(("pattern", "name"), rows_often(RESTRICTED, RESTRICTED[::2]))
def test_restricted_spaces_balance(name: str, pattern: str) -> None:
    """Where the user allows only some devices, in all layers or in one of two equal ones."""
    graph = layers(2)
    reference = Strategy({op.name: OpConfig((2,), (0, 2)) for op in graph.operators})
    allowed = parse(graph, 3, [("layer.*", "@0,2")] if pattern == "layer.*" else [("layer.0", "b:2@0,2")], [("*", "@1")])
    space = build_space(graph, 3, references=(reference,), shuffled=0.5, allowed=allowed)
    swapped = [OpConfig((2,), (2, 0)), OpConfig((1,), (2, 0), 2)]
    options = [
        [*own.structured(), *(config for config in swapped if own.log_weight(config) > -inf)] for own in space.operators
    ]
    assert [len(own) for own in options] == ([6, 6] if pattern == "layer.*" else [2, 6])
    states = [Strategy({"layer.0": a, "layer.1": b}) for a, b in product(*options)]
    assert bool(space.groups) == (pattern == "layer.*")
    assert_balanced(MOVES[name], space, states, 1500)


def test_place_keeps_the_grid_and_split_keeps_the_devices() -> None:
    space = build_space(mlp(batch=8), 4)
    rng = random.Random(0)
    state = Strategy({op.name: OpConfig((2, *(1 for _ in op.factors[1:])), (0, 1)) for op in space.graph.operators})
    for _ in range(200):
        if (proposal := MOVES["place"](rng, space, state)) is not None:
            (name,) = proposal.operators
            assert proposal.strategy.operators[name].degrees == state.operators[name].degrees
        if (proposal := MOVES["split"](rng, space, state)) is not None:
            (name,) = proposal.operators
            assert proposal.strategy.operators[name].devices == state.operators[name].devices


def test_group_moves_equal_layers_that_are_configured_alike() -> None:
    space = build_space(layers(4), 2)
    one, other = OpConfig((1,), (0,)), OpConfig((2,), (0, 1))
    state = Strategy({"layer.0": one, "layer.1": one, "layer.2": other, "layer.3": one})
    rng = random.Random(3)
    seen = Counter(p.operators for p in (MOVES["group"](rng, space, state) for _ in range(300)) if p is not None)
    assert set(seen) == {("layer.0", "layer.1", "layer.3"), ("layer.2",)}


def test_group_does_not_merge_what_it_could_not_part_again() -> None:
    space = build_space(layers(2), 2, shuffled=0.0)
    state = Strategy({"layer.0": OpConfig((1,), (0,)), "layer.1": OpConfig((2,), (0, 1))})
    rng = random.Random(3)
    for _ in range(300):
        proposal = MOVES["group"](rng, space, state)
        assert proposal is None or proposal.strategy.operators["layer.0"] != proposal.strategy.operators["layer.1"]


def test_way_into_the_space_is_free_and_there_is_none_out() -> None:
    space = build_space(layers(1), 2)
    outside = Strategy({"layer.0": OpConfig((2,), (0, 0))})
    rng = random.Random(0)
    for name in ("redraw", "informed", "group"):
        proposals = [p for p in (MOVES[name](rng, space, outside) for _ in range(100)) if p is not None]
        assert proposals
        assert all(p.log_ratio == 0.0 and weight(space, p.strategy) > -inf for p in proposals)


def test_sync_has_no_weight_where_parameters_have_no_choice() -> None:
    space = build_space(mlp(), 2)
    assert move_weights(space)["sync"] == 0.0
    assert MOVES["sync"](random.Random(0), space, Strategy({})) is None


def test_kernel_draws_moves_by_weight() -> None:
    space = build_space(layers(3), 4)
    state = Strategy({op.name: OpConfig((1,), (0,)) for op in space.graph.operators})
    kernel, rng = Kernel(space, {"redraw": 1.0, "group": 0.0}), random.Random(0)
    assert {p.move for p in (kernel(rng, state) for _ in range(50)) if p is not None} == {"redraw"}
    assert Kernel(build_space(layers(3), 1))(rng, state) is None


@given(st.data())
@FEW
def test_proposals_are_legal_differ_and_have_finite_ratios(data: st.DataObject) -> None:
    graph = data.draw(graphs())
    state = data.draw(strategies_for(graph, 4))
    space = build_space(graph, 4, references=(data.draw(strategies_for(graph, 4)),))
    rng, kernel = random.Random(data.draw(st.integers(0, 99))), Kernel(space)
    for _ in range(20):
        proposal = kernel(rng, state)
        if proposal is None:
            continue
        proposal.strategy.validate(graph, 4)
        assert proposal.operators and abs(proposal.log_ratio) < inf
        for op in graph.operators:
            changed = proposal.strategy.operators[op.name] != state.operators[op.name]
            assert changed == (op.name in proposal.operators)
        state = proposal.strategy


def test_candidates_come_from_neighbours_and_references() -> None:
    graph = layers(2)
    reference = Strategy({op.name: OpConfig((1,), (1,)) for op in graph.operators})
    space = build_space(graph, 2, references=(reference,))
    state = Strategy({"layer.0": OpConfig((2,), (0, 1)), "layer.1": OpConfig((1,), (0,))})
    assert informed_candidates(space, state, 1)[0] == OpConfig((2,), (0, 1))
    assert informed_candidates(space, state, 1)[-1] == OpConfig((1,), (1,))
