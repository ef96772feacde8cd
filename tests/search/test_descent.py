from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from soap.search.descent import CHANGES, adopt, align, borrow, borrow_kind, propose_descent, spread
from soap.search.space import build_space
from soap.strategy.config import OpConfig, Strategy
from tests.extent import FEW
from tests.graph_builder import mlp
from tests.search.toys import layers
from tests.strategies import graphs, strategies_for

ONE, SPLIT = OpConfig((1,), (0,)), OpConfig((2,), (0, 1))


def everywhere(count: int, config: OpConfig) -> Strategy:
    return Strategy({f"layer.{i}": config for i in range(count)})


def test_borrow_takes_a_stretch_of_a_reference() -> None:
    space = build_space(layers(5), 2, references=[everywhere(5, SPLIT)])
    rng, seen = random.Random(0), set()
    for _ in range(200):
        change = borrow(rng, space, everywhere(5, ONE))
        assert set(change.values()) == {SPLIT}
        assert list(change) == list(range(min(change), max(change) + 1))
        seen.add(len(change))
    assert seen == {1, 2, 4}


def test_borrow_kind_takes_all_of_a_kind_or_a_group() -> None:
    graph = mlp(widths=(16, 16, 16))
    reference = Strategy({op.name: OpConfig((2, *(1 for _ in op.factors[1:])), (0, 1)) for op in graph.operators})
    space = build_space(graph, 2, references=[reference])
    rng = random.Random(0)
    seen = {tuple(graph.operators[i].name for i in borrow_kind(rng, space, reference)) for _ in range(200)}
    assert seen == {("fc0", "fc1", "head"), ("fc0", "fc1"), ("act0", "act1"), ("head",), ("cross_entropy5",)}


def test_align_follows_a_neighbour_in_every_layer() -> None:
    space = build_space(layers(4), 2)
    state = everywhere(4, SPLIT)
    rng = random.Random(0)
    changes = [align(rng, space, state) for _ in range(100)]
    assert any(len(change) >= 3 and set(change.values()) == {SPLIT} for change in changes)


def test_spread_changes_a_neighbourhood_alike() -> None:
    space = build_space(layers(9), 2, shuffled=0.0)
    rng = random.Random(0)
    for _ in range(50):
        change = spread(rng, space, everywhere(9, ONE))
        assert len({c.devices for c in change.values()}) == 1


@given(st.data())
@FEW
def test_proposals_are_legal_and_name_what_changes(data: st.DataObject) -> None:
    graph = data.draw(graphs())
    state = data.draw(strategies_for(graph, 3))
    space = build_space(graph, 3, references=[data.draw(strategies_for(graph, 3))])
    rng = random.Random(data.draw(st.integers(0, 99)))
    for _ in range(20):
        proposal = propose_descent(rng, space, state)
        if proposal is None:
            continue
        proposal.strategy.validate(graph, 3)
        assert proposal.move in CHANGES
        changed = {name for name, config in proposal.strategy.operators.items() if state.operators[name] != config}
        assert changed == set(proposal.operators)
        state = proposal.strategy


def test_without_references_nothing_is_borrowed() -> None:
    space = build_space(layers(3), 2)
    rng = random.Random(0)
    moves = {p.move for p in (propose_descent(rng, space, everywhere(3, ONE)) for _ in range(100)) if p is not None}
    assert moves == {"align", "spread"} or moves == {"spread"}
    assert propose_descent(rng, build_space(layers(3), 1), everywhere(3, ONE)) is None


def test_adopt_takes_the_whole_reference() -> None:
    space = build_space(layers(3), 2)
    proposal = adopt(space, everywhere(3, ONE).with_operator("layer.1", SPLIT), everywhere(3, SPLIT))
    assert proposal is not None
    assert (proposal.strategy, proposal.move, proposal.operators) == (everywhere(3, SPLIT), "adopt", ("layer.0", "layer.2"))
    assert adopt(space, everywhere(3, ONE), everywhere(3, ONE)) is None
