"""The rows of large runs as models, clusters and strategies."""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import soap
from benchmarks.layers import LAYER, by_layers
from benchmarks.published import preset_name, selected
from benchmarks.published_models import built
from benchmarks.told import kernels_told
from soap import api
from soap.api.float8 import in_float8
from soap.api.models import planned_graph
from soap.cluster.build import build_cluster
from soap.cluster.presets import Shape, describe_family, device_types, families
from soap.cluster.topology import Topology
from soap.errors import ModelError
from soap.model.graph import OperatorGraph
from soap.model.other_batch import with_samples
from soap.simulator.kernels import Kernels
from soap.strategy.config import Strategy
from soap.strategy.grids import grouped, positions_of_loss
from soap.strategy.megatron import ExpertMapping, hybrid
from soap.strategy.named import ADDED
from soap.strategy.recomputation import RECOMPUTED, gathering_again, in_micro_batches, recomputed, with_repeatable_levels

Row = Mapping[str, Any]

ADAM_STATES = 6
"""Tensors of a 16-bit parameter's size that Adam keeps in mixed precision: the parameter and its two moments in float32."""

CLUSTERS = {
    "A100-SXM4-80GB": "a100-80gb",
    "H100-SXM5-80GB": "h100",
    "H100-SXM5-80GB 700 W": "h100",
    "H100 96GB HBM2e (2.4 TB/s), 500 W limit": "h100-96gb-500w",
    "H200-SXM 141GB": "h200",
    "B200 180GB": "b200",
    "GB200 NVL72": "gb200",
    "GB200 NVL72 (186 GB)": "gb200",
}
"""GPU of a row -> family of presets."""

FLOAT8 = {
    "fp8": "delayed", "FP8-MX": "mx", "MXFP8": "mx", "FP8": "tensorwise", "float8": "tensorwise",
}  # fmt: skip
"""Beginning of a row's precision -> how linear layers are scaled in float8 (``soap.api.float8``). Rows of Transformer Engine before 2025
have delayed scaling, its default; those of Megatron-Bridge are of the recipe that it calls current scaling, or of blocks."""

DOMAIN = 64
"""GPUs of a GB200 NVL72 rack that a run takes: all rows have so many, or a multiple of it, and none says which racks."""

NETWORKS = {
    "Jean Zay": {"nics": 4, "bandwidth": "100 Gbit/s"},
    "2 Tb/s RoCE per host": {"nics": 8, "bandwidth": "250 Gbit/s"},
}
"""Beginning of a row's interconnect -> NICs of a host, and what each has, where that differs from the family's."""

OPEN = ("RoCE between hosts (rate not stated)", "not stated")
"""Beginnings of interconnects whose rate between hosts is taken to be the family's."""


EACH_LAYER_A_CHUNK = "zb"
"""The source whose interleaved pipelines have a layer in each chunk, and one layer less on the first and on the last stage (2401.10241,
section 5.1)."""


@dataclass(frozen=True)
class Said:
    """A row as SOAP has it. ``lacking``: what cannot be said yet, in words; empty if all can. ``assumed``: where its source is silent."""

    lacking: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()
    precision: str = ""
    float8: str = ""
    schedule: str = ""
    sharding: str = ""
    recompute: str = ""
    microbatches: int = 1

    @property
    def flows(self) -> bool:
        """Whether a device begins its next step before the others have ended theirs: the zero-bubble runs' optimizers wait for no sum over
        all devices (2401.10241, section 4)."""
        return self.schedule.startswith("zb")


