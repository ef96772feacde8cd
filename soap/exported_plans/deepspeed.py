"""DeepSpeed's configuration in JSON."""

from __future__ import annotations

import json
from math import prod
from typing import Any

from soap.exported_plans.configuration import Configuration
from soap.exported_plans.contract import Target, Written

STAGES = {"none": 0, "zero1": 2, "fsdp": 3, "hsdp": 3}
"""ZeRO's stage. Of ``zero1`` gradients are scattered as well, which is stage 2."""


def allows(configuration: Configuration) -> str:
    """AutoTP goes with ZeRO up to stage 2."""
    if configuration.tensor > 1 and configuration.sharing in ("fsdp", "hsdp"):
        return "AutoTP with ZeRO-3"
    return ""


def write(written: Written) -> str:
    """The configuration."""
    own = written.configuration
    zero: dict[str, Any] = {"stage": STAGES[own.sharing], "overlap_comm": True}
    # elements (deepspeed/runtime/zero/config.py): gradients are summed, and values gathered, in groups as large as those of the prediction
    gathers = own.sharing in ("fsdp", "hsdp")
    zero["reduce_bucket_size"] = written.gathered if gathers else written.summed
    if own.sharing == "zero1":
        zero["allgather_bucket_size"] = written.summed
    if own.sharing == "hsdp":
        zero["mics_shard_size"] = written.devices_each
    if gathers:
        largest = max(prod(tensor.shape) for tensor in written.graph.parameters)
        zero["stage3_param_persistence_threshold"] = 0  # small parameters are shared, too
        # each module that begins asks for a further group, until so many elements are there (partitioned_param_coordinator.py)
        zero["stage3_prefetch_bucket_size"] = written.gathered
        zero["stage3_max_live_parameters"] = own.prefetch * written.gathered + max(largest, written.gathered)
        zero["stage3_max_reuse_distance"] = 0  # nothing stays between the forward and the backward pass
    if own.offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    kind = written.autocast or written.dtype
    document: dict[str, Any] = {
        "train_batch_size": own.samples,
        "train_micro_batch_size_per_gpu": own.micro_batch,
        "gradient_accumulation_steps": own.microbatches,
        "bf16": {"enabled": kind == "bfloat16"},
        "fp16": {"enabled": kind == "float16"},
        "zero_optimization": zero,
    }
    if written.autocast is not None:
        document["communication_data_type"] = "fp32"  # of gradients; values travel in the narrow type
    if own.tensor > 1:
        document["tensor_parallel"] = {"autotp_size": own.tensor}
    return json.dumps(document, indent=2) + "\n"


TARGET = Target(
    "deepspeed", "DeepSpeed", "0.19.6", ".json", ("data", "tensor", "single"), ("none", "zero1", "fsdp", "hsdp"), ("none",), True, write,
    allows, {},
    ("pipelines (PipelineModule), Ulysses, experts and activation checkpointing are in the model's code there, not in the configuration",),
    depths=(1, 2, 3, 4),
)  # fmt: skip
