"""The plans of large runs, as their own trainers are told them: rows of ``golden/frontier.json``, made smaller still."""

from __future__ import annotations

import argparse
import json
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest

from benchmarks.frontier_plans import graph_of, said, strategy_of, topology_of
from soap.api.exported_plans import ExportedPlan, export_plan
from soap.exported_plans.configuration import meaning

ROWS = Path(__file__).parents[1] / "golden" / "frontier.json"
SIZES = {"layers": 2, "hidden": 128, "heads": 8, "kv_heads": 8, "ffn": 256, "vocab": 512, "seq": 32}
MIXTURE = {"gpus": 32, "dp": 8, "tp": 2, "pp": 2, "ep": 8, "etp": 1, "schedule": "1F1B", "global_batch": 32, "microbatches_per_pipeline": 4}


def exported(name: str, target: str, folder: Path, **changed: Any) -> tuple[dict[str, Any], ExportedPlan]:
    """A row with a tiny model, and what the target is told of its plan."""
    pytest.importorskip("transformers")
    row = next(row for row in json.loads(ROWS.read_text(encoding="utf-8"))["rows"] if row["id"] == name)
    sizes = {**SIZES, **({"expert_ffn": SIZES["ffn"]} if row["model"].get("experts") else {})}
    row = {**row, **changed, "model": {**row["model"], **sizes}}
    own, topology = said(row), topology_of(row)
    graph = graph_of(row, own, folder)
    found = export_plan(strategy_of(row, own, graph, topology), graph, topology, target, nearest_only=True)
    assert meaning(graph, topology, found.configuration) == found.strategy
    return row, found


def moved(found: ExportedPlan) -> list[str]:
    """Operators that the target splits otherwise, or has elsewhere."""
    differing = found.comparison.differences
    return [own.operator for own in differing if (own.first.degrees, own.first.devices) != (own.second.degrees, own.second.devices)]


def megatron(text: str) -> argparse.Namespace:
    """The arguments as Megatron-LM's parser takes them: its names, types and choices (``megatron/training/arguments.py``)."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in ("tensor-model-parallel-size", "pipeline-model-parallel-size", "context-parallel-size", "expert-model-parallel-size"):
        parser.add_argument(f"--{name}", type=int, default=1)
    for name in ("expert-tensor-parallel-size", "micro-batch-size", "global-batch-size", "seq-length", "ddp-bucket-size"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--moe-token-dispatcher-type", choices=["allgather", "alltoall", "flex"], default="allgather")
    parser.add_argument("--pipeline-model-parallel-layout")
    for name in ("sequence-parallel", "use-distributed-optimizer", "overlap-grad-reduce", "overlap-param-gather", "bf16"):
        parser.add_argument(f"--{name}", action="store_true")
    return parser.parse_args(shlex.split(text.partition("(")[2].rpartition(")")[0]))


@pytest.mark.slow
@pytest.mark.parametrize(
    "changed", [MIXTURE, pytest.param({**MIXTURE, "tp": 4, "pp": 1, "etp": None, "schedule": "none"}, marks=pytest.mark.long)]
)
def test_experts_that_lie_in_their_own_way_are_told_to_megatron(changed: dict[str, Any], tmp_path: Path) -> None:
    """A mixture whose experts are folded: divided by eight devices, where all else is split by two; or split as all else."""
    row, found = exported("folding-mixtral8x22b-tp-ep-dp-128", "megatron", tmp_path, **changed)
    told = megatron(found.text)
    assert (told.tensor_model_parallel_size, told.pipeline_model_parallel_size) == (row["tp"], row["pp"])
    assert (told.expert_model_parallel_size, told.expert_tensor_parallel_size) == (row["ep"], row["etp"] or row["tp"])
    assert (told.micro_batch_size, told.global_batch_size) == (row["micro_batch"], row["global_batch"])
    assert told.sequence_parallel and told.use_distributed_optimizer and told.bf16
    assert told.moe_token_dispatcher_type == "alltoall"  # its default gathers all tokens
    assert told.pipeline_model_parallel_layout == ("Et|tL" if row["pp"] > 1 else None)
    assert moved(found) == [] and found.notes == ()


@pytest.mark.slow
def test_selective_recomputation_with_split_sequences_is_told_to_torchtitan(tmp_path: Path) -> None:
    row, found = exported("titan-8b-64-tp8-bf16-async-2506", "torchtitan", tmp_path)
    told = tomllib.loads(found.text)
    degrees = ("tensor", "data_parallel_shard", "data_parallel_replicate", "pipeline_parallel", "context_parallel", "expert_parallel")
    names = [f"{name}_parallel_degree" if name == "tensor" else f"{name}_degree" for name in degrees]
    assert [told["parallelism"][name] for name in names] == [row["tp"], row["dp"], 1, 1, 1, 1]
    assert (told["training"]["local_batch_size"], told["training"]["global_batch_size"]) == (row["micro_batch"], row["global_batch"])
    assert told["activation_checkpoint"] == {"mode": "selective", "selective_ac_option": "op"}
    assert moved(found) == [] and found.notes == ()
