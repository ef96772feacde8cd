"""torchtitan's job configuration in TOML, as its 0.2 releases read it."""

from __future__ import annotations

import json
from math import gcd

from soap.exported_plans.configuration import Configuration
from soap.exported_plans.contract import Target, Written
from soap.exported_plans.layers import Layers
from soap.strategy.wrapped import USUAL, Wrapped

SCHEDULES = {"1f1b": "1F1B", "gpipe": "GPipe", "interleaved": "Interleaved1F1B"}


def allows(configuration: Configuration) -> str:
    """Context and expert parallelism share parameters in the same groups."""
    if configuration.base in ("context", "expert") and configuration.sharing == "none":
        return f"{configuration.base} parallelism shards parameters"
    if configuration.base == "context" and configuration.sharing == "zero1":
        return "context parallelism shards values, too"
    return ""


def write(written: Written) -> str:
    """The configuration: what of it concerns the plan."""
    own = written.configuration
    replicate, shard = replicas(written)
    training: dict[str, object] = {
        "local_batch_size": own.samples // own.data,
        "global_batch_size": own.samples,
        **({"seq_len": written.sequence} if written.sequence else {}),
        "dtype": written.dtype if written.dtype == "bfloat16" else "float32",
        "mixed_precision_param": "bfloat16" if "bfloat16" in (written.autocast, written.dtype) else "float32",
        "enable_cpu_offload": own.offload,
    }
    if own.pipeline is None and own.microbatches > 1:
        training["local_batch_size"] = own.micro_batch  # the rest of the global batch is accumulated
    parallelism: dict[str, object] = {
        "data_parallel_replicate_degree": replicate,
        "data_parallel_shard_degree": shard,
        "fsdp_reshard_after_forward": "never" if own.sharing == "zero1" else "default",  # which is never in a pipeline
        "tensor_parallel_degree": own.tensor,
        "context_parallel_degree": own.context,
        "expert_parallel_degree": own.experts,
        "pipeline_parallel_degree": own.stages,
    }
    if own.pipeline is not None:
        chunks = own.pipeline.chunks
        parallelism["pipeline_parallel_schedule"] = SCHEDULES[own.pipeline.schedule.partition(":")[0]]
        parallelism["pipeline_parallel_microbatch_size"] = own.micro_batch
        parallelism["module_fqns_per_model_part"] = [written.layers.modules(chunks, chunk) for chunk in range(max(chunks) + 1)]
    checkpointing: dict[str, object] = {"mode": own.recompute}
    if own.recompute == "selective":
        checkpointing["selective_ac_option"] = "op"
    sections = {"training": training, "parallelism": parallelism, "activation_checkpoint": checkpointing}
    lines = [f"# {fact}" for fact in written.facts]
    for name, values in sections.items():
        lines += ["", f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items())]  # JSON's values are TOML's here
    return "\n".join(lines) + "\n"


def wraps(own: Configuration, layers: Layers) -> Wrapped:
    """As its models' ``apply_fsdp`` (torchtitan/models/llama3/infra/parallelize.py): the embeddings, each block, and the norm and output
    together, which stay by default; always one ahead, as ``fully_shard`` does by itself. Without sharing it is DDP, in buckets."""
    if own.sharing == "none":
        return USUAL
    modules = (layers.before, *((name,) for name in layers.names), layers.after)
    return Wrapped(layers.wrapped(modules), layers.kept(modules, own))


def replicas(written: Written) -> tuple[int, int]:
    """How many copies of all parameters there are, and in how many parts each is, not counting context parallelism."""
    own = written.configuration
    if own.sharing == "none":
        return own.data, 1
    if own.sharing != "hsdp":
        return 1, own.data
    inside = gcd(own.data, max(1, written.devices_each // (own.tensor * own.context)))
    return own.data // inside, inside


TARGET = Target(
    "torchtitan", "torchtitan", "0.2.2", ".toml", ("data", "sequence", "context", "expert", "single"), ("none", "zero1", "fsdp", "hsdp"),
    ("none", "selective", "full"), False, write, allows, SCHEDULES,
    ("later versions than 0.2 are configured in Python, by fields of the same names",
     "names in module_fqns_per_model_part are this model's: torchtitan's own models call theirs tok_embeddings, layers.N, norm, output",
     "selective recomputation makes every second product of matrices again there; the price has all of them kept",
     "without a pipeline each micro-batch sums gradients anew there; of hsdp between hosts, and of none, the price has that once a step"),
    wraps,
)  # fmt: skip
