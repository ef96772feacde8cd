"""Strategies by name, and mixtures of them."""

from __future__ import annotations

import argparse
from dataclasses import replace
from math import prod

import pytest

from soap.api import load
from soap.cli.options import sync_method
from soap.cli.plain_text import sync_document, sync_text
from soap.cluster.presets import preset
from soap.errors import StrategyError
from soap.strategy.classical import CLASSICAL, NAMED, data_parallel, hybrid, megatron, zero1
from soap.strategy.megatron import copied_stages, operator_work, three_dimensional
from soap.strategy.named import ADDED, MEANT, SAVING, check_name, named, saving_names, saving_starts, usual_names, without_effect
from soap.strategy.stages import chunks_of, devices_of_stages
from soap.strategy.sync import SHARDED, SHARDED_IN_HOSTS, SHARDED_STATE, saving_memory, worded
from tests.graph_builder import mlp, transformer
from tests.strategies import cluster
from tests.test_expert_parallel import experts

GRAPH, TOPOLOGY = transformer(), cluster([4, 4])


@pytest.mark.parametrize("name", NAMED)
def test_single_names_are_what_they_were(name: str) -> None:
    assert named(name, GRAPH, TOPOLOGY) == NAMED[name](GRAPH, TOPOLOGY)


def test_mixtures_take_operators_from_one_and_synchronization_from_the_other() -> None:
    both = named("megatron+zero1", GRAPH, TOPOLOGY)
    assert both.operators == megatron(GRAPH, TOPOLOGY).operators
    assert {*both.parameters.values()} == {SHARDED_STATE} and both.parameters == zero1(GRAPH, TOPOLOGY).parameters
    assert named("data_parallel+zero1", GRAPH, TOPOLOGY) == zero1(GRAPH, TOPOLOGY)
    narrow = named("megatron:2+zero1", GRAPH, TOPOLOGY)
    assert narrow.operators == hybrid(GRAPH, TOPOLOGY, tensor=2).operators
    assert named("megatron:2", GRAPH, TOPOLOGY) != named("megatron:4", GRAPH, TOPOLOGY) == megatron(GRAPH, TOPOLOGY)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("megatorn", "no strategy is named 'megatorn'; expected one of single_device, data_parallel"),
        ("megatron+zero9", "strategy 'megatron+zero9': 'zero9' cannot be put on top of another one; expected one of hybrid"),
        ("megatron+", "'' cannot be put on top"),
        ("zero1+megatron", "'megatron' cannot be put on top"),
        ("megatron:0", "'megatron:0'; expected megatron:N, in groups of N devices"),
        ("megatron:many", "expected megatron:N"),
        ("data_parallel:2", "'data_parallel:2'; expected megatron:N"),
        ("data_parallel+context:2", "'context:2' is for groups; expected it as in megatron:N+experts:E"),
        ("megatron:2+context:0", "'context:0' is for groups"),
        ("", "no strategy is named ''"),
    ],
)
def test_other_names_are_refused_in_one_line(name: str, words: str) -> None:
    with pytest.raises(StrategyError) as refused:
        check_name(name)
    assert words in str(refused.value) and "\n" not in str(refused.value)
    with pytest.raises(StrategyError):
        named(name, GRAPH, TOPOLOGY)


def test_micro_batches_may_be_put_on_top() -> None:
    strategy = named("fsdp+recompute+microbatches:4", GRAPH, TOPOLOGY)
    assert strategy.microbatches == 4 and strategy.parameters == named("fsdp", GRAPH, TOPOLOGY).parameters
    again = {name for name, config in strategy.operators.items() if config.recompute}
    assert again and again == {n for n, c in named("fsdp+microbatches:4+recompute", GRAPH, TOPOLOGY).operators.items() if c.recompute}
    named("fsdp+recompute+microbatches:2", transformer(16), cluster([2, 2])).validate(transformer(16), 4)  # nothing that cannot repeat
    for name in ("data_parallel+microbatches", "data_parallel+microbatches:0", "data_parallel+microbatches:x"):
        with pytest.raises(StrategyError, match=r"cannot be put on top of another one; expected one of .*, microbatches:N"):
            check_name(name)


