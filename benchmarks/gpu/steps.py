"""A training step on one GPU: measured, and predicted from its data sheet, from a quick measurement and from a profile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

import soap
from benchmarks.single_device import benchmark, options

PRECISIONS = {"float32": {}, "tf32": {"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1"}, "bfloat16": {}}
"""Name -> what is set in the environment. float32 is torch's default: convolutions in TF32, products of matrices in float32."""


def _bert(tiny: bool) -> tuple[nn.Module, dict[str, Any]]:
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 100}
    config = BertConfig(**sizes if tiny else {})
    words = torch.randint(3, config.vocab_size, (2, 8) if tiny else (32, 128))
    return BertForMaskedLM(config), {"input_ids": words, "labels": words.clone()}


def _llama(tiny: bool) -> tuple[nn.Module, dict[str, Any]]:
    """Llama 3.2 1B: 16 layers of width 2048, 32 heads with 8 of keys and values."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32}
    if tiny:
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    heads = sizes["num_attention_heads"] // 4
    config = LlamaConfig(**sizes, num_key_value_heads=heads, vocab_size=100 if tiny else 128_256, tie_word_embeddings=True)
    words = torch.randint(3, config.vocab_size, (2, 8) if tiny else (4, 1024))
    return LlamaForCausalLM(config), {"input_ids": words, "labels": words.clone(), "use_cache": False}


EXPORTED: dict[str, Callable[[bool], tuple[nn.Module, dict[str, Any]]]] = {"bert": _bert, "llama": _llama}
TINY = {"zoo:resnet50": "zoo:resnet50:tiny", "zoo:gpt": "zoo:gpt:tiny", "zoo:rnnlm": "zoo:rnnlm:tiny"}


def step(model: str, precision: str, profile_s: int, *, compiled: bool, tiny: bool, folder: Path, export: Path | None) -> dict[str, Any]:
    """``export``: where the profile is written to. ``folder``: of exported models, which later checks find there."""
    words = ["--profile", "1" if tiny else str(profile_s), "--steps", "4" if tiny else "12", "--rounds", "1" if tiny else "2"]
    words += ["--autocast", "bfloat16"] if precision == "bfloat16" else []
    words += ["--compile"] if compiled else []
    sheet = _sheet()
    words += ["--sheet", sheet] if sheet else []
    result = benchmark(_model(model, tiny, folder), options().parse_args(words))
    if export is not None:
        from benchmarks.accuracy import soap_profile

        soap_profile(["export", str(export)])
    return {**asdict(result), "model": model, "precision": precision, "compiled": compiled, "sheet": sheet}


def _model(name: str, tiny: bool, folder: Path) -> str:
    if name not in EXPORTED:
        return TINY.get(name, name) if tiny else name
    path = folder / f"{name}{'-tiny' * tiny}.pt2"
    if not path.exists():
        torch.manual_seed(0)
        module, inputs = EXPORTED[name](tiny)
        soap.export(module.train(), (), inputs, path=path, loss=lambda output: output.loss, verify=tiny)
    return str(path)


def _sheet() -> str | None:
    """The preset of this GPU, if there is one."""
    from soap.cluster.kinds import known_gpu
    from soap.cluster.presets import device_types

    return known_gpu(torch.cuda.get_device_name(), device_types()) if torch.cuda.is_available() else None
