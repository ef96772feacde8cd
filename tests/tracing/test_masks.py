"""Masks that programs compute from positions become bands of keys, causal ones ``is_causal``; all others stay."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from soap.model.graph import TensorKind
from soap.strategy.config import OpConfig
from soap.tracing import fold, rewriting
from soap.tracing.calls import argument
from soap.tracing.execute import TracedModel
from soap.tracing.importer import import_program
from soap.tracing.rules import attention as rule
from tests.extent import every
from tests.tracing.eager import assert_equal_steps
from tests.tracing.emulation import compare, draw_configs
from tests.tracing.programs import Lambda, export, imported

N = 5
Mask = Callable[[Any, Tensor], Tensor]


def _ranges(_: Any, x: Tensor) -> Tensor:
    """As ``transformers`` writes it."""
    query, key = torch.arange(N)[None, None, :, None] + 0, torch.arange(N)[None, None, None, :] + 0
    return (key <= query).expand(x.shape[0], -1, N, N)


CAUSAL: dict[str, Mask] = {
    "ranges": _ranges,
    "tril": lambda m, x: torch.ones(N, N, dtype=torch.bool).tril(),
    "added": lambda m, x: torch.full((N, N), float("-inf")).triu(1),
    "filled": lambda m, x: torch.zeros(N, N).masked_fill(torch.ones(N, N).triu(1) > 0, float("-inf"))[None, None],
    "buffer": lambda m, x: m.seen[:, :, :N, :N],
}
BANDS: dict[str, tuple[tuple[int | None, int | None], Mask]] = {
    "window": ((2, 0), lambda m, x: torch.ones(N, N, dtype=torch.bool).tril().triu(-2)),
    "window of ranges": ((1, 0), lambda m, x: _ranges(m, x) & (torch.arange(N) > torch.arange(N)[:, None] - 2)),
    "ahead": ((None, 1), lambda m, x: torch.ones(N, N, dtype=torch.bool).tril(1)),
    "both sides": ((1, 1), lambda m, x: (torch.arange(N) - torch.arange(N)[:, None]).abs() <= 1),
    "itself": ((0, 0), lambda m, x: torch.eye(N).log()),
}
ALL: dict[str, Mask] = {
    "one row": lambda m, x: torch.ones(1, N, dtype=torch.bool),
    "nothing added": lambda m, x: torch.zeros(x.shape[0], 1, N, N, dtype=torch.float64),
}
OTHERS: dict[str, Mask] = {
    "strict": lambda m, x: torch.ones(N, N, dtype=torch.bool).tril(-1),
    "one element differs": lambda m, x: m.seen[0, 0, :N, :N] ^ (torch.arange(N * N).view(N, N) == 11),
    "one sample differs": lambda m, x: _ranges(m, x) & (torch.arange(4)[:, None, None, None] + torch.arange(N) > 0),
    "one head differs": lambda m, x: torch.ones(2, N, N).tril() + torch.eye(2)[:, :1, None] > 0,
    "large, not infinite": lambda m, x: torch.full((N, N), -1e9).triu(1),
    "biased": lambda m, x: torch.full((N, N), float("-inf")).triu(1) + torch.arange(N),
    "padding": lambda m, x: torch.ones(N, N, dtype=torch.bool).tril() & (x[:, None, None, :, 0] > -9.0),
    "learned": lambda m, x: m.bias,
    "drawn": lambda m, x: (torch.rand(N, N) >= 0.0).tril(),
}


def attentive(mask: Mask) -> tuple[Lambda, Tensor]:
    """Two layers of self-attention with one mask, and samples."""

    def run(self: Any, x: Tensor) -> Tensor:
        seen = mask(self, x)
        for layer in (self.first, self.second):
            q, k, v = layer(x).view(*x.shape[:2], 3, 2, 3).permute(2, 0, 3, 1, 4)
            x = x + F.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(1, 2).flatten(2)
        return (x.square() * torch.arange(N)[:, None]).mean()

    torch.manual_seed(0)
    seen = torch.ones(1, 1, 8, 8, dtype=torch.bool).tril()
    module = Lambda(run, first=nn.Linear(6, 18), second=nn.Linear(6, 18), seen=seen, bias=nn.Parameter(torch.zeros(N, N).tril()))
    return module.double(), torch.randn(4, N, 6, dtype=torch.float64)


def attentions(model: TracedModel) -> list[tuple[bool, bool]]:
    """Of each attention: (whether it has a mask, whether it is causal)."""
    calls = [call for call in model.program.calls if call.kind == "scaled_dot_product_attention"]
    return [(argument(call, "attn_mask") is not None, bool(argument(call, "is_causal"))) for call in calls]


@pytest.mark.parametrize("mask", CAUSAL.values(), ids=CAUSAL)
def test_causal_masks_are_not_kept(mask: Mask) -> None:
    module, x = attentive(mask)
    model = imported(module, x)
    assert attentions(model) == [(False, True)] * 2
    shapes = {t.shape[-2:] for t in model.graph.tensors.values() if t.kind is TensorKind.CONSTANT}
    assert (N, N) not in shapes and shapes == {tensor.shape[-2:] for tensor in model.constants.values()}
    assert {tuple(op.skipped_share for op in model.graph.operators if op.kind == "scaled_dot_product_attention")} == {(0.5, 0.5)}


@pytest.mark.parametrize("mask", CAUSAL.values(), ids=CAUSAL)
def test_they_compute_the_same_by_tiles(mask: Mask) -> None:
    module, x = attentive(mask)
    model = imported(module, x)
    compare(model, draw_configs(model.graph, random.Random(1)))
    configs = {op.name: OpConfig((1,) * len(op.factors), (0,)) for op in model.graph.operators}
    for op in model.graph.operators:
        if op.kind == "scaled_dot_product_attention":
            configs[op.name] = OpConfig(tuple(3 if factor.name == "q" else 1 for factor in op.factors), (0,) * 3)
    compare(model, configs)
    assert_equal_steps(module, model, x)


@pytest.mark.parametrize("name", every(2, [*BANDS]))
def test_bands_are_computed_without_masks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rule, "BLOCK", 1)
    band, mask = BANDS[name]
    module, x = attentive(mask)
    model = imported(module, x)
    calls = [call for call in model.program.calls if call.kind == "scaled_dot_product_attention"]
    assert [(argument(call, "band"), argument(call, "attn_mask")) for call in calls] == [(band, None)] * 2
    assert (N, N) not in {tensor.shape[-2:] for tensor in model.constants.values()}
    compare(model, draw_configs(model.graph, random.Random(1)))
    assert_equal_steps(module, model, x)


def test_narrow_bands_skip_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of two queries see two, and four keys of five."""
    monkeypatch.setattr(rule, "BLOCK", 1)
    graph = imported(*attentive(BANDS["window"][1])).graph
    seen = 2 * 2 + 2 * 4 + 1 * 3
    assert {op.skipped_share for op in graph.operators if op.kind == "scaled_dot_product_attention"} == {1 - seen / N**2}


