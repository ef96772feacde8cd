"""``--pin`` and ``--forbid``: what they mean, and that nothing that the search proposes or returns disobeys."""

from __future__ import annotations

import random
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import permutations
from math import exp, inf, prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from soap.errors import StrategyError
from soap.model.graph import OperatorGraph
from soap.search.chains import search
from soap.search.constraints import Pairs, brought_inside, nearest, out_of_stage, pairs_of, parse
from soap.search.descent import propose_descent
from soap.search.options import SearchOptions
from soap.search.space import Space, build_space, grid_of, make_config
from soap.search.starts import reference_strategies, starting_strategies
from soap.strategy.classical import CLASSICAL
from soap.strategy.config import OpConfig, Strategy, check_config
from tests.extent import FEW
from tests.graph_builder import mlp, transformer
from tests.search.toys import layers, simulated
from tests.strategies import cluster

FOUR = cluster([2, 2])
GRAPH = transformer(batch=4, layers=2)


def obeys(graph: OperatorGraph, strategy: Strategy, pins: Pairs, forbidden: Pairs) -> bool:
    """Read from the texts anew, in the plainest way."""
    for op in graph.operators:
        config = strategy.operators[op.name]
        degrees = {"replicas": config.replicas, **{f.name: d for f, d in zip(op.factors, config.degrees, strict=True)}}
        kinds = {f.kind.value: f.name for f in op.factors}
        for pattern, spec in pins:
            if fnmatchcase(op.name, pattern):
                split, _, devices = spec.partition("@")
                if devices and not {*config.devices} <= {*map(int, devices.split(","))}:
                    return False
                if split:
                    wanted = dict.fromkeys(degrees, 1)
                    for part in split.split(","):
                        name, _, degree = part.partition(":")
                        wanted[name if name in degrees else kinds[name]] = int(degree)
                    if degrees != wanted:
                        return False
        for pattern, spec in forbidden:
            if fnmatchcase(op.name, pattern):
                if spec.startswith("@"):
                    if {*config.devices} & {*map(int, spec[1:].split(","))}:
                        return False
                elif any(degrees[name] > 1 for name in degrees if spec in (name, next((k for k, n in kinds.items() if n == name), ""))):
                    return False
    return True


PINS = (
    ("*.norm*", "sample:2"),
    ("0.fc1", "n:4"),
    ("1.*", "sample:2"),
    ("embedding", "replicas:2@1,3"),
    ("*.fc2", "@0,1"),
    ("head", "b:2,n:2"),
    ("copy1", "replicas:4"),
)
FORBIDDEN = (("*", "reduction"), ("*", "@3"), ("0.*", "replicas"), ("*add*", "attribute"), ("embedding", "v"), ("1.fc1", "@0,1"))


def space_for(pins: Pairs, forbidden: Pairs) -> Space:
    space = build_space(GRAPH, 4, allowed=parse(GRAPH, 4, pins, forbidden))
    starts = starting_strategies(GRAPH, FOUR, None, None, 0).values()
    return replace(space, references=tuple(brought_inside(space, s) for s in reference_strategies(GRAPH, FOUR, starts)))


@given(
    st.lists(st.sampled_from(PINS), unique=True, max_size=3),
    st.lists(st.sampled_from(FORBIDDEN), unique=True, max_size=3),
    st.integers(0, 999),
)
def test_starts_and_proposals_of_all_kinds_stay_inside(pins: Pairs, forbidden: Pairs, seed: int) -> None:
    try:
        space = space_for(pins, forbidden)
    except StrategyError as error:
        assert "nothing is left" in str(error)
        return
    rng = random.Random(seed)
    for reference in space.references:
        reference.validate(GRAPH, 4)
        assert obeys(GRAPH, reference, pins, forbidden)
    strategy = rng.choice(space.references)
    for _ in range(60):
        proposal = propose_descent(rng, space, strategy)
        if proposal is not None:
            proposal.strategy.validate(GRAPH, 4)
            assert obeys(GRAPH, proposal.strategy, pins, forbidden), (proposal.move, pins, forbidden)
            strategy = proposal.strategy


@given(
    st.lists(st.sampled_from(PINS), unique=True, max_size=2),
    st.lists(st.sampled_from(FORBIDDEN), unique=True, max_size=2),
    st.integers(0, 99),
)
@FEW
def test_what_a_search_returns_obeys(pins: Pairs, forbidden: Pairs, seed: int) -> None:
    costs = simulated(GRAPH, FOUR)
    try:
        found = search(GRAPH, FOUR, costs, SearchOptions(budget=40, seed=seed, pins=pins, forbidden=forbidden))
    except StrategyError as error:
        assert "nothing is left" in str(error)
        return
    assert obeys(GRAPH, found.strategy, pins, forbidden)
    assert all(obeys(GRAPH, start.strategy, pins, forbidden) for start in found.starts)
    assert found.data_parallel_ns == costs.makespan_ns(CLASSICAL["data_parallel"](GRAPH, FOUR))  # the real one, whether it obeys or not
    assert found.cost_ns == costs.makespan_ns(found.strategy)