def test_groups_share_positions_beside_stages() -> None:
    """On four devices of a stage: two groups of two, of which each has half of the positions."""
    found = named("megatron:2x2+context:2", GRAPH, TOPOLOGY)
    assert found == three_dimensional(GRAPH, TOPOLOGY, tensor=2, pipeline=2, context=2) != named("megatron:2x2", GRAPH, TOPOLOGY)
    assert named("sequence_parallel:2+context:4", GRAPH, TOPOLOGY) == hybrid(GRAPH, TOPOLOGY, tensor=2, context=4, scatters=True)
    products = [op for op in GRAPH.operators if op.kind == "linear" and len(op.factors) > 2]
    assert products and all(found.operators[op.name].degrees[1] == 2 for op in products)
    with pytest.raises(StrategyError, match="expected a model with sequences"):
        named("megatron:2+context:2", mlp(), TOPOLOGY)


def test_groups_that_the_cluster_has_not_are_refused() -> None:
    with pytest.raises(StrategyError, match="8 devices in groups of 3 and 1 stages; expected a divisor"):
        named("megatron:3", GRAPH, TOPOLOGY)


def test_what_saves_memory_is_known_legal_and_leaves_data_parallelism_out() -> None:
    names = list(saving_names(TOPOLOGY))
    assert len({*names}) == len(names) and "data_parallel" not in names
    assert {"zero1", "megatron", "megatron:2", "megatron:2+zero1", "megatron+zero1", "one_weird_trick+zero1"} <= {*names}
    for name in (*names, *saving_starts(TOPOLOGY)):
        strategy = named(name, GRAPH, TOPOLOGY)
        strategy.validate(GRAPH, TOPOLOGY.device_count)
        assert strategy != data_parallel(GRAPH, TOPOLOGY) or name == "hybrid"  # which is the same without sparse parameters
    assert {name for group in SAVING for name in group} <= {*ADDED}


def test_searches_begin_with_groups_of_any_width() -> None:
    groups = ["megatron+zero1", "megatron+fsdp", "megatron+hsdp"]
    assert list(saving_starts(cluster([2, 2]))) == ["fsdp+recompute", "hsdp+recompute", *groups]
    groups = ["megatron+zero1", "megatron+fsdp", "megatron:2+zero1", "megatron:2+fsdp"]
    assert list(saving_starts(cluster([4]))) == ["fsdp+recompute", *groups]


def test_hosts_keep_copies_where_there_are_several_of_several_devices() -> None:
    shared, alone = "hsdp", [cluster([8]), cluster([1, 1, 1])]
    assert any(shared in name.split("+") for name in saving_names(TOPOLOGY))
    assert "megatron:2+hsdp+recompute" in saving_names(TOPOLOGY)
    assert not any(shared in name.split("+") for topology in alone for name in saving_names(topology))
    assert SHARDED_IN_HOSTS in saving_memory(TOPOLOGY) and all(SHARDED_IN_HOSTS not in saving_memory(topology) for topology in alone)
    both = named("megatron:2+hsdp", GRAPH, TOPOLOGY)
    assert both.operators == hybrid(GRAPH, TOPOLOGY, tensor=2).operators and {*both.parameters.values()} == {SHARDED_IN_HOSTS}


def test_a_copy_on_each_host_has_a_word_of_its_own() -> None:
    assert sync_method("hsdp") == sync_method("fsdp+local") == worded("hsdp") == SHARDED_IN_HOSTS != worded("fsdp") == SHARDED
    assert (SHARDED_IN_HOSTS.word, SHARDED.word, sync_text(sync_document(SHARDED_IN_HOSTS))) == ("hsdp", "fsdp", "hsdp")
    states = sync_method("zero+local")
    assert states == replace(SHARDED_STATE, within="host") and sync_text(sync_document(states)) == "zero with local aggregation"
    said = r"'hsdp:2' is not allowed: synchronization by hsdp in 2 partitions.*fsdp\[\+offload\], hsdp\[\+offload\]"
    with pytest.raises(argparse.ArgumentTypeError, match=said):
        sync_method("hsdp:2")
    with pytest.raises(StrategyError, match=r"^synchronization '' is unknown"):
        worded("")


def test_names_that_divide_nothing_are_known() -> None:
    """On one device every plan that divides is the same as without; ``hsdp`` needs several hosts, some with several devices."""
    one = cluster([1])
    whole = named("single_device", GRAPH, one)
    for name in (*NAMED, "megatron+fsdp", "data_parallel+zero1", "recompute+uneven"):
        strategy, idle = named(name, GRAPH, one), name not in MEANT
        assert (without_effect(name, one) != "") is idle, name
        assert all({*config.degrees} <= {1} and config.replicas == 1 for config in strategy.operators.values()), name
        assert name == "recompute" or "recompute" in name or strategy.operators == whole.operators
        assert "hsdp" in name or without_effect(name, TOPOLOGY) == without_effect(name, cluster([4])) == ""
    assert without_effect("megatron+fsdp", one) == "one device has nothing to divide, which is what 'megatron' and 'fsdp' would do"
    assert without_effect("recompute+offload", one) == without_effect("data_parallel+selective", one) == ""
    assert without_effect("hsdp", cluster([4])) == "'hsdp' is 'fsdp' on one host"
    assert without_effect("megatron+hsdp", cluster([1, 1])).startswith("'hsdp' shares nothing where each host has one device")
    assert without_effect("megatron+hsdp", TOPOLOGY) == ""


