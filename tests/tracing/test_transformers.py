"""Models of the ``transformers`` library, exported as its documentation shows: every call has a rule, and tiles give the whole."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from soap.errors import SoapWarning
from soap.tracing.load import load_model
from tests.tracing.emulation import compare, draw_configs

transformers: Any = pytest.importorskip("transformers")

SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def _text() -> dict[str, torch.Tensor]:
    return {"input_ids": torch.randint(0, 50, (4, 8)), "labels": torch.randint(0, 50, (4, 8))}


def _images(size: int) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(4, 3, size, size), "labels": torch.randint(0, 5, (4,))}


def _gpt2() -> tuple[Any, dict[str, Any]]:
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=50, n_positions=16, bos_token_id=0, eos_token_id=1)
    return transformers.GPT2LMHeadModel(config), {**_text(), "use_cache": False}


def _resnet() -> tuple[Any, dict[str, Any]]:
    config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], num_labels=5)
    return transformers.ResNetForImageClassification(config), _images(32)


def _vit() -> tuple[Any, dict[str, Any]]:
    config = transformers.ViTConfig(**SMALL, image_size=16, patch_size=4, num_labels=5)
    return transformers.ViTForImageClassification(config), _images(16)


def _bert() -> tuple[Any, dict[str, Any]]:
    config = transformers.BertConfig(**SMALL, vocab_size=50)
    return transformers.BertForMaskedLM(config), {**_text(), "attention_mask": torch.ones(4, 8, dtype=torch.long)}


def _llama() -> tuple[Any, dict[str, Any]]:
    config = transformers.LlamaConfig(**SMALL, num_key_value_heads=2, vocab_size=50)
    return transformers.LlamaForCausalLM(config), {**_text(), "use_cache": False}


@pytest.mark.parametrize(("make", "operators"), [(_gpt2, 23), (_resnet, 28), (_vit, 27), (_bert, 27), (_llama, 40)])
def test_models_of_the_library(tmp_path: Path, make: Callable[[], tuple[Any, dict[str, Any]]], operators: int) -> None:
    torch.manual_seed(0)
    module, inputs = make()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.export.save(torch.export.export(module.train(), (), inputs), tmp_path / "model.pt2")
    with warnings.catch_warnings():
        warnings.simplefilter("error", SoapWarning)
        model = load_model(tmp_path / "model.pt2", dtype="float64")
    assert all(op.partitionable for op in model.graph.operators)
    assert len(model.graph.operators) == operators
    assert model.graph.tensors[model.graph.loss].shape == ()
    for seed in range(3):
        compare(model, draw_configs(model.graph, random.Random(seed)))