def test_without_constraints_the_search_is_what_it_was() -> None:
    first, second = build_space(GRAPH, 4), build_space(GRAPH, 4, allowed={})
    assert first.groups == second.groups
    assert [own.grids for own in first.operators] == [own.grids for own in second.operators]
    assert all(second.allows(i, OpConfig((1,) * len(op.factors), (0,))) for i, op in enumerate(GRAPH.operators))


def test_a_restricted_space_has_placements_on_its_own_devices_and_probabilities_that_add_up() -> None:
    graph = layers(1, rows=6)
    own = build_space(graph, 4, allowed=parse(graph, 4, (), [("layer.0", "@1")])).operators[0]
    assert own.devices == (0, 2, 3)
    assert set(own.placements((1, 1))) == {(0,), (2,), (3,)}
    assert set(own.placements((1, 2))) == {(0, 2), (2, 3)}  # of four: the stride and the second block; of three: the first two, 0 and 2
    assert set(own.placements((1, 3))) == {(0, 2, 3)}
    assert own.placements((1, 4)) == () and (1, 4) not in own.grids
    every = {make_config(grid, devices) for grid in own.grids for devices in permutations(range(4), prod(grid))}
    assert sum(exp(own.log_weight(config)) for config in every) / own.mass == pytest.approx(1.0, abs=1e-12)
    inside = [config for config in every if own.log_weight(config) > -inf]
    assert all(1 not in config.devices for config in inside) and any(own.log_weight(config) < 0 for config in inside)  # shuffled ones too


def test_a_pinned_operator_keeps_its_grid_whatever_the_usual_degrees_are() -> None:
    graph = mlp(batch=6)
    space = build_space(graph, 8, allowed=parse(graph, 8, [("fc0", "b:5")], ()))
    own = space.operators[graph.index["fc0"]]
    assert own.grids == ((1, 5, 1, 1),)
    for config in own.structured():
        check_config(graph.operators[graph.index["fc0"]], config, 8)


def test_repeated_layers_form_groups_only_with_those_constrained_alike() -> None:
    graph = layers(4, rows=4)
    assert build_space(graph, 4).groups == ((0, 1, 2, 3),)
    assert build_space(graph, 4, allowed=parse(graph, 4, [("layer.[01]", "b:2")], ())).groups == ((0, 1), (2, 3))
    assert build_space(graph, 4, allowed=parse(graph, 4, [("layer.0", "b:2")], ())).groups == ((1, 2, 3),)


def test_nearest_keeps_degrees_and_devices_where_it_can() -> None:
    graph = mlp()
    op = graph.operators[0]
    usual = OpConfig((4, 1, 1), (0, 1, 2, 3))

    def inside(pins: Pairs, forbidden: Pairs, config: OpConfig) -> OpConfig:
        space = build_space(graph, 4, allowed=parse(graph, 4, pins, forbidden))
        others = {o.name: OpConfig((1,) * len(o.factors), (0,)) for o in graph.operators}
        return brought_inside(space, Strategy({**others, op.name: config})).operators[op.name]

    assert inside([("fc0", "sample:4")], (), usual) is usual
    assert inside([("fc0", "sample:2")], (), usual) == OpConfig((2, 1, 1), (0, 1))
    assert inside([("fc0", "parameter:4")], (), usual) == OpConfig((1, 1, 4), (0, 1, 2, 3))
    assert inside([("fc0", "@2,3")], (), usual) == OpConfig((2, 1, 1), (2, 3))
    assert inside((), [("fc0", "@0")], OpConfig((1, 1, 2), (0, 1))).degrees == (1, 1, 2)
    assert inside((), [("fc0", "sample")], usual).degrees[0] == 1
    own = build_space(graph, 4).operators[0]
    assert nearest(own, OpConfig((4, 1, 1), (0, 0, 0, 0))).degrees == (4, 1, 1)


def test_baseline_of_a_constrained_search_is_real_data_parallelism() -> None:
    graph = mlp()
    costs = simulated(graph, FOUR)
    found = search(graph, FOUR, costs, SearchOptions(budget=20, pins=[("*", "sample:2")]))
    usual = CLASSICAL["data_parallel"](graph, FOUR)
    assert found.data_parallel_ns == costs.makespan_ns(usual)
    assert next(s for s in found.starts if s.name == "data_parallel").strategy != usual
    assert all(grid_of(config)[:2] == (1, 2) and prod(grid_of(config)) == 2 for config in found.strategy.operators.values())


def test_everything_pinned_leaves_nothing_to_search() -> None:
    graph = layers(2, rows=4)
    found = search(graph, FOUR, simulated(graph, FOUR), SearchOptions(budget=50, pins=[("*", "b:4@0-3")]))
    assert {grid_of(config) for config in found.strategy.operators.values()} == {(1, 4)}


