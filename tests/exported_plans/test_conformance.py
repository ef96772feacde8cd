"""What holds for every target, over strategies of all kinds: the file can be read, says what it means, and means something legal."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import tomllib
from dataclasses import replace
from functools import cache
from math import prod
from typing import Any

import pytest

import soap
from soap.api.exported_plans import ExportedPlan, export_plan
from soap.cluster.topology import Topology
from soap.exported_plans.configuration import meaning
from soap.exported_plans.named import TARGETS, target_named
from soap.model.graph import OperatorGraph
from soap.strategy.config import Strategy
from soap.strategy.grids import device_order
from soap.strategy.named import named
from soap.strategy.stages import stages_of
from soap.strategy.wrapped import USUAL
from tests.extent import ALL, often

CLUSTER = "h100-2x4"
STRATEGIES = (
    "data_parallel", "zero1", "fsdp", "hsdp", "megatron", "megatron:2+zero1", "sequence_parallel+fsdp", "context_parallel+fsdp",
    "recompute", "fsdp+selective", "zero1+offload", "single_device", "hybrid", "model_parallel", "parameter_server",
    "data_parallel+offload_kept", "pipeline:1f1b", "pipeline:gpipe", "pipeline:zb-h1", "pipeline:interleaved:2", "accumulated",
)  # fmt: skip
OFTEN = {
    "zero1", "fsdp+selective", "megatron:2+zero1", "context_parallel+fsdp", "model_parallel", "pipeline:1f1b", "pipeline:interleaved:2",
    "accumulated",
}  # fmt: skip
"""One of each kind of thing that a target is told."""
EXACT = {
    "torchtitan": {
        "data_parallel", "zero1", "fsdp", "hsdp", "sequence_parallel+fsdp", "context_parallel+fsdp", "recompute", "fsdp+selective",
        "single_device", "pipeline:1f1b", "pipeline:gpipe", "accumulated",
    },
    "fsdp2": {"data_parallel", "zero1", "fsdp", "hsdp", "recompute", "fsdp+selective", "single_device", "accumulated"},
    "megatron": {
        "data_parallel", "zero1", "fsdp", "hsdp", "megatron", "megatron:2+zero1", "sequence_parallel+fsdp", "context_parallel+fsdp",
        "recompute", "fsdp+selective", "zero1+offload", "single_device", "pipeline:1f1b", "accumulated",
    },
    "deepspeed": {
        "data_parallel", "zero1", "fsdp", "hsdp", "megatron", "megatron:2+zero1", "zero1+offload", "single_device", "accumulated",
    },
}  # fmt: skip
"""What each target can be told as it is."""

each = pytest.mark.parametrize("target", [target.name for target in TARGETS])
every = pytest.mark.parametrize("name", often(STRATEGIES, OFTEN))


@cache
def graph() -> OperatorGraph:
    return soap.load("zoo:gpt:tiny@16", plan_only=True).graph


@cache
def cluster() -> Topology:
    return soap.load_cluster(CLUSTER)


def pipeline(schedule: str) -> Strategy:
    """Two layers on two stages or, interleaved, halves of layers in four chunks, which are no layers."""
    order, chunks = device_order(cluster()), [int("blocks.1." in op.name or i > 19) for i, op in enumerate(graph().operators)]
    home = {0: order[:4], 1: order[4:]}
    if schedule.startswith("interleaved"):
        chunks = [min(3, i // 7) for i in range(len(chunks))]
    plain = named("data_parallel", graph(), cluster()).operators
    configs = {}
    for op, chunk in zip(graph().operators, chunks, strict=True):
        own, devices = plain[op.name], home[chunk % 2]
        degrees = tuple(min(degree, 4) for degree in own.degrees)
        configs[op.name] = own.placed(degrees, devices[: prod(degrees)] if own.replicas == 1 else devices, 1 if own.replicas == 1 else 4)
    return Strategy(configs, stages=stages_of(graph(), chunks), schedule=schedule, microbatches=4)


@cache
def strategy(name: str) -> Strategy:
    if name.startswith("pipeline:"):
        return pipeline(name.partition(":")[2])
    if name == "accumulated":
        return replace(named("fsdp", graph(), cluster()), microbatches=2)
    return named(name, graph(), cluster())


@cache
def exported(name: str, target: str) -> ExportedPlan:
    """The nearest configuration."""
    return export_plan(strategy(name), graph(), cluster(), target, nearest_only=True)


@each
@every
def test_a_configuration_means_a_legal_strategy_of_all_devices(name: str, target: str) -> None:
    found, own = exported(name, target), exported(name, target).configuration
    found.strategy.validate(graph(), 8)
    assert meaning(graph(), cluster(), own) == found.strategy
    assert target_named(target).allows(own) == ""
    assert own.data * own.tensor * own.context * own.stages == own.world == (1 if name == "single_device" else 8)
    assert own.data * own.micro_batch * own.microbatches == own.samples == 16
    assert found.exported.makespan_ns > 0


@each
def test_what_a_target_knows_it_is_told(target: str) -> None:
    tried = set(STRATEGIES) if ALL else OFTEN
    told = {name for name in tried if exported(name, target).comparison.equal}
    assert told == EXACT[target] & tried
    for name in told:
        found = exported(name, target)
        assert found.exported.makespan_ns == found.planned.makespan_ns or found.chosen.wrapped != USUAL


@pytest.mark.parametrize(("target", "words"), [("megatron", "--sequence-parallel"), ("torchtitan", "tensor_parallel_degree = 2")])
def test_stages_whose_layers_are_split_along_sequences_too(target: str, words: str) -> None:
    piped = exported("pipeline:1f1b", target).configuration
    split = replace(piped, base="sequence", width=2)
    plan = meaning(graph(), cluster(), split)
    found = export_plan(plan, graph(), cluster(), target, nearest_only=True)
    assert found.configuration == split and found.comparison.equal and words in found.text
    whole = meaning(graph(), cluster(), replace(split, base="tensor"))
    assert plan != whole and export_plan(whole, graph(), cluster(), "megatron", nearest_only=True).configuration.base == "tensor"


@each
@every
def test_what_differs_is_listed(name: str, target: str) -> None:
    """Equal strategies are equal in all that is told; others differ in what the comparison lists."""
    found = exported(name, target)
    assert found.comparison.equal == (found.strategy == strategy(name))
    listed = {difference.operator for difference in found.comparison.differences}
    assert listed == {op for op, config in strategy(name).operators.items() if config != found.strategy.operators[op]}


@every
def test_torchtitan_reads_its_file(name: str) -> None:
    own, text = exported(name, "torchtitan").configuration, exported(name, "torchtitan").text
    document = tomllib.loads(text)
    told = document["parallelism"]
    degrees = ("data_parallel_replicate_degree", "data_parallel_shard_degree", "tensor_parallel_degree", "context_parallel_degree")
    assert prod(told[degree] for degree in (*degrees, "pipeline_parallel_degree")) == own.world
    training, groups = document["training"], told[degrees[0]] * told[degrees[1]]
    assert training["global_batch_size"] == 16 and training["global_batch_size"] % (training["local_batch_size"] * groups) == 0
    assert training["seq_len"] == 12
    assert document["activation_checkpoint"]["mode"] == own.recompute
    if own.pipeline is not None:
        assert training["local_batch_size"] % told["pipeline_parallel_microbatch_size"] == 0
        assert len(told["module_fqns_per_model_part"]) == own.stages * own.pipeline.chunks_each
        parts = [name for own in told["module_fqns_per_model_part"] for name in own]
        assert [name for name in parts if "blocks" in name] == ["blocks.0", "blocks.1"]


@every
def test_megatron_s_arguments_are_an_array_for_bash(name: str) -> None:
    own, text = exported(name, "megatron").configuration, exported(name, "megatron").text
    done = subprocess.run(["bash", "-ec", text + 'printf "%s\\n" "${PARALLEL_ARGS[@]}"'], capture_output=True, text=True, check=True)
    words = done.stdout.split()
    value = {words[i]: words[i + 1] for i in range(len(words) - 1) if words[i].startswith("--")}
    assert int(value["--tensor-model-parallel-size"]) == own.tensor and int(value["--pipeline-model-parallel-size"]) == own.stages
    assert int(value["--micro-batch-size"]) * own.data * own.microbatches == int(value["--global-batch-size"]) == 16
    assert ("--sequence-parallel" in words) == (own.base == "sequence")
    if own.pipeline is not None:
        assert value["--pipeline-model-parallel-layout"] == "Et|tL"


@every
def test_deepspeed_s_file_is_json_whose_batches_agree(name: str) -> None:
    own, document = exported(name, "deepspeed").configuration, json.loads(exported(name, "deepspeed").text)
    each_device = document["train_micro_batch_size_per_gpu"] * document["gradient_accumulation_steps"]
    assert each_device * own.data == document["train_batch_size"] == 16
    assert document["zero_optimization"]["stage"] == {"none": 0, "zero1": 2}.get(own.sharing, 3)
    assert document.get("tensor_parallel", {}).get("autotp_size", 1) == own.tensor


@every
def test_fsdp2_s_file_is_python(name: str) -> None:
    own, text = exported(name, "fsdp2").configuration, exported(name, "fsdp2").text
    values: dict[str, Any] = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign) and not isinstance(node.value, ast.List):
            target = node.targets[0]
            names = target.elts if isinstance(target, ast.Tuple) else [target]
            found = eval(ast.unparse(node.value), {"__builtins__": {}}, values)  # constants, of constants before
            values |= {ast.unparse(one): v for one, v in zip(names, found if len(names) > 1 else [found], strict=True)}
    assert values["REPLICATE"] * values["SHARD"] == own.world and values["MICRO_BATCHES"] == own.microbatches
    assert values["LAYERS"] == ("blocks.0", "blocks.1")
    assert values["MODULES"] == ("token_embedding", "position_embedding", *values["LAYERS"], "norm", "head")
    assert values.get("PREFETCH") == (None if own.sharing == "none" else own.prefetch)
    assert text.count("reshard_after_forward=True") == (own.sharing in ("fsdp", "hsdp"))
    assert ("set_reshard_after_backward" in text) == (own.sharing == "zero1")
    assert ("set_requires_gradient_sync" in text) == (own.sharing in ("none", "zero1"))
    assert ("set_requires_all_reduce" in text) == (own.sharing == "hsdp")
    assert values["SHARD"] == {"none": 1, "hsdp": 4}.get(own.sharing, own.world)
    assert ("checkpoint_wrapper" in text) == (own.recompute != "none")


@each
@every
def test_a_file_s_head_says_both_times(name: str, target: str) -> None:
    found = exported(name, target)
    if target != "deepspeed":  # JSON has no comments
        assert re.findall(r"([\d.]+) ms", found.text)[:2] == [f"{one.makespan_ns / 1e6:.3f}" for one in (found.planned, found.exported)]
