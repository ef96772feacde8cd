"""What autograd keeps, worked out without values, is what it really keeps of tensors with values."""

from __future__ import annotations

import pytest
import torch

from soap.graph import RECURRENT_KINDS
from soap.tracing.importer import import_program
from soap.tracing.kept import kept_bytes
from soap.tracing.load import load_model
from tests.tracing.emulation import kept_bytes as really_kept


@pytest.mark.parametrize("name", ["alexnet", "gpt", "resnet50", "dlrm", "inception_v3"])
def test_as_with_values(name: str) -> None:
    """``emulation`` counts every piece of memory that autograd keeps; the rest of it are activations, parameters and the batch."""
    model = load_model(f"zoo:{name}:tiny")
    kept, _ = really_kept(model)
    found = sum(model.graph.kept_bytes.values())
    assert set(model.graph.kept_bytes) == {op.name for op in model.graph.operators}
    assert found <= kept <= found + sum(tensor.bytes for tensor in model.graph.tensors.values())
    assert found < sum(op.saved_bytes for op in model.graph.operators)


class Net(torch.nn.Module):
    """A linear layer, its GELU, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(self.first(x)).exp().sum()


def test_by_hand() -> None:
    model = import_program(torch.export.export(Net(), (torch.zeros(4, 6),)), name="net")
    # GELU keeps its input, which is the linear layer's output; exp keeps its result, 4 x 5 floats; GELU's result is kept by nobody.
    assert model.graph.kept_bytes == {"first": 0, "sum": 80}
    assert [op.saved_bytes for op in model.graph.operators] == [0, 160]


def test_recurrent_layers_are_left_out() -> None:
    model = load_model("zoo:rnnlm:tiny", plan_only=True)
    left_out = {op.name for op in model.graph.operators} - set(model.graph.kept_bytes)
    assert left_out == {op.name for op in model.graph.operators if op.kind in RECURRENT_KINDS} != set()


def test_with_and_without_values_alike() -> None:
    with_values, without = (load_model("zoo:gpt:tiny", plan_only=plan_only) for plan_only in (False, True))
    assert kept_bytes(with_values) == dict(without.graph.kept_bytes) == dict(with_values.graph.kept_bytes)
    assert with_values.graph.hash == without.graph.hash