def said(row: Row) -> Said:
    """What a row asks for."""
    lacking, assumed = [], []
    precision = str(row["precision"])
    float8 = next((scaling for text, scaling in FLOAT8.items() if precision.startswith(text)), "")
    if not float8 and not precision.lower().startswith(("bf16", "fp16")):
        lacking.append(precision)
    if precision == "fp8" or precision.startswith("FP8 ("):
        assumed.append(f"float8: {float8} scaling")
    if row["gpu"] not in CLUSTERS:
        lacking.append(f"cluster of {row['gpu']}")
    elif CLUSTERS[row["gpu"]] == "gb200":
        assumed.append(f"{DOMAIN} GPUs of each NVLink domain")
    if row["interconnect"].startswith(OPEN):
        assumed.append("network between hosts: that of the GPU's preset")
    schedule, virtual = str(row["schedule"]), row["virtual_stages"] or 1
    name = "1f1b"
    if row["pp"] > 1:
        if row.get("source") == EACH_LAYER_A_CHUNK:
            virtual = (row["model"]["layers"] + 2) // row["pp"]
        if schedule.startswith("ZB"):
            name = schedule.lower()
        elif row.get("source") in VIRTUAL and row["virtual_stages"] is None:
            virtual = middle_divisor(row["model"]["layers"] // row["pp"])
            name = f"interleaved:{virtual}" if virtual > 1 else "1f1b"
            assumed.append("virtual stages: the middle one of those that divide a stage's layers")
        elif schedule.startswith("interleaved") and virtual > 1:
            name = f"interleaved:{virtual}"
        elif schedule.startswith("interleaved"):
            assumed.append("virtual stages: none")
    sharding = str(row["sharding"])
    how = "none"
    if sharding.startswith(("ZeRO-1", "distributed optimizer")):
        how = "zero1"
    elif (sharding.startswith("FSDP") and "not resharded" not in sharding) or sharding == f"Megatron-FSDP over {row['dp']}":
        how = "fsdp"
    elif sharding != "none" and not sharding.startswith("none"):
        lacking.append(f"sharding {sharding}")
    if row["tp"] > 1 and row.get("source") in SEQUENCE_PARALLEL and not _says_sequence(row):
        assumed.append("sequence parallelism with tensor parallelism")
    again, recompute = str(row["recompute"]), "none"
    if again.startswith("full"):
        recompute = "full"
    elif again == "selective (per op)":
        recompute = "selective_op"
    elif again.startswith("selective (every second layer)"):
        recompute = "second"
    elif again.startswith("selective (attention core)"):
        recompute = "attention"
    elif not again.startswith("none"):
        assumed.append("recomputation: none")
    batch, size = row["global_batch"], row["micro_batch"]
    parts = row["microbatches_per_pipeline"]
    if not parts:
        if size:
            parts = batch // (size * row["dp"])
        elif row["pp"] > 1:
            lacking.append("micro-batch")
        parts = parts or 1
    dtype = "float16" if precision.startswith("fp16") else "bfloat16"
    return Said(tuple(lacking), tuple(assumed), dtype, float8, name, how, recompute, parts)


SEQUENCE_PARALLEL = ("titan", "bridge", "nemo", "folding")
"""Sources whose trainers have sequence parallelism wherever they have tensor parallelism: torchtitan's ``apply_tp``, recipes of NeMo and of
Megatron-Bridge, mixtures of experts of Megatron Core (its ``moe/README.md``: "sequence parallelism must be used")."""
VIRTUAL = ("folding",)
"""Sources that print no virtual stages, of trainers whose guide has them in each pipeline: of Megatron Core's mixtures (``moe/README.md``,
performance guide: as many as divide a stage's layers, empirically a value in the middle)."""


def middle_divisor(number: int) -> int:
    """The middle one of a number's divisors; the higher one of two."""
    divisors = [own for own in range(1, number + 1) if number % own == 0]
    return divisors[len(divisors) // 2]


def _says_sequence(row: Row) -> bool:
    return "sequence" in f"{row['recompute']} {row['kernels']}"


def kernels_of(row: Row) -> Kernels:
    """How a row's light calls run."""
    return kernels_told(str(row["kernels"]))


FUSED_NORM = ("RMS kernel", "Transformer Engine", "torch.compile")
"""In a row's kernels: its norms are one kernel each."""


def kind_of_attention(row: Row) -> str:
    """``flash`` or ``plain``."""
    kernels = str(row["kernels"])
    return "plain" if "no flash" in kernels or kernels.startswith("Megatron fused kernels") else "flash"


SIZES = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq", "gated_mlp", "head_dim", "tied")
"""Of a row's model, those that decide about its graph."""
EXPORTED = 64
"""Samples of exported models; rows have others (``with_samples``)."""
OF_EXPERTS = ("experts", "top_k", "expert_ffn", "shared_experts", "first_dense_layers", "attention")
"""Further ones of mixtures."""


def key_of(row: Row, own: Said) -> dict[str, Any]:
    """What decides about a row's graph."""
    names = (*SIZES, *(OF_EXPERTS if row["model"].get("experts") else ()))
    sizes = {name: row["model"].get(name) for name in names}
    written = {"attention": kind_of_attention(row), "fused_norm": any(name in row["kernels"] for name in FUSED_NORM)}
    return {**sizes, "precision": own.precision, **written}


def graph_of(row: Row, own: Said, folder: Path) -> OperatorGraph:
    """The row's model, exported into the folder unless it is there."""
    key = key_of(row, own)
    path = folder / f"{hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]}.pt2"
    if not path.exists():
        logging.getLogger("transformers").setLevel(logging.ERROR)
        with torch.device("meta"):
            module, (args, kwargs), loss = built(_model(key), EXPORTED)
            for name, part in module.named_modules() if key["gated_mlp"] and key["fused_norm"] else ():
                if name.endswith("norm"):
                    part.__class__ = FusedNorm
            soap.export(module.to(getattr(torch, own.precision)).train(), args, kwargs, path=path, loss=loss, verify=False)
    graph = with_samples(planned_graph(path, autocast_device="cuda"), row["global_batch"])
    if isinstance(graph, str):
        raise ModelError(f"{row['id']}: {graph}")
    return in_float8(graph, topology_of(row), own.float8) if own.float8 else graph


class FusedNorm(nn.Module):
    """A norm by its root mean square, as one call."""

    weight: torch.Tensor
    variance_epsilon: float

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The normed input."""
        return torch.nn.functional.rms_norm(hidden_states, hidden_states.shape[-1:], self.weight, self.variance_epsilon)


def _model(key: Mapping[str, Any]) -> dict[str, Any]:
    """The model as ``published_models`` has it."""
    flash, shared = key["attention"] == "flash", {"sequence": key["seq"], "tied": bool(key["tied"])}
    if not key["gated_mlp"]:
        sizes = {"vocabulary": key["vocab"], "width": key["hidden"], "heads": key["heads"], "layers": key["layers"], "dropout": 0.0}
        return {"builder": "gpt", "attention": "fused" if flash else "plain", **sizes, **shared}
    config = {
        "vocab_size": key["vocab"], "hidden_size": key["hidden"], "intermediate_size": key["ffn"], "num_hidden_layers": key["layers"],
        "num_attention_heads": key["heads"], "num_key_value_heads": key["kv_heads"], "max_position_embeddings": key["seq"],
        "tie_word_embeddings": shared["tied"], "head_dim": key["head_dim"] or key["hidden"] // key["heads"],
    }  # fmt: skip
    name = _mixture(key, config) if key.get("experts") else "LlamaForCausalLM"
    own = {"class": name, "config": config, "attention": "sdpa" if flash else "eager", "inputs": "language_model"}
    return {"builder": "transformers", **own, **shared}


def _mixture(key: Mapping[str, Any], config: dict[str, Any]) -> str:
    """The class of a mixture of experts; its sizes are added to ``config``."""
    config |= {"num_experts_per_tok": key["top_k"], "moe_intermediate_size": key["expert_ffn"]}
    if key["shared_experts"]:  # latent attention: without a head's size, and with DeepSeek's ranks by default
        del config["head_dim"]
        config |= {"n_routed_experts": key["experts"], "n_shared_experts": key["shared_experts"]}
        config |= {"first_k_dense_replace": key["first_dense_layers"]}
        return "DeepseekV3ForCausalLM"
    if key["expert_ffn"] != key["ffn"]:
        config |= {"num_experts": key["experts"]}
        return "Qwen3MoeForCausalLM"
    config |= {"num_local_experts": key["experts"]}
    return "MixtralForCausalLM"


def topology_of(row: Row) -> Topology:
    """The row's cluster: a preset, or that with the row's own network."""
    family = CLUSTERS[row["gpu"]]
    each = DOMAIN if family == "gb200" else row["gpus_per_host"]
    name = preset_name(family, row["gpus"] // each, each)
    own = next((own for text, own in NETWORKS.items() if row["interconnect"].startswith(text)), None)
    if own is None:
        return api.load_cluster(name)
    description = describe_family(Shape(family, row["gpus"] // each, each), families())
    description["hosts"][0]["nics"] = description["network"]["rails"] = own["nics"]
    description["network"]["bandwidth"] = own["bandwidth"]
    return build_cluster({"name": f"{name} on {own['nics']} x {own['bandwidth']}", **description}, device_types(), row["id"])


def strategy_of(row: Row, own: Said, graph: OperatorGraph, topology: Topology) -> Strategy:
    """The row's plan."""
    lays = {
        "tensor": row["tp"], "microbatches": own.microbatches, "context": row["cp"] or 1,
        "scatters": row["tp"] > 1 and (_says_sequence(row) or row.get("source") in SEQUENCE_PARALLEL),
        "experts": None if not row.get("ep") else ExpertMapping(row["ep"], row["etp"] or row["tp"]),
    }  # fmt: skip
    if row["pp"] > 1:
        strategy = by_layers(graph, topology, stages=row["pp"], schedule=own.schedule, **lays)
    else:
        strategy = hybrid(graph, topology, **lays)
        strategy = in_micro_batches(graph, strategy, own.microbatches)
    if row.get("source") in WHOLE_SCORES:
        strategy = with_whole_scores(graph, strategy)
    if own.sharding != "none":
        strategy = ADDED[own.sharding](graph, topology, strategy)
    if own.recompute == "full":
        strategy = recomputed(graph, strategy)
    elif own.recompute == "selective_op":
        strategy = with_repeatable_levels(graph, strategy, selected(graph))
    elif own.recompute == "second":
        strategy = with_repeatable_levels(graph, strategy, {name: RECOMPUTED for name in _second_layers(graph, strategy)})
    elif own.recompute == "attention":
        names = [op.name for op in graph.operators if "attention" in op.name and op.kind != "linear"]
        strategy = with_repeatable_levels(graph, strategy, dict.fromkeys(names, RECOMPUTED))
    again = own.recompute != "none" or (lays["scatters"] and GATHERED_AGAIN.search(str(row["kernels"])) is not None)
    return gathering_again(graph, strategy) if again else strategy


WHOLE_SCORES = ("aleph",)
"""Sources in whose trainers each device of a group takes the loss of all scores of its samples: Aleph Alpha's ``TransformerLMHead`` of
``scaling`` gathers them (``parallel_output`` is off), and ``CrossEntropyLoss`` reads all of them in float32."""


def with_whole_scores(graph: OperatorGraph, strategy: Strategy) -> Strategy:
    """The strategy whose losses are not split along positions: devices that shared these do the same."""
    changed = {}
    for op in graph.operators:
        config = strategy.operators[op.name]
        factor = positions_of_loss(op, 2)
        if factor is not None and config.degrees[factor] > 1:
            changed[op.name] = grouped(op, config.devices, config.degrees[factor])
    return strategy.with_changes(operators=changed)


GATHERED_AGAIN = re.compile("Megatron|Transformer Engine")
"""In a row's kernels: linear layers that keep their part of what they gather (Megatron's
``LinearWithGradAccumulationAndAsyncCommunication``, Transformer Engine's). Others keep what they read, unless it is recomputed: Aleph
Alpha's ``column_parallel_linear.py`` of ``scaling``, torchtitan's DTensors."""


def _second_layers(graph: OperatorGraph, strategy: Strategy) -> list[str]:
    whole = recomputed(graph, strategy)
    found = []
    for op in graph.operators:
        layer = LAYER.search(op.name)
        if whole.operators[op.name] != strategy.operators[op.name] and layer is not None and int(layer[1]) % 2:
            found.append(op.name)
    return found