@pytest.mark.parametrize(
    ("pins", "forbidden", "words"),
    [
        ([("fcx*", "sample:2")], [], ["pins fcx*=sample:2", "no operator", "fc0"]),
        ([], [("fcx", "reduction")], ["forbidden fcx=reduction", "no operator", "fc0"]),
        ([("fc0", "channel:2")], [], ["no factor 'channel'", "b (sample)", "k (reduction)", "n (parameter)"]),
        ([("*", "parameter:2")], [], ["'act0'", "no factor 'parameter'", "d1 (attribute)"]),
        ([], [("*", "channel")], ["no factor 'channel'", "b (sample)"]),
        ([("fc0", "sample:9")], [], ["degree 9", "'b'", "size 8", "lower"]),
        ([("fc0", "sample:8")], [], ["'fc0'", "8 tiles", "4 of 4 devices"]),
        ([("fc0", "sample:4@0,1")], [], ["'fc0'", "4 tiles", "2 of 4 devices"]),
        ([("fc0", "sample:2")], [("*", "sample")], ["nothing is left", "'fc0'", "b"]),
        ([("fc0", "sample:2"), ("fc*", "n:2")], [], ["fc0", "in two ways by pins"]),
        ([("fc0", "@0,1")], [("*", "@0-2")], ["nothing is left", "'fc0'", "device"]),
        ([], [("*", "@0-3")], ["nothing is left", "device"]),
        ([("fc0", "sample:2@4")], [], ["device 4", "0 to 3"]),
        ([("fc0", "sample:2@3-1")], [], ["3-1", "expected numbers"]),
        ([("fc0", "sample:two")], [], ["'sample:two'", "sample:4"]),
        ([("fc0", "sample:0")], [], ["'sample:0'"]),
        ([("fc0", "sample")], [], ["'sample'", "sample:4"]),
        ([("fc0", "sample:2,b:2")], [], ["twice"]),
        ([("fc0", "sample:2,,n:2")], [], ["expected FACTOR:DEGREE"]),
        ([("fc0", "@")], [], ["devices"]),
        ([], [("fc0", ",")], ["expected names or kinds"]),
    ],
)
def test_what_cannot_be_is_said_in_one_line(pins: Pairs, forbidden: Pairs, words: list[str]) -> None:
    with pytest.raises(StrategyError) as caught:
        parse(mlp(), 4, pins, forbidden)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message


def test_stages_of_a_pipeline() -> None:
    graph = layers(3)
    names = [op.name for op in graph.operators]
    strategy = replace(CLASSICAL["single_device"](graph, FOUR), stages={names[1]: 1})

    def space(pins: Pairs, forbidden: Pairs = ()) -> Space:
        return build_space(graph, 4, allowed=parse(graph, 4, pins, forbidden))

    for pins, forbidden in (([(names[0], "stage:0"), (names[1], "stage:1")], []), ([], [(names[1], "stage:0,@3")])):
        assert out_of_stage(space(pins, forbidden), strategy) is None
        wrong = out_of_stage(space(pins, forbidden), replace(strategy, stages={}))
        assert wrong is not None and wrong.startswith(f"operator {names[1]!r} is in stage 0 of 1; pins or forbidden wants ")
    inside = brought_inside(space([(names[2], "sample:2,stage:1@2-3")]), strategy)
    assert inside.stages == strategy.stages and {*inside.operators[names[2]].devices} == {2, 3}
    with pytest.raises(StrategyError, match="wants 2: start from a strategy with such stages"):
        brought_inside(space([(names[2], "stage:2")]), strategy)
    with pytest.raises(StrategyError, match="has another stage by pins or forbidden"):
        space([(names[2], "stage:2")], [("*", "stage:2")])


def test_a_range_of_numbers_in_a_pattern_stands_for_each() -> None:
    assert [*parse(GRAPH, 4, [("0-1.fc1", "@0")], [])] == ["0.fc1", "1.fc1"]
    with pytest.raises(StrategyError, match="stands for more than 4096 patterns"):
        parse(GRAPH, 4, [("x.0-5000.y", "@0")], [])


def test_a_kind_of_two_factors_must_be_named() -> None:
    with pytest.raises(StrategyError, match=r"several factors 'attribute'.*d1 \(attribute\), d2 \(attribute\)"):
        parse(GRAPH, 4, [("0.add1", "attribute:2")], ())
    assert parse(GRAPH, 4, [("0.add1", "d2:2")], ())["0.add1"].grid == (1, 1, 1, 2)


def test_a_mapping_or_pairs() -> None:
    assert pairs_of({"a": "sample:2", "b": "@1"}) == pairs_of([("a", "sample:2"), ("b", "@1")]) == (("a", "sample:2"), ("b", "@1"))
