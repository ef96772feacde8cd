from __future__ import annotations

import random
from collections import Counter
from itertools import permutations
from math import exp, inf, log, perm, prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from soap.search.space import OperatorSpace, build_space, degree_choices, grid_of, grids_of, make_config, placements
from soap.strategy.config import OpConfig, check_config
from tests.graph_builder import mlp, transformer
from tests.search.toys import drawn_from, layers


def test_one_tile_may_lie_on_any_device() -> None:
    assert placements((1, 1, 1), 4) == ((0,), (1,), (2,), (3,))


def test_two_tiles_lie_on_aligned_blocks_or_even_strides() -> None:
    assert set(placements((1, 2), 4)) == {(0, 1), (2, 3), (0, 2), (1, 3)}


def test_a_full_grid_has_one_placement_per_order_of_its_axes() -> None:
    assert set(placements((1, 2, 1, 2), 4)) == {(0, 1, 2, 3), (0, 2, 1, 3)}
    assert len(placements((2, 2, 2), 8)) == 6
    assert {placements((2, 2, 2), 8)[0], placements((2, 2, 2), 8)[-1]} == {(0, 1, 2, 3, 4, 5, 6, 7), (0, 4, 2, 6, 1, 5, 3, 7)}
    assert len(placements((2, 2, 2, 2), 16)) == 2


@given(st.integers(1, 12), st.data())
def test_placements_are_distinct_devices_that_exist(device_count: int, data: st.DataObject) -> None:
    lengths = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4).filter(lambda n: prod(n) <= device_count)))
    found = placements(lengths, device_count)
    assert len(set(found)) == len(found) >= 1
    for devices in found:
        assert len(set(devices)) == len(devices) == prod(lengths)
        assert set(devices) <= set(range(device_count))


def test_degrees_are_divisors_powers_of_two_and_the_whole_size() -> None:
    assert degree_choices(100, 12) == [1, 2, 3, 4, 6, 8, 12]
    assert degree_choices(5, 12) == [1, 2, 3, 4, 5]
    assert degree_choices(7, 12) == [1, 2, 3, 4, 6, 7]
    assert degree_choices(7, 12, every=True) == [1, 2, 3, 4, 5, 6, 7]


def test_grids_that_use_the_devices_evenly_come_first() -> None:
    assert grids_of(layers(1, rows=3).operators[0], 4) == ((1, 1), (4, 1), (1, 2), (2, 1), (2, 2), (1, 3))


def test_an_operator_without_a_rule_is_only_replicated() -> None:
    graph = mlp()
    op = graph.operators[0]
    whole = type(op)(op.name, op.kind, op.factors, op.inputs, op.parameters, op.outputs, partitionable=False)
    assert {grid[1:] for grid in grids_of(whole, 4)} == {(1, 1, 1)}
    assert {grid[0] for grid in grids_of(whole, 4)} == {1, 2, 4}


def test_every_structured_configuration_is_legal_distinct_and_of_weight_one() -> None:
    for graph in (mlp(batch=6), transformer(batch=3)):
        space = build_space(graph, 4)
        for op, own in zip(graph.operators, space.operators, strict=True):
            configs = list(own.structured())
            assert len(set(configs)) == len(configs) == own.structured_count
            for config in configs:
                check_config(op, config, 4)
                assert own.log_weight(config) == 0.0


def test_probabilities_of_all_configurations_add_up_to_one() -> None:
    own = build_space(mlp(batch=6), 3).operators[0]
    every = {
        make_config(grid, devices) for grid in own.grids for devices in permutations(range(3), prod(grid))
    }
    assert sum(exp(own.log_weight(config)) for config in every) / own.mass == pytest.approx(1.0, abs=1e-12)


def test_shuffled_placements_share_their_weight() -> None:
    own = OperatorSpace([(1, 2)], 4, shuffled=0.06)
    assert own.log_weight(OpConfig((2,), (1, 0))) == pytest.approx(log(0.06 * 4 / (perm(4, 2) - 4)))
    assert own.log_weight(OpConfig((2,), (0, 0))) == -inf
    assert own.log_weight(OpConfig((1,), (0,))) == -inf
    assert own.log_weight(OpConfig((2,), (0, 4))) == -inf
    assert OperatorSpace([(1, 2)], 4, shuffled=0.0).log_weight(OpConfig((2,), (1, 0))) == -inf


def test_structured_configurations_are_drawn_alike() -> None:
    own = build_space(layers(1, rows=4), 3, shuffled=0.5).operators[0]
    rng, draws = random.Random(1), 30_000
    structured = Counter(own.draw_structured(rng) for _ in range(draws))
    assert set(structured) == set(own.structured())
    assert all(abs(n - draws / own.structured_count) < 5 * (draws / own.structured_count) ** 0.5 for n in structured.values())


def test_large_clusters_stay_within_the_cap() -> None:
    graph = transformer(batch=64, length=64, d=64, heads=16, layers=1)
    space = build_space(graph, 64)
    rng = random.Random(0)
    for op, own in zip(graph.operators, space.operators, strict=True):
        config = drawn_from(own, rng)
        check_config(op, config, 64)
        assert grid_of(config) in own.grids
    assert max(len(own.grids) for own in space.operators) <= 2048


def test_one_device_leaves_nothing_to_move() -> None:
    assert build_space(mlp(), 1).movable == ()
