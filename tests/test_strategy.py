from __future__ import annotations

import copy
import pickle

import pytest
from hypothesis import given

from soap.cluster.topology import Topology
from soap.errors import StrategyError
from soap.model.graph import OperatorGraph
from soap.strategy.config import OpConfig, Strategy, SyncConfig, check_config
from tests.extent import FEW
from tests.graph_builder import mlp
from tests.strategies import cases

GRAPH = mlp()
SINGLE = Strategy({op.name: OpConfig((1,) * len(op.factors), (0,)) for op in GRAPH.operators})


def test_config_lists_one_device_per_tile() -> None:
    assert OpConfig((2, 1, 3), (0, 1, 2, 3, 0, 0)).replicas == 1
    assert OpConfig((), (4, 5), replicas=2).degrees == ()
    with pytest.raises(StrategyError, match=r"^2 devices for degrees \(2, 2\) and 3 replicas: expected 12, one per tile$"):
        OpConfig((2, 2), (0, 1), replicas=3)


@pytest.mark.parametrize(("degrees", "devices", "replicas"), [((0,), (), 1), ((1, -1), (0,), 1), ((1,), (), 0)])
def test_config_needs_positive_counts(degrees: tuple[int, ...], devices: tuple[int, ...], replicas: int) -> None:
    with pytest.raises(StrategyError, match="expected whole numbers of at least 1"):
        OpConfig(degrees, devices, replicas)


def test_config_needs_device_numbers() -> None:
    with pytest.raises(StrategyError, match="expected non-negative device numbers"):
        OpConfig((1,), (-1,))


def test_unknown_synchronization() -> None:
    with pytest.raises(StrategyError, match=r"^no method synchronizes with owner 'gossip', payload 'dense', residence .*: "):
        SyncConfig("gossip")  # type: ignore[arg-type]


def test_strategy_is_immutable_and_edits_are_copies() -> None:
    operators = dict(SINGLE.operators)
    strategy = Strategy(operators)
    operators.clear()
    assert strategy == SINGLE
    with pytest.raises(TypeError):
        strategy.operators["fc0"] = OpConfig((1,), (0,))  # type: ignore[index]
    split = OpConfig((2, 1, 1), (0, 1))
    edited = strategy.with_operator("fc0", split).with_parameter("fc0.weight", SyncConfig())
    assert edited.operators["fc0"] == split
    assert edited.parameters == {"fc0.weight": SyncConfig()}
    assert strategy == SINGLE
    assert edited != SINGLE


def test_parameters_that_are_not_named_use_the_default() -> None:
    assert SINGLE.sync("fc0.weight") == SyncConfig()


def test_validate_names_what_does_not_fit() -> None:
    SINGLE.validate(GRAPH, 1)
    rest = {name: config for name, config in SINGLE.operators.items() if name not in ("fc0", "act0")}
    with pytest.raises(StrategyError, match=r"2 operators without configuration \['fc0', 'act0'\], 1 unknown operators \['x'\]"):
        Strategy({**rest, "x": OpConfig((), (0,))}).validate(GRAPH, 1)
    with pytest.raises(StrategyError, match=r"^strategy names parameter 'x', which model 'mlp' does not have$"):
        SINGLE.with_parameter("x", SyncConfig()).validate(GRAPH, 1)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (OpConfig((1, 1), (0,)), r"operator 'fc0': 2 degrees given, expected 3 \(b, k, n\)"),
        (OpConfig((9, 1, 1), (0,) * 9), "operator 'fc0': degree 9 of factor 'b' exceeds its size 8; lower the degree"),
        (OpConfig((2, 1, 1), (0, 2)), "operator 'fc0': device 2 does not exist; expected 0 to 1 on this cluster"),
    ],
)
def test_illegal_configs(config: OpConfig, message: str) -> None:
    with pytest.raises(StrategyError, match=f"^{message}$"):
        check_config(GRAPH.operators[0], config, 2)
    with pytest.raises(StrategyError, match=f"^{message}$"):
        SINGLE.with_operator("fc0", config).validate(GRAPH, 2)


@given(cases(max_moves=3))
@FEW
def test_random_strategies_are_legal_and_survive_pickle_and_copy(case: tuple[OperatorGraph, Topology, Strategy]) -> None:
    graph, topology, strategy = case
    strategy.validate(graph, topology.device_count)
    assert pickle.loads(pickle.dumps(strategy)) == strategy
    assert copy.deepcopy(strategy) == strategy