@pytest.mark.parametrize("mask", ALL.values(), ids=ALL)
def test_masks_that_let_all_keys_be_seen_go(mask: Mask) -> None:
    module, x = attentive(mask)
    model = imported(module, x)
    assert attentions(model) == [(False, False)] * 2 and not any(tensor.numel() > N for tensor in model.constants.values())
    assert_equal_steps(module, model, x)


@pytest.mark.parametrize("name", every(3, [*OTHERS]))
def test_other_masks_stay(name: str) -> None:
    module, x = attentive(OTHERS[name])
    assert attentions(imported(module, x)) == [(True, False)] * 2


def test_a_plan_knows_them_as_well() -> None:
    exported = export(*attentive(CAUSAL["ranges"]))
    plan, full = (import_program(exported, name="m", plan_only=only) for only in (True, False))
    assert attentions(plan) == attentions(full) == [(False, True)] * 2
    assert plan.graph.hash == full.graph.hash


@pytest.mark.parametrize("name", [*CAUSAL, "window", "window of ranges", "one element differs", "one sample differs"])
def test_large_masks_are_known_by_blocks_of_rows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows at a time; by distance alone where calls only compare positions."""
    mask = CAUSAL.get(name) or OTHERS.get(name) or BANDS[name][1]
    whole = attentions(imported(*attentive(mask)))
    for module in (fold, rewriting):
        monkeypatch.setattr(module, "LARGEST_ELEMENTS", 2 * N)
    assert attentions(imported(*attentive(mask))) == whole == [(name in OTHERS, name in CAUSAL)] * 2


def test_masks_of_a_hundred_thousand_words_take_little() -> None:
    """All pairs of them are ten thousand million."""
    size = 100_000

    def run(self: Any, x: Tensor) -> Tensor:
        query, key = torch.arange(size)[None, None, :, None] + 0, torch.arange(size)[None, None, None, :] + 0
        seen = (key <= query) & (key > query - 4096)
        return F.scaled_dot_product_attention(x * self.w, x, x, attn_mask=seen.expand(x.shape[0], -1, size, size)).sum()

    with torch.device("meta"):
        exported = export(Lambda(run, w=nn.Parameter(torch.ones(1))), torch.empty(4, 1, size, 2))
    (call,) = (call for call in import_program(exported, name="m", plan_only=True).program.calls if "attention" in call.kind)
    assert argument(call, "band") == (4095, 0)


def test_added_masks_are_held_once() -> None:
    """Attention that is written out adds one mask to all samples' scores."""
    module, x = attentive(CAUSAL["added"])

    def run(self: Any, x: Tensor) -> Tensor:
        scores = x @ x.mT + torch.full((N, N), float("-inf"), dtype=x.dtype).triu(1).expand(x.shape[0], N, N)
        return (scores.softmax(-1) @ self.first(x)).square().sum()

    module = Lambda(run, first=module.first).double()
    exported = export(module, x)
    plan, full = (import_program(exported, name="m", plan_only=only) for only in (True, False))
    assert [tuple(t.shape) for t in full.constants.values()] == [(1, N, N)] and plan.graph.hash == full.graph.hash
    compare(full, draw_configs(full.graph, random.Random(1)))
    assert_equal_steps(module, full, x)


