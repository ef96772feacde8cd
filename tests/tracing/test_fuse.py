from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from soap.tracing.fuse import Fuser, Group
from tests.tracing.emulation import compare, draw_configs
from tests.tracing.programs import Lambda, described, imported


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(8), nn.LayerNorm(8)
        self.qkv, self.proj = nn.Linear(8, 24), nn.Linear(8, 8)
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.view(4, 6, 2, 4).transpose(1, 2) for t in self.qkv(self.norm1(x)).split(8, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(4, 6, 8))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def test_transformer_block() -> None:
    model = imported(Lambda(lambda self, x: self.block(x).square().mean(), block=Block()), torch.ones(4, 6, 8))
    operators = described(model.graph.operators)
    assert operators == [
        "block.norm1 layer_norm b0=4s b1=6a",
        "block.qkv linear b=4s b1=6a k=8r+ n=24p",
        "block.scaled_dot_product_attention scaled_dot_product_attention b=4s q=6a h=2a",
        "block.proj linear b=4s b1=6a k=8r+ n=8p",
        "block.add add d0=4s d1=6a d2=8a",  # proj gives partial sums, which layer norm's input is not
        "block.norm2 layer_norm b0=4s b1=6a",
        "block.up linear b=4s b1=6a k=8r+ n=32p",
        "block.down linear b=4s b1=6a k=32r+ n=8p",
        "mean mean d0=4s+ d1=6r+ d2=8r+",
    ]


def test_empty_parts_of_a_concatenation_are_dropped() -> None:
    """A key-value cache begins with an empty tensor."""
    program = Lambda(lambda self, x: torch.cat([torch.empty(0), self.fc(x)], -2).mean(), fc=nn.Linear(4, 6))
    model = imported(program, torch.ones(5, 4))
    assert described(model.graph.operators) == ["fc linear b=5s k=4r+ n=6p", "mean mean d0=5s+ d1=6r+"]


def test_convolution_norm_and_activation() -> None:
    layers = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2))
    model = imported(Lambda(lambda self, x: self.layers(x).flatten(1).sum(), layers=layers), torch.ones(4, 3, 6, 6))
    assert described(model.graph.operators) == [
        "layers.0 conv2d b=4s c=3r+ o=8p h=6a w=6a",
        "layers.1.batch_norm_statistics batch_norm_statistics b=4s+ c=8a h=6r+ w=6r+",
        "layers.1.batch_norm_apply batch_norm_apply b=4s c=8p h=6a w=6a",
        "layers.3 max_pool2d b=4s c=8a h=3a w=3a",
        "sum sum d0=4s+ d1=8r+",
    ]
    calls = {op.name: op.calls for op in model.graph.operators}
    assert calls["layers.1.batch_norm_apply"] == ("batch_norm", "relu_")


def test_a_partial_sum_is_not_followed_by_what_is_not_linear() -> None:
    module = Lambda(lambda self, x: self.inner(x).relu().sum(), inner=nn.Linear(4, 6))
    model = imported(module, torch.ones(2, 4))
    assert [op.calls for op in model.graph.operators] == [("linear",), ("relu", "sum_1")]
    assert [f.name for f in model.graph.operators[0].factors if f.summed] == ["k"]


def test_views_follow_a_partial_sum() -> None:
    module = Lambda(lambda self, x: self.inner(x).view(2, 3, 2).transpose(1, 2).softmax(-1).square().sum(), inner=nn.Linear(4, 6))
    model = imported(module, torch.ones(2, 4))
    assert model.graph.operators[0].calls == ("linear", "view", "transpose")
    assert described(model.graph.operators)[0] == "inner linear b=2s k=4r+ n=3p"


def test_calls_on_inputs_and_parameters_are_repeated_in_every_reader() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = x * 2
        return (F.linear(y, self.w * 3) + F.linear(y, self.v)).sum()

    model = imported(Lambda(forward, w=nn.Parameter(torch.ones(3, 4)), v=nn.Parameter(torch.ones(3, 4))), torch.ones(2, 4))
    assert sum("mul" in op.calls for op in model.graph.operators) == 2
    assert [op.kind for op in model.graph.operators].count("linear") == 2


def test_a_residual_joins_the_operator_that_comes_last() -> None:
    module = Lambda(lambda self, x: (self.b(self.a(x).relu()) + self.a(x)).tanh().sum(), a=nn.Linear(4, 4), b=nn.Linear(4, 4))
    model = imported(module, torch.ones(2, 4))
    names = [name for op in model.graph.operators for name in op.calls]
    assert sorted(names) == sorted(call.name for call in model.program.calls)  # every call in one operator


