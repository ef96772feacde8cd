"""In which type calls compute, and whose list autocast follows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from soap.api import export
from soap.errors import ModelError
from soap.model.graph import OperatorGraph
from soap.tracing.calls import TileContext
from soap.tracing.load import load_model

LOW = "bfloat16"


class Net(nn.Module):
    """One of each: a convolution with batch norm, attention, products, norms, a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.batch = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.up, self.norm, self.down = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        hidden = self.batch(self.conv(images)).flatten(2).transpose(1, 2)
        heads = self.up(hidden).unflatten(2, (4, 4)).transpose(1, 2)
        hidden = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True).transpose(1, 2).flatten(2)
        return F.cross_entropy(self.down(F.gelu(self.norm(hidden))).mean(1), labels)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.manual_seed(0)
    file = tmp_path_factory.mktemp("models") / "net.pt2"
    export(Net(), (torch.randn(2, 3, 4, 4), torch.tensor([0, 1])), path=file)
    return str(file)


def arithmetic(graph: OperatorGraph) -> dict[str, str]:
    """Operator's name -> type."""
    return {op.name: op.arithmetic for op in graph.operators}


def test_float32_as_torch_has_it(path: str) -> None:
    """Convolutions are rounded to TF32 where there is hardware for it, products are not."""
    found = arithmetic(load_model(path).graph)
    assert (found["conv"], found["up"], found["norm"], found["down"]) == ("tf32", "float32", "float32", "float32")


@pytest.mark.parametrize("precision", ["high", "medium"])
def test_products_are_rounded_if_asked_for(path: str, precision: str) -> None:
    plain, rounded = load_model(path).graph, load_model(path, matmul_precision=precision).graph
    assert torch.get_float32_matmul_precision() == precision
    found = arithmetic(rounded)
    assert (found["conv"], found["up"], found["norm"], found["down"]) == ("tf32", "tf32", "float32", "tf32")
    assert rounded.hash == plain.hash  # a plan fits both
    with pytest.raises(ModelError, match=r"^matmul precision 'low': expected one of highest, high, medium$"):
        load_model(path, matmul_precision="low")


def test_wide_and_narrow_models(path: str) -> None:
    assert set(arithmetic(load_model(path, dtype="float64").graph).values()) == {"float64"}
    narrow = arithmetic(load_model(path, dtype=LOW).graph)
    assert {narrow[name] for name in ("conv", "up", "down")} == {LOW}


@pytest.mark.parametrize(("device", "norm"), [("cpu", LOW), ("cuda", "float32")])
def test_autocast_follows_the_list_of_the_devices(path: str, device: str, norm: str) -> None:
    """Products compute in the lower type although their parameters are float32; GPUs normalise in float32."""
    graph = load_model(path, autocast=LOW, autocast_device=device).graph
    found = arithmetic(graph)
    assert {found[name] for name in ("conv", "up", "down")} == {LOW} and found["norm"] == norm
    assert {tensor.dtype for tensor in graph.parameters} == {"float32"}
    (attention,) = [op for op in graph.operators if op.kind == "scaled_dot_product_attention"]
    assert attention.arithmetic == LOW


def test_autocast_lists_are_torchs_own(path: str) -> None:
    """No GPU is needed to know what autocast does on one. Settings are as before afterwards."""
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda"), torch.is_autocast_cache_enabled()
    load_model(path, autocast=LOW, autocast_device="cuda")
    assert (torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda"), torch.is_autocast_cache_enabled()) == before
    with pytest.raises(ModelError, match=r"^autocast device 'tpu': expected cpu or cuda"):
        load_model(path, autocast=LOW, autocast_device="tpu")


def test_the_casts_of_gpus_compute_on_any_device(path: str) -> None:
    """The norm in float32 by hand: the program's casts are calls like any others."""
    torch.manual_seed(0)
    net, model = Net(), load_model(path, autocast=LOW, autocast_device="cuda")
    images, labels = model.example_inputs
    low = torch.bfloat16

    def linear(layer: nn.Linear, value: Tensor) -> Tensor:
        return F.linear(value.to(low), layer.weight.to(low), layer.bias.to(low) if layer.bias is not None else None)

    assert net.conv.bias is not None
    hidden = F.conv2d(images.to(low), net.conv.weight.to(low), net.conv.bias.to(low), padding=1)
    hidden = F.batch_norm(hidden, None, None, net.batch.weight, net.batch.bias, training=True).flatten(2).transpose(1, 2)
    heads = linear(net.up, hidden).unflatten(2, (4, 4)).transpose(1, 2)
    hidden = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True).transpose(1, 2).flatten(2)
    hidden = F.layer_norm(hidden.float(), (16,), net.norm.weight, net.norm.bias)
    expected = F.cross_entropy(linear(net.down, F.gelu(hidden)).mean(1).float(), labels)
    found = model.reference_loss([images, labels], model.parameters, TileContext(0, 0, dict(model.buffers)))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


def test_causal_attention_skips_half_and_writes_no_weights(path: str) -> None:
    (attention,) = [op for op in load_model(path).graph.operators if op.kind == "scaled_dot_product_attention"]
    assert attention.skipped_share == 0.5
    assert 0 < attention.fused_bytes <= attention.saved_bytes


def test_attention_with_dropout_writes_its_weights(tmp_path: Path) -> None:
    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            x = x * self.scale
            return F.scaled_dot_product_attention(x, x, x, dropout_p=0.5).sum()

    export(Dropping(), (torch.randn(2, 2, 8, 4),), path=tmp_path / "m.pt2", verify=False)
    (attention,) = [op for op in load_model(str(tmp_path / "m.pt2")).graph.operators if op.kind == "scaled_dot_product_attention"]
    assert (attention.skipped_share, attention.fused_bytes) == (0.0, 0)
