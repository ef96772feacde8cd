"""Uneven shares of a factor: how long the parts are, what configurations and files accept, and who follows them."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from soap.cli.plain_text import split
from soap.errors import StrategyError
from soap.model.batch import MicroBatches
from soap.model.regions import balanced, proportional
from soap.plan.copies import UnfoldableError, find_copies
from soap.plan.tiling import tiles_of
from soap.strategy import json_file
from soap.strategy.classical import data_parallel
from soap.strategy.config import OpConfig, Strategy, check_config, check_parts
from soap.strategy.named import named
from soap.strategy.shares import shares_of, weights_of
from soap.strategy.uneven import dealt
from tests.extent import MANY
from tests.graph_builder import mlp
from tests.strategies import CPU, cluster

GRAPH, TWO = mlp(batch=12), cluster([1, 1], CPU)
FIRST = GRAPH.operators[0]


@MANY
@given(st.integers(0, 200), st.lists(st.integers(1, 9), min_size=1, max_size=8))
def test_parts_are_within_one_of_their_shares(size: int, weights: list[int]) -> None:
    found = proportional(size, weights)
    assert [start for start, _ in found] == [0, *(stop for _, stop in found[:-1])] and found[-1][1] == size
    assert all(
        abs((stop - start) * sum(weights) - size * weight) < sum(weights) for (start, stop), weight in zip(found, weights, strict=True)
    )


@MANY
@given(st.integers(0, 200), st.integers(1, 12), st.integers(1, 5))
def test_equal_weights_are_balanced_parts(size: int, parts: int, weight: int) -> None:
    lengths = [stop - start for start, stop in balanced(size, parts)]
    assert lengths == [size // parts + (part < size % parts) for part in range(parts)]
    assert proportional(size, [weight] * parts) == balanced(size, parts)


def uneven(*weights: int) -> OpConfig:
    """Samples of the first operator in such parts, one a device."""
    return OpConfig((len(weights), 1, 1), tuple(range(len(weights))), shares=(weights,))


def test_shares_are_in_lowest_terms_and_equal_ones_are_none() -> None:
    assert uneven(8, 4) == uneven(2, 1) and uneven(2, 1).shares == ((2, 1),) and uneven(3, 3) == OpConfig((2, 1, 1), (0, 1))
    both = OpConfig((2, 1, 2), (0, 1, 2, 3), shares=((), (6, 3)))
    assert both.shares == ((), (2, 1)) and both.weights == ((1, 1), (1,), (2, 1))
    assert shares_of(both.degrees, both.weights) == both.shares and weights_of(both.degrees, both.shares) == both.weights
    assert both.placed((2, 1, 1), (0, 1)).shares == () and both.placed_like(uneven(3, 1)) == uneven(3, 1)


@pytest.mark.parametrize(
    ("shares", "words"),
    [
        (((2, 1), (1, 1)), r"shares \[\[2, 1\], \[1, 1\]\] for degrees \[2, 1, 1\]: expected a list for each factor that is split"),
        (((2, 1, 1),), r"of 2 numbers, or none for equal parts"),
        (((2, 0),), r"expected whole numbers from 1 to 1048576"),
    ],
)
def test_bad_shares_are_one_line(shares: tuple[tuple[int, ...], ...], words: str) -> None:
    with pytest.raises(StrategyError, match=words):
        OpConfig((2, 1, 1), (0, 1), shares=shares)


def test_no_device_is_left_without_samples() -> None:
    check_config(FIRST, uneven(5, 1), 2)
    words = f"operator '{FIRST.name}': shares 30:1 of factor 'b', of size 12, leave part 1, on device 1, without any; expected shares"
    with pytest.raises(StrategyError, match=words):
        check_config(FIRST, uneven(30, 1), 2)
    cut = MicroBatches(GRAPH, 4)
    check_parts(cut, 0, uneven(2, 1))
    with pytest.raises(StrategyError, match=r"shares 5:1 of factor 'b' leave a part without any in the smallest of 4 micro-batches"):
        check_parts(cut, 0, uneven(5, 1))


def test_tiles_have_their_shares_in_every_micro_batch() -> None:
    whole = [tile.intervals[0] for tile in tiles_of(GRAPH, 0, uneven(2, 1))]
    assert whole == [(0, 8), (8, 12)]
    parts = [tile.intervals[0] for tile in tiles_of(GRAPH, 0, uneven(2, 1), MicroBatches(GRAPH, 2))]
    assert parts == [(0, 4), (4, 6), (6, 10), (10, 12)]


def two_to_one() -> Strategy:
    strategy = data_parallel(GRAPH, TWO)
    return strategy.with_changes({name: replace(own, shares=((2, 1),)) for name, own in strategy.operators.items() if own.degrees[0] == 2})


def test_files_and_texts_have_them() -> None:
    strategy = two_to_one()
    text = json_file.dumps(strategy, GRAPH, TWO)
    assert json.loads(text)["operators"][FIRST.name]["shares"] == [[2, 1]]
    assert json_file.loads(text, GRAPH, TWO)[0] == strategy
    assert split(FIRST, strategy.operators[FIRST.name]) == "sample b:2, shares 2:1"
    document = json.loads(text)
    document["operators"][FIRST.name]["shares"] = [[300, 1]]
    with pytest.raises(StrategyError, match="leave part 1, on device 1, without any"):
        json_file.loads(json.dumps(document), GRAPH, TWO)


def test_samples_are_dealt_by_speed_and_nobody_goes_without() -> None:
    assert dealt(30, [2.0, 1.0]) == (20, 10) and dealt(11, [10.0, 1.0]) == (10, 1)
    assert dealt(3, [1000.0, 1.0, 1.0]) == (1, 1, 1) and sum(dealt(64, [3.0, 2.0, 2.0])) == 64


def test_the_name_divides_samples_alone_and_only_where_devices_differ() -> None:
    slow = replace(CPU, name="slow-cpu", flops_per_second={"float32": 5e9})
    mixed = replace(TWO, devices=(TWO.devices[0], replace(TWO.devices[1], type=slow)))
    assert named("data_parallel+uneven", GRAPH, mixed) == two_to_one()
    assert named("data_parallel+uneven", GRAPH, TWO) == data_parallel(GRAPH, TWO)


def test_uneven_copies_are_not_folded() -> None:
    graph, four = mlp(batch=12), cluster([1, 1, 1, 1], CPU)
    strategy = data_parallel(graph, four)
    find_copies(graph, strategy, 4)
    name = graph.operators[0].name
    with pytest.raises(UnfoldableError, match="copies"):
        find_copies(graph, strategy.with_operator(name, replace(strategy.operators[name], shares=((2, 1, 2, 1),))), 4)