def test_pointwise_calls_move_over_a_halo_into_the_convolution() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = F.conv1d(x, self.w).relu()
        return F.conv1d(y, self.v, padding=1).sum()

    model = imported(Lambda(forward, w=nn.Parameter(torch.ones(4, 3, 1)), v=nn.Parameter(torch.ones(2, 4, 3))), torch.ones(2, 3, 6))
    assert [op.calls[:2] for op in model.graph.operators][:2] == [("conv1d",), ("relu", "conv1d_1")]
    (source,) = model.graph.operators[1].inputs
    halo = source.dims[2]
    assert (halo.scale, halo.lo, halo.hi) == (1, -1, 2)


def test_what_inputs_alone_make_is_computed_on_a_window_s_region() -> None:
    """Images are made ready before the first convolution: each tile does so with its own samples and region, halo included."""

    def forward(self: Any, images: Tensor) -> Tensor:
        ready = (images - 0.5) / 0.25
        return (self.conv(ready).square().mean() + F.avg_pool2d(ready * self.scale, 3, 1, 1).square().mean()).sqrt()

    module = Lambda(forward, conv=nn.Conv2d(3, 4, 3, padding=1), scale=nn.Parameter(torch.ones(3, 1, 1)))
    model = imported(module.double(), torch.randn(4, 3, 6, 6, dtype=torch.float64))
    convolution = next(op for op in model.graph.operators if op.kind == "conv2d")
    assert any(name.startswith("sub") for name in convolution.calls)
    assert described([convolution]) == ["conv conv2d b=4s c=3r+ o=4p h=6a w=6a"]
    (images,) = convolution.inputs
    assert images.dims[0].exact and images.dims[1].exact
    assert [(dim.scale, dim.lo, dim.hi) for dim in images.dims[2:]] == 2 * [(1, -1, 2)]
    for seed in range(6):
        compare(model, draw_configs(model.graph, random.Random(seed)))


def _shifted(tokens: Tensor) -> Tensor:
    """As encoder-decoders of libraries make the decoder's input of the labels."""
    shifted = tokens.new_zeros(tokens.shape)
    shifted[:, 1:] = tokens[:, :-1].clone()
    shifted[:, 0] = 2
    return shifted.masked_fill(shifted == -100, 1)


def _every_other(tokens: Tensor) -> Tensor:
    kept = torch.zeros_like(tokens)
    kept[:, ::2] = tokens[:, ::2]
    kept[:, 3] = kept[:, 2] + 1
    return kept


def _first_row_too(tokens: Tensor) -> Tensor:
    """Here the ways do not agree in the samples."""
    changed = tokens + 1
    return changed + changed[:1] + changed[:, :1]


def test_calls_that_come_in_along_several_ways_stay_split_where_the_ways_agree() -> None:
    tokens = torch.randint(3, 20, (4, 6))
    words = nn.Embedding(60, 8)
    for make, expected in ((_shifted, "b=4s"), (_every_other, "b=4s"), (_first_row_too, "b=4s")):
        model = imported(Lambda(lambda self, x, make=make: self.words(make(x)).square().mean(), words=words), tokens)
        (embedding,) = (line for line in described(model.graph.operators) if line.startswith("words"))
        assert f" {expected} " in embedding, make.__name__
        for seed in range(4):
            compare(model, draw_configs(model.graph, random.Random(seed)))


def test_each_further_layer_costs_as_many_looks_as_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down, self.norm = nn.Linear(4, 8), nn.Linear(8, 4), nn.LayerNorm(4)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.norm(self.down(F.gelu(self.up(x))))

    looks: list[str] = []
    uses, needs = Group.uses, Fuser._needs
    monkeypatch.setattr(Group, "uses", lambda self: looks.append("uses") or uses(self))
    monkeypatch.setattr(Fuser, "_needs", lambda self, *numbers: looks.append("needs") or needs(self, *numbers))
    counts = []
    for layers in (2, 4, 6):
        looks.clear()
        net = nn.Sequential(*(Residual() for _ in range(layers)))
        model = imported(Lambda(lambda self, x: self.net(x).mean(), net=net), torch.ones(2, 4))
        counts.append((looks.count("uses"), looks.count("needs"), len(model.graph.operators)))
    (few, few_needs, few_operators), (some, some_needs, some_operators), (many, many_needs, many_operators) = counts
    assert many - some == some - few > 0
    assert many_needs - some_needs == some_needs - few_needs > 0
    assert many_operators - some_operators == some_operators - few_operators == 2 * 3  # the norm takes the sum along
