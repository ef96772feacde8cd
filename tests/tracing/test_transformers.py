"""Models of the ``transformers`` library, exported as its documentation shows: every call has a rule, and tiles give the whole."""

from __future__ import annotations

import random
import warnings
from pathlib import Path

import pytest
import torch

from soap.errors import SoapWarning
from soap.tracing.calls import TileContext
from soap.tracing.importer import import_program
from soap.tracing.load import load_model
from tests.extent import often
from tests.tracing.emulation import compare, draw_configs
from tests.transformers_models import MODELS

pytest.importorskip("transformers")

OPERATORS = {
    "gpt2": 23, "llama": 40, "llama_unpadded": 40, "mistral_unpadded": 40, "bert": 26, "vit": 27, "swin": 62, "resnet": 28, "convnext": 16,
    "t5": 73, "bart": 56, "whisper": 66, "mixtral": 69, "mixtral_batched": 69, "mamba": 62, "fnet": 19,
}  # fmt: skip
"""How many operators the calls of a model become."""
BY_TILES, AS_A_WHOLE = {"mixtral"}, {"gpt2"}
"""Experts; tied weights and a causal mask."""


@pytest.mark.parametrize("name", often(list(MODELS), BY_TILES, pytest.mark.slow))
def test_models_of_the_library(tmp_path: Path, name: str) -> None:
    torch.manual_seed(0)
    module, inputs = MODELS[name]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.export.save(torch.export.export(module, (), inputs), tmp_path / "model.pt2")
    with warnings.catch_warnings():
        warnings.simplefilter("error", SoapWarning)
        model = load_model(tmp_path / "model.pt2", dtype="float64")
    assert all(op.partitionable for op in model.graph.operators)
    assert len(model.graph.operators) == OPERATORS[name]
    assert model.graph.tensors[model.graph.loss].shape == ()
    for seed in range(3):
        compare(model, draw_configs(model.graph, random.Random(seed)))


@pytest.mark.parametrize("name", often(list(MODELS), AS_A_WHOLE, pytest.mark.slow))
def test_the_program_is_the_model(name: str) -> None:
    """Loss and gradients by the plain calls are the module's own. Not in training mode: dropout would draw other numbers."""
    torch.manual_seed(0)
    module, inputs = MODELS[name]()
    module.eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = import_program(torch.export.export(module, (), inputs, strict=False), name=name)
    expected = module(**inputs).loss
    expected.backward()
    parameters = {n: p.detach().clone().requires_grad_(model.graph.tensors[n].requires_grad) for n, p in model.parameters.items()}
    loss = model.reference_loss(model.example_inputs, parameters, TileContext(0, 0, {n: b.clone() for n, b in model.buffers.items()}))
    loss.backward()
    torch.testing.assert_close(loss, expected)
    gradients = {n: p.grad for n, p in module.named_parameters() if n in parameters}
    largest = max(float(g.abs().max()) for g in gradients.values() if g is not None)
    for n, gradient in gradients.items():
        torch.testing.assert_close(parameters[n].grad, gradient, rtol=1e-4, atol=1e-5 * largest)
