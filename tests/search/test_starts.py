from __future__ import annotations

from dataclasses import replace

import pytest

from soap.errors import StrategyError
from soap.model.graph import Footprint, OperatorGraph
from soap.search import starts
from soap.search.starts import Start, narrowed, reference_strategies, starting_strategies, starts_of_chains
from soap.simulator.memory.certain import certainly_lacks
from soap.strategy.classical import CLASSICAL, data_parallel, fsdp
from soap.strategy.config import OpConfig, Strategy
from soap.strategy.named import saving_starts
from soap.strategy.recomputation import recomputed
from soap.strategy.sync import sync_choices
from tests.graph_builder import mlp, transformer
from tests.search.toys import layers
from tests.strategies import cluster


def test_all_classical_strategies_by_default_and_data_parallelism_first() -> None:
    found = starting_strategies(mlp(), cluster([2]), None, None, 0)
    assert next(iter(found)) == "data_parallel" and set(found) == set(CLASSICAL)


def test_data_parallelism_is_always_among_them() -> None:
    initial = CLASSICAL["single_device"](mlp(), cluster([2]))
    found = starting_strategies(mlp(), cluster([2]), ["megatron", "random", "megatron"], initial, 0)
    assert list(found) == ["data_parallel", "megatron", "random", "initial"]
    assert found["initial"] == initial


def test_random_start_depends_on_the_seed_alone() -> None:
    drawn = [starting_strategies(mlp(), cluster([2]), ["random"], None, seed)["random"] for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_unknown_start_is_refused() -> None:
    with pytest.raises(StrategyError, match=r"^start 'gpipe': expected one of .*data_parallel.*random: did you mean 'pipeline'\?$"):
        starting_strategies(mlp(), cluster([2]), ["gpipe"], None, 0)


def test_initial_strategy_of_another_model_is_refused() -> None:
    with pytest.raises(StrategyError, match="does not fit model 'mlp'"):
        starting_strategies(mlp(), cluster([2]), None, Strategy({"x": OpConfig((), (0,))}), 0)


def test_chains_start_from_different_strategies_that_fit_and_where_memory_binds_from_one_that_nearly_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    strategies = [Strategy({"layer.0": OpConfig((1,), (i,))}) for i in range(4)]

    def chosen(count: int, *figures: tuple[str, int, int, int]) -> list[str]:
        own = [Start(name, strategies[i], cost_ns, overflow) for name, i, cost_ns, overflow in figures]
        return [start.name for start in starts_of_chains(own, count)]

    a, c, d = ("a", 0, 30, 0), ("c", 2, 20, 0), ("d", 2, 20, 0)
    assert chosen(3, a, ("slow", 1, 40, 5), c, d) == ["c", "a"]
    assert chosen(1, a, ("slow", 1, 40, 5), c, d) == ["c"]
    assert chosen(2, a, ("fast", 1, 10, 9), ("near", 3, 25, 5), c) == ["c", "near"]
    assert chosen(1, a, ("fast", 1, 10, 9), ("near", 3, 25, 5)) == ["near"]
    assert chosen(3, ("a", 0, 3, 9), ("b", 1, 10, 5)) == ["b"]
    assert chosen(3) == []
    hopeless = [Start("a", strategies[0], 30, 0), Start("fast", strategies[1], 10, 9)]
    assert [start.name for start in starts_of_chains(hopeless, 1, available_bytes=8)] == ["a"]
    assert starts_of_chains(hopeless[1:], 1, available_bytes=8) == hopeless[1:]
    with monkeypatch.context() as large:
        large.setattr(starts, "is_large", lambda strategy: True)
        assert chosen(2, a, ("fast", 1, 10, 9)) == ["a"] and chosen(2, ("fast", 1, 10, 9)) == ["fast"]


def test_where_data_parallelism_lacks_memory_what_saves_most_comes_first_and_what_cannot_fit_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph, topology = transformer(layers=3), cluster([2, 2])
    assert list(saving_starts(topology)) == ["fsdp+recompute", "hsdp+recompute", "megatron+zero1", "megatron+fsdp", "megatron+hsdp"]
    monkeypatch.setattr(starts, "certainly_lacks", lambda graph, topology, own: not any(one.recompute for one in own.operators.values()))
    syncs = sync_choices(graph, topology, saving=True)
    found = starting_strategies(graph, topology, None, None, 0, syncs, list(saving_starts(topology)))
    assert list(found) == ["data_parallel", "fsdp+recompute", "hsdp+recompute", "zero1", "fsdp", "hsdp"]  # others are made of the last
    asked = starting_strategies(graph, topology, ["megatron"], None, 0, syncs, ())
    assert list(asked) == ["data_parallel", "megatron"]


def test_what_is_certainly_there_when_the_loss_is_known() -> None:
    usual = mlp(64, (16, 32, 16))
    graph = replace(usual, footprints={op.name: (Footprint(0, 0, 0, frozenset({0})),) for op in usual.operators})
    topology, strategy = cluster([2]), data_parallel(usual, cluster([2]))
    kept = sum(graph.tensors[name].bytes for name in {op.inputs[0].tensor for op in graph.operators} if name in graph.producers)
    values = sum(tensor.bytes for tensor in graph.parameters)

    def lacks(memory_bytes: int, strategy: Strategy, graph: OperatorGraph = graph) -> bool:
        limited = replace(topology, limits=(memory_bytes // 2, memory_bytes - memory_bytes // 2))
        return certainly_lacks(graph, limited, strategy)

    held = kept + 2 * values  # a copy on each device
    assert lacks(held - 1, strategy) and not lacks(held, strategy)
    assert not lacks(held - 1, recomputed(graph, strategy, [graph.operators[1].name]))
    gathered = strategy.with_changes(parameters=fsdp(graph, topology).parameters)
    assert lacks(kept - 1, gathered) and not lacks(kept, gathered)
    assert lacks(2 * values - 1, strategy, usual) and not lacks(2 * values, strategy, usual)  # nobody knows what its operators keep
    assert not lacks(2 * values, replace(strategy, microbatches=2)) and lacks(2 * values - 1, replace(strategy, microbatches=2))
    alone = CLASSICAL["single_device"](graph, topology)
    assert lacks(2 * (kept + values) - 2, alone) and not lacks(2 * (kept + values), alone)


def test_narrowed_data_parallelism_uses_the_first_devices() -> None:
    graph, topology = layers(2, rows=8), cluster([2, 2])
    assert set(narrowed(graph, topology, data_parallel(graph, topology), 2).operators.values()) == {OpConfig((2,), (0, 1))}
    graph = transformer(batch=3)
    narrow = narrowed(graph, topology, data_parallel(graph, topology), 2)
    narrow.validate(graph, 4)
    assert {d for config in narrow.operators.values() for d in config.devices} == {0, 1}


def test_references_are_different() -> None:
    graph, topology = layers(2, rows=8), cluster([2, 2])
    start = data_parallel(graph, topology)
    found = reference_strategies(graph, topology, [start, start])
    assert found[0] == start and [len(s.operators["layer.0"].devices) for s in found] == [4, 1, 2]
