"""Megatron-LM's arguments, as an array for bash: ``source FILE; torchrun … pretrain_gpt.py "${PARALLEL_ARGS[@]}" …``."""

from __future__ import annotations

from soap.exported_plans.configuration import Configuration
from soap.exported_plans.contract import Target, Written
from soap.exported_plans.layers import Layers
from soap.strategy.wrapped import USUAL, Wrapped

SCHEDULES = {"1f1b": "1F1B", "interleaved": "interleaved 1F1B"}


def allows(configuration: Configuration) -> str:
    """Interleaved stages take micro-batches in rounds of as many as there are stages; fully sharded values need no pipeline here."""
    pipeline = configuration.pipeline
    if pipeline is not None and pipeline.chunks_each > 1 and configuration.microbatches % pipeline.stages:
        return f"{configuration.microbatches} micro-batches for {pipeline.stages} interleaved stages; a multiple is needed"
    if pipeline is not None and configuration.sharing in ("fsdp", "hsdp"):
        return "Megatron-FSDP with a pipeline is not written"
    return ""


def wraps(own: Configuration, layers: Layers) -> Wrapped:
    """Megatron-FSDP gathers whole transformer layers, and other modules by themselves (core/distributed/fsdp/mcore_fsdp_adapter.py). The
    distributed optimizer gathers values by buckets, one ahead of the forward passes (finish_param_sync of core/distributed)."""
    if own.sharing == "none":
        return USUAL
    return Wrapped(kept=layers.kept((), own), once=True) if own.sharing == "zero1" else Wrapped(layers.wrapped(layers.alone))


def write(written: Written) -> str:
    """The arguments."""
    own = written.configuration
    arguments: list[tuple[str, object]] = [
        ("tensor-model-parallel-size", own.tensor),
        ("pipeline-model-parallel-size", own.stages),
        ("context-parallel-size", own.context),
        ("expert-model-parallel-size", own.experts),
        *([("expert-tensor-parallel-size", own.mapping.tensor)] if own.mapping is not None else []),
        *([("moe-token-dispatcher-type", "alltoall")] if own.experts > 1 else []),
        ("micro-batch-size", own.micro_batch),
        ("global-batch-size", own.samples),
    ]
    flags = ["sequence-parallel"] if own.base == "sequence" else []
    if own.pipeline is not None:
        arguments.append(("pipeline-model-parallel-layout", layout(written)))
    if written.sequence:
        arguments.append(("seq-length", written.sequence))
    if own.sharing == "zero1":
        flags += ["use-distributed-optimizer", "overlap-grad-reduce", "overlap-param-gather"]
        arguments.append(("ddp-bucket-size", written.gathered))
    elif own.sharing in ("fsdp", "hsdp"):
        flags += ["use-megatron-fsdp", "use-distributed-optimizer"]
        arguments += [("data-parallel-sharding-strategy", "optim_grads_params"), ("ckpt-format", "fsdp_dtensor")]
        # elements; a half of them is gathered ahead (MegatronFSDP.suggested_AG_prefetch_size)
        arguments.append(("suggested-communication-unit-size", 2 * own.prefetch * written.layers.most_elements()))
        if own.sharing == "hsdp":
            arguments.append(("num-distributed-optimizer-instances", max(1, own.world // written.devices_each)))
    else:
        flags.append("overlap-grad-reduce")
        arguments.append(("ddp-bucket-size", written.summed))
    if own.offload:
        flags.append("optimizer-cpu-offload")
        arguments.append(("optimizer-offload-fraction", 1.0))
    if own.recompute == "full":
        arguments += [("recompute-granularity", "full"), ("recompute-method", "uniform"), ("recompute-num-layers", 1)]
    elif own.recompute == "selective":
        arguments.append(("recompute-granularity", "selective"))
    kind = written.autocast or written.dtype
    flags += {"bfloat16": ["bf16"], "float16": ["fp16"]}.get(kind, [])
    lines = [*(f"# {fact}" for fact in written.facts), "PARALLEL_ARGS=("]
    lines += [f"    --{name} {_quoted(value)}" for name, value in arguments] + [f"    --{name}" for name in flags]
    return "\n".join([*lines, ")"]) + "\n"


def layout(written: Written) -> str:
    """Which layers are in which chunk, in the order of the pipeline: E the embedding, t a layer, L the loss, as in ``Ett|ttL``."""
    pipeline = written.configuration.pipeline
    assert pipeline is not None
    parts = ["t" * len(written.layers.in_chunk(pipeline.chunks, chunk)) for chunk in range(max(pipeline.chunks) + 1)]
    return f"E{'|'.join(parts)}L"


def _quoted(value: object) -> str:
    text = str(value)
    return f"'{text}'" if "|" in text else text


TARGET = Target(
    "megatron", "Megatron-LM", "core 0.19.0", ".sh", ("data", "tensor", "sequence", "context", "expert", "single"),
    ("none", "zero1", "fsdp", "hsdp"), ("none", "selective", "full"), True, write, allows, SCHEDULES,
    ("sizes of the model (--num-layers, --hidden-size, …) are yours to add", "selective recomputation there is of attention alone",
     "before Blackwell, tensor and context parallelism there want CUDA_DEVICE_MAX_CONNECTIONS=1 in the environment"),
    wraps, (1, 2, 3, 4), True,
)  # fmt: skip
