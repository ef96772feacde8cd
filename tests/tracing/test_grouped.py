"""Keys and values that a program repeats for the queries' heads become grouped queries; other copies stay."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from soap.tracing.calls import argument
from soap.tracing.execute import TracedModel
from tests.tracing.eager import assert_equal_steps
from tests.tracing.emulation import compare, draw_configs
from tests.tracing.programs import Lambda, imported

HEADS, TIMES = 2, 3
Repeat = Callable[[Tensor], Tensor]


def repeated(x: Tensor) -> Tensor:
    """As ``transformers`` writes it."""
    b, h, s, d = x.shape
    return x[:, :, None, :, :].expand(b, h, TIMES, s, d).reshape(b, h * TIMES, s, d)


def tiled(x: Tensor) -> Tensor:
    """All heads, again and again."""
    b, h, s, d = x.shape
    return x[:, None].expand(b, TIMES, h, s, d).reshape(b, h * TIMES, s, d)


def attentive(key: Repeat, value: Repeat, masked: bool = False) -> tuple[Lambda, Tensor]:
    """Causal self-attention of six heads with two of keys and values, and samples."""

    def run(self: Any, x: Tensor) -> Tensor:
        n = x.shape[1]
        q = self.q(x).view(4, n, HEADS * TIMES, 4).transpose(1, 2)
        k, v = (layer(x).view(4, n, HEADS, 4).transpose(1, 2) for layer in (self.k, self.v))
        seen = torch.ones(n, n, dtype=torch.bool).tril(-1 if masked else 0) | torch.eye(n, dtype=torch.bool)[:, :1]
        y = F.scaled_dot_product_attention(q, key(k), value(v), attn_mask=seen if masked else None, is_causal=not masked)
        return (y.transpose(1, 2).flatten(2) * torch.arange(24)).square().mean()

    torch.manual_seed(0)
    module = Lambda(run, q=nn.Linear(6, HEADS * TIMES * 4), k=nn.Linear(6, HEADS * 4), v=nn.Linear(6, HEADS * 4))
    return module.double(), torch.randn(4, 5, 6, dtype=torch.float64)


def is_grouped(model: TracedModel) -> bool:
    (call,) = (call for call in model.program.calls if call.kind == "scaled_dot_product_attention")
    return bool(argument(call, "enable_gqa"))


@pytest.mark.parametrize("seed", range(3))
def test_repeated_heads_are_groups(seed: int) -> None:
    module, x = attentive(repeated, repeated)
    model = imported(module, x)
    assert is_grouped(model) and not any(call.kind in ("expand", "unsqueeze") for call in model.program.calls)
    compare(model, draw_configs(model.graph, random.Random(seed)))


def test_they_compute_what_the_module_does() -> None:
    module, x = attentive(repeated, repeated)
    model = imported(module, x)
    assert_equal_steps(module, model, x)


@pytest.mark.parametrize(
    ("key", "value", "masked"),
    [(tiled, tiled, False), (repeated, tiled, False), (repeated, repeated, True)],
    ids=["tiled", "one of them", "with a mask"],
)
def test_other_copies_stay(key: Repeat, value: Repeat, masked: bool) -> None:
    model = imported(*attentive(key, value, masked))
    assert not is_grouped(model)
    compare(model, draw_configs(model.graph, random.Random(1)))