def test_what_people_would_use_depends_on_the_cluster_and_on_sparse_parameters() -> None:
    dense, sparse = mlp(), load("zoo:rnnlm:tiny", plan_only=True).graph
    alone, host, hosts = (preset(name) for name in ("h100-1", "h100-8", "a100-40gb-4x8"))
    assert usual_names(dense, alone) == tuple(CLASSICAL)
    assert usual_names(dense, host) == (*CLASSICAL, "zero1", "fsdp")
    assert usual_names(dense, hosts) == (*CLASSICAL, "zero1", "fsdp", "hsdp", "pipeline")
    assert set(usual_names(sparse, host)) - set(usual_names(dense, host)) == {"hybrid", "parameter_server", "sparse_allgather"}


def test_megatron_in_stages_is_a_pipeline_by_1f1b() -> None:
    graph, topology = transformer(batch=8, layers=2), cluster([2] * 4)
    strategy = named("megatron:2x2+microbatches:4", graph, topology)
    strategy.validate(graph, topology.device_count)
    assert (strategy.schedule, strategy.microbatches, set(strategy.stages.values())) == ("1f1b", 4, {1})
    stages = devices_of_stages(graph, strategy)
    assert stages == (frozenset({0, 1, 4, 5}), frozenset({2, 3, 6, 7}))


def test_stages_whose_experts_are_divided_are_on_neighbouring_devices() -> None:
    """So that rows travel inside hosts where a stage is no larger. All else lies copy by copy."""
    graph, topology = experts(4), cluster([4, 4])
    for added, homes in (("+experts:4", [{0, 1, 2, 3}, {4, 5, 6, 7}]), ("", [{0, 2, 4, 6}, {1, 3, 5, 7}])):
        strategy = named(f"megatron:1x2{added}+microbatches:2", graph, topology)
        assert [{*own} for own in devices_of_stages(graph, strategy)] == homes


def test_a_table_weighs_what_is_looked_up() -> None:
    """However many rows it has: stages of a model with a wide vocabulary have the layers of one with a narrow one."""
    narrow, wide = (transformer(layers=4, vocabulary=vocabulary) for vocabulary in (16, 2**20))
    assert operator_work(wide)[0] == operator_work(narrow)[0] == prod(narrow.tensors[narrow.operators[0].outputs[0].tensor].shape)


@pytest.mark.parametrize("base", ["megatron", "sequence_parallel"])
@pytest.mark.parametrize("shape", [(2, 2, 4), (4, 2, 8), (2, 4, 8), (2, 1, 4)])
def test_every_operator_of_a_stage_is_on_its_devices(base: str, shape: tuple[int, int, int]) -> None:
    """Also the table, the head and the loss, of which a micro-batch has fewer samples than there are devices."""
    graph, topology, (tensor, stages, count) = transformer(batch=16, layers=4), cluster([4, 4]), shape
    strategy = named(f"{base}:{tensor}x{stages}+recompute+microbatches:{count}", graph, topology)
    strategy.validate(graph, topology.device_count)
    homes = copied_stages(topology, tensor=tensor, pipeline=stages)
    for op, chunk in zip(graph.operators, chunks_of(graph, strategy.stages), strict=True):
        assert {*strategy.operators[op.name].devices} == {*homes[chunk]}, op.name
    split = {op.name: prod(strategy.operators[op.name].degrees) for op in graph.operators}
    norms = [split[f"{layer}.norm2"] for layer in range(4)]
    copies = 8 // (tensor * stages)
    assert norms == [copies * (tensor if base == "sequence_parallel" else 1)] * 4
    assert split["0.fc1"] == split["0.fc2"] == copies * tensor


@pytest.mark.parametrize("name", ["megatron:2x", "megatron:x2", "megatron:2x2x2", "megatron:2x0"])
def test_wrong_numbers_of_stages_get_one_line(name: str) -> None:
    with pytest.raises(StrategyError, match="megatron:NxP, in P stages of these"):
        check_name(name)