def _padded(_: Any, x: Tensor) -> Tensor:
    """As ``transformers`` writes it: words are picked by their positions."""
    samples, words = torch.arange(x.shape[0])[:, None, None, None], torch.arange(N)[None, None, None, :]
    visible = torch.ones((), dtype=torch.bool) & (torch.arange(N)[None, None, :, None] >= 0)
    return (visible & (x[..., 0] > -0.5)[samples, words]).expand(-1, -1, N, N)


def test_padding_is_split_like_the_samples() -> None:
    module, x = attentive(_padded)
    model = imported(module, x)
    assert attentions(model) == [(True, False)] * 2 and "index" not in {call.kind for call in model.program.calls}
    shapes = {t.shape for t in model.graph.tensors.values() if t.dtype == "bool"}
    assert not any(op.kind not in ("linear", "scaled_dot_product_attention", "mul", "mean") for op in model.graph.operators)
    assert (4, 1, N, N) not in shapes
    compare(model, draw_configs(model.graph, random.Random(1)))
    assert_equal_steps(module, model, x)


def test_a_default_device_of_the_user_s_does_not_count() -> None:
    exported = export(*attentive(CAUSAL["ranges"]))
    plain = import_program(exported, name="m")
    with torch.device("meta"):
        found = import_program(exported, name="m")
    assert attentions(found) == [(False, True)] * 2 and found.graph.hash == plain.graph.hash
    assert not any(tensor.is_meta for tensor in (*found.parameters.values(), *found.constants.values()))


def test_masks_of_models_without_weights_are_known() -> None:
    with torch.device("meta"):
        exported = export(*attentive(CAUSAL["ranges"]))
    assert attentions(import_program(exported, name="m", plan_only=True)) == [(False, True)] * 2
