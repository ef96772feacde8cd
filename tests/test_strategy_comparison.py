from __future__ import annotations

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from soap.errors import StrategyError
from soap.strategy.classical import CLASSICAL, random_strategy
from soap.strategy.config import OpConfig, Strategy, SyncConfig
from soap.strategy.diff import Comparison, compare, grouped, masked, pattern_of
from soap.strategy.json_file import dumps, load_contents
from soap.strategy.sync import parameter_server
from tests.extent import FEW
from tests.graph_builder import mlp, transformer
from tests.strategies import cluster

GRAPH, FOUR = transformer(batch=4, layers=3), cluster([2, 2])
USUAL = CLASSICAL["data_parallel"](GRAPH, FOUR)


def comparison(first: Strategy, second: Strategy) -> Comparison:
    return compare(*(load_contents(dumps(strategy, GRAPH, FOUR)) for strategy in (first, second)))


@given(st.integers(0, 9), st.integers(0, 9))
@FEW
def test_exactly_the_operators_that_differ_are_found(a: int, b: int) -> None:
    first, second = (random_strategy(GRAPH, FOUR, random.Random(seed)) for seed in (a, b))
    found = comparison(first, second)
    different = [op.name for op in GRAPH.operators if first.operators[op.name] != second.operators[op.name]]
    assert [d.operator for d in found.differences] == different
    assert found.equal == (first == second)
    for d in found.differences:
        for entry, strategy in ((d.first, first), (d.second, second)):
            config, op = strategy.operators[d.operator], GRAPH.operators[GRAPH.index[d.operator]]
            degrees = {f.name: n for f, n in zip(op.factors, config.degrees, strict=True) if n > 1}
            assert (entry.degrees, entry.options.get("replicas", 1), entry.devices) == (degrees, config.replicas, config.devices)


def test_parameters_and_defaults() -> None:
    name = GRAPH.parameters[0].name
    served = USUAL.with_parameter(name, parameter_server(2))
    found = comparison(USUAL, served)
    assert found.parameters == ((name, SyncConfig(), parameter_server(2)),)
    assert not found.differences and not found.equal
    assert comparison(USUAL, USUAL.with_parameter(name, SyncConfig())).equal


def test_repeated_layers_are_one_group_if_they_differ_alike() -> None:
    config = OpConfig((1, 1, 1, 2), (0, 1))
    changed = USUAL.with_operator("0.fc1", config).with_operator("1.fc1", config).with_operator("2.fc1", OpConfig((1, 1, 1, 2), (2, 3)))
    groups = grouped(comparison(USUAL, changed).differences)
    assert [[d.operator for d in group] for group in groups] == [["0.fc1", "1.fc1"], ["2.fc1"]]
    assert masked("blocks.10.up2") == "blocks.*.up*"
    assert pattern_of(["a.0.b_1", "a.1.b_1", "a.12.b_1"]) == "a.*.b_1"
    assert pattern_of(["a.3.b_1", "a.3.b_2"]) == "a.3.b_*"
    assert pattern_of(["a.3.b_1"]) == "a.3.b_1"


def test_other_models_and_clusters_are_compared_by_name() -> None:
    small, pair = mlp(), cluster([2])
    other = CLASSICAL["data_parallel"](small, pair)
    found = compare(load_contents(dumps(USUAL, GRAPH, FOUR)), load_contents(dumps(other, small, pair)))
    assert not found.same_model and not found.same_cluster and not found.equal
    assert set(found.only_first) == {op.name for op in GRAPH.operators} - {op.name for op in small.operators}
    assert set(found.only_second) == {op.name for op in small.operators} - {op.name for op in GRAPH.operators}
    assert [d.operator for d in found.differences] == ["head"]


def test_contents_without_one_device_per_tile_are_refused() -> None:
    document = json.loads(dumps(USUAL, GRAPH, FOUR))
    document["operators"]["head"]["devices"] = [0, 1, 2]
    with pytest.raises(StrategyError, match=r"operator 'head': 3 devices for degrees \(4,\) and 1 replicas: expected 4"):
        load_contents(json.dumps(document))
    document["operators"]["head"] |= {"replicas": 2**30, "devices": [0]}
    with pytest.raises(StrategyError, match=r"operator 'head': 4294967296 tiles; expected at most"):
        load_contents(json.dumps(document))
