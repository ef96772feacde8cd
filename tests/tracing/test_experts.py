"""Mixtures of experts: as libraries build them (rows sorted by expert, grouped products), and by hand."""

from __future__ import annotations

import random
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from soap.cluster.presets import local_topology
from soap.errors import ModelError, SoapWarning
from soap.model.graph import FactorKind
from soap.strategy.classical import data_parallel
from soap.strategy.config import OpConfig
from soap.tracing.calls import TileContext
from soap.tracing.execute import TracedModel
from soap.tracing.export import export_model
from soap.tracing.importer import import_program
from soap.tracing.load import load_model
from soap.tracing.rules.experts import expert_mm, grouped_mm, rows_of_experts
from tests.tracing.emulation import compare, draw_configs
from tests.tracing.programs import export, imported

TOKENS, WIDTH, INNER, EXPERTS, CHOSEN = 12, 8, 16, 4, 2


class Experts(nn.Module):
    """Two grouped products over sorted rows, in the style that ``way`` names."""

    def __init__(self, way: Callable[..., Tensor]) -> None:
        super().__init__()
        self.way = way
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER))
        self.down = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH))
        self.bias = nn.Parameter(torch.randn(EXPERTS, INNER))

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.gate(x).softmax(-1).topk(CHOSEN)
        return self.way(self, x, weights, ids).square().mean()

    def products(self, rows: Tensor, ids: Tensor, ends: Tensor) -> Tensor:
        inner = F.grouped_mm(rows, self.up, offs=ends) + self.bias[ids]
        return F.grouped_mm(F.gelu(inner), self.down, offs=ends)


def plainly(module: Experts, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """Every token through all experts: the oracle."""
    inner = F.gelu(torch.einsum("tk,ekn->ten", x, module.up) + module.bias)
    every = torch.einsum("ten,enk->tek", inner, module.down)
    return x + (every.gather(1, ids.unsqueeze(-1).expand(-1, -1, WIDTH)) * weights.unsqueeze(-1)).sum(1)


def sorted_and_back(module: Experts, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    flat, perm = ids.reshape(-1).sort()
    ends = torch.histc(flat.float(), EXPERTS, 0, EXPERTS - 1).cumsum(0, dtype=torch.int32)
    out = module.products(x[perm // CHOSEN], flat, ends) * weights.reshape(-1)[perm].unsqueeze(-1)
    inverse = torch.empty_like(perm)
    inverse[perm] = torch.arange(perm.shape[0])
    return x + out[inverse].view(-1, CHOSEN, WIDTH).sum(1)


def added_to_tokens(module: Experts, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    flat = ids.view(-1)
    perm = torch.argsort(flat, stable=True)
    ends = torch.cumsum(F.one_hot(ids, EXPERTS).sum((0, 1)), 0).to(torch.int32)
    out = module.products(x[perm // CHOSEN], flat[perm], ends) * weights.view(-1)[perm, None]
    return x.index_add(0, perm // CHOSEN, out)


def inverted_by_a_sort(module: Experts, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    perm = ids.flatten().argsort()
    copies, flat = x.repeat_interleave(CHOSEN, 0), ids.flatten()[perm]
    ends = torch.histc(flat.float(), bins=EXPERTS, min=0, max=EXPERTS).cumsum(0).int()
    out = module.products(copies[perm], flat, ends)[perm.argsort()]
    return x + torch.einsum("tkn,tk->tn", out.unflatten(0, (-1, CHOSEN)), weights)


def read_while_sorted(module: Experts, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """A running sum over sorted rows: they cannot be anywhere else."""
    flat, perm = ids.reshape(-1).sort()
    ends = torch.histc(flat.float(), EXPERTS, 0, EXPERTS - 1).cumsum(0, dtype=torch.int32)
    return module.products(x[perm // CHOSEN], flat, ends).cumsum(0)


def summed_while_sorted(module: Experts, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    flat, perm = ids.reshape(-1).sort()
    inner = F.gelu(torch.bmm(x[perm // CHOSEN].unsqueeze(1), module.up[flat]).squeeze(1) + module.bias[flat])
    return torch.bmm(inner.unsqueeze(1), module.down[flat]).squeeze(1).cumsum(0)


def of_other_indices(module: Experts, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """Indices below zero, which nothing counts: the groups are those of other experts than the indices say."""
    flat, perm = (ids - 1).reshape(-1).sort()
    ends = torch.histc(flat.float(), EXPERTS, 0, EXPERTS - 1).cumsum(0, dtype=torch.int32)
    out = F.grouped_mm(x[perm // CHOSEN], module.up, offs=ends)
    inverse = torch.empty_like(perm)
    inverse[perm] = torch.arange(perm.shape[0])
    return out[inverse]


def other_indices_by_hand(module: Experts, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    flat, perm = (ids - 1).reshape(-1).sort()
    experts = [e for e in range(EXPERTS) for _ in range(int((flat == e).sum()))]
    rows = [row @ module.up[e] for row, e in zip(x[perm // CHOSEN], experts, strict=False)]
    out = torch.cat([torch.stack(rows), x.new_zeros(flat.shape[0] - len(rows), INNER)])
    return out[perm.argsort()]


def traced(way: Callable[..., Tensor], oracle: Callable[..., Tensor] = plainly) -> tuple[Experts, Tensor, TracedModel]:
    """The module by its oracle, and the program of what it is, in float64: torch exports grouped products in bfloat16 alone."""
    torch.manual_seed(0)
    module, x = Experts(way).bfloat16(), torch.randn(TOKENS, WIDTH, dtype=torch.bfloat16)
    model = imported(module, x)
    module.way = oracle
    return module.double(), x.double(), model


def same_as_eager(module: nn.Module, x: Tensor, model: TracedModel) -> None:
    module.zero_grad()
    expected = module(x)
    expected.backward()
    parameters = {n: p.detach().clone().requires_grad_() for n, p in model.parameters.items()}
    loss = model.reference_loss([x], parameters, TileContext(0, 0, {}))
    loss.backward()
    torch.testing.assert_close(loss, expected)
    for name, parameter in module.named_parameters():
        grad = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        made = parameters[name].grad if name in parameters else None
        torch.testing.assert_close(torch.zeros_like(grad) if made is None else made, grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("way", [sorted_and_back, added_to_tokens, inverted_by_a_sort])
def test_samples_route_their_own_rows(way: Callable[..., Tensor]) -> None:
    module, x, model = traced(way)
    products = [op for op in model.graph.operators if op.kind == "expert_mm"]
    rows, columns, sums = FactorKind.SAMPLE, FactorKind.PARAMETER, FactorKind.REDUCTION
    expected = {("s", rows, False), ("n", columns, False), ("e", sums, True), ("k", sums, True)}
    assert [{(f.name, f.kind, f.summed) for f in op.factors} for op in products] == [expected] * 2
    assert not {"sort", "argsort", "searchsorted", "histc", "index_put"} & {op.kind for op in model.graph.operators}
    same_as_eager(module, x, model)
    split = data_parallel(model.graph, local_topology(4))
    assert all(split.operators[op.name].devices == (0, 1, 2, 3) for op in products)
    for seed in range(4):
        compare(model, draw_configs(model.graph, random.Random(seed)))


@pytest.mark.parametrize(
    ("way", "oracle", "count"), [(read_while_sorted, summed_while_sorted, 2), (of_other_indices, other_indices_by_hand, 1)]
)
def test_rows_stay_sorted_where_their_order_counts(way: Callable[..., Tensor], oracle: Callable[..., Tensor], count: int) -> None:
    module, x, model = traced(way, oracle)
    products = [op for op in model.graph.operators if op.kind == "expert_mm"]
    assert len(products) == count
    assert all(f.kind is not FactorKind.SAMPLE for op in products for f in op.factors)
    same_as_eager(module, x, model)
    for seed in range(4):
        compare(model, draw_configs(model.graph, random.Random(seed)))


def test_autocast_leaves_grouped_products_alone() -> None:
    """As torch does; without values they would take bfloat16 alone."""
    torch.manual_seed(0)
    exported = export(Experts(sorted_and_back).bfloat16(), torch.randn(TOKENS, WIDTH, dtype=torch.bfloat16))
    model = import_program(exported, name="model", dtype=torch.float32, autocast=torch.bfloat16)
    products = [call for call in model.program.calls if call.target is expert_mm]
    assert [model.program.values[name].dtype for call in products for name in (*call.operands[:2], *call.outputs)] == [torch.float32] * 6


def test_other_numbers_of_samples(tmp_path: Path) -> None:
    """A program with a symbolic number of tokens; in bfloat16, in which torch exports grouped products."""
    torch.manual_seed(0)
    module, x = Experts(sorted_and_back).bfloat16(), torch.randn(TOKENS, WIDTH, dtype=torch.bfloat16)
    export_model(module, (x,), path=tmp_path / "experts.pt2", dynamic_batch=True)
    model = load_model(tmp_path / "experts.pt2", dtype="float64").resized([[TOKENS - 5, WIDTH]])
    assert [op.kind for op in model.graph.operators].count("expert_mm") == 2
    module, x = module.double(), x[5:].double()
    module.way = plainly
    loss = model.reference_loss([x], {n: p.detach() for n, p in module.named_parameters()}, TileContext(0, 0, {}))
    torch.testing.assert_close(loss, module(x).detach())


def test_experts_one_by_one() -> None:
    """An expert for each tile: every row is made by one of them."""
    _, _, model = traced(sorted_and_back)
    configs = {op.name: OpConfig((1,) * len(op.factors), (0,)) for op in model.graph.operators}
    for op in model.graph.operators:
        if op.kind == "expert_mm":
            degrees = tuple(EXPERTS if f.name == "e" else 1 for f in op.factors)
            configs[op.name] = OpConfig(degrees, (0,) * EXPERTS)
    compare(model, configs)


def test_groups_of_other_dimensions_are_kept_whole() -> None:
    """Groups of what is summed: torch's own call, in one piece."""

    class Summed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(16, 8))
            self.register_buffer("ends", torch.tensor([4, 12, 16], dtype=torch.int32))

        def forward(self, x: Tensor) -> Tensor:
            return F.grouped_mm(x, self.weight, offs=self.ends).square().mean()

    torch.manual_seed(0)
    module = Summed()
    with pytest.warns(SoapWarning, match=r"aten\._grouped_mm"):
        model = imported(module.bfloat16(), torch.randn(8, 16, dtype=torch.bfloat16))
    assert [op.partitionable for op in model.graph.operators if op.kind == "_grouped_mm"] == [False]


def test_the_operators_themselves() -> None:
    """Against products one by one, with empty groups, rows behind the last, and ids that are no expert's."""
    torch.manual_seed(0)
    x, weight = torch.randn(7, 3, dtype=torch.float64), torch.randn(4, 3, 2, dtype=torch.float64)
    ends = torch.tensor([2, 2, 5, 6])
    ids = rows_of_experts(ends, torch.arange(7))
    assert ids.tolist() == [0, 0, 2, 2, 2, 3, 4]
    expected = torch.stack([x[i] @ weight[e] if e < 4 else torch.zeros(2, dtype=torch.float64) for i, e in enumerate(ids.tolist())])
    torch.testing.assert_close(grouped_mm(x, weight, ends), expected)
    mixed = torch.tensor([3, -1, 0, 4, 2, 0, 3])
    expected = torch.stack([x[i] @ weight[e] if 0 <= e < 4 else torch.zeros(2, dtype=torch.float64) for i, e in enumerate(mixed.tolist())])
    torch.testing.assert_close(expert_mm(x, weight, mixed), expected)
    assert torch.autograd.gradcheck(lambda a, b: expert_mm(a, b, mixed), (x.requires_grad_(), weight.requires_grad_()))
    torch.library.opcheck(expert_mm, (x, weight, mixed), test_utils=("test_schema", "test_faketensor", "test_autograd_registration"))


@torch.library.custom_op("shop::contiguous", mutates_args=())
def contiguous(x: Tensor) -> Tensor:
    """Called as ATen's, which does nothing."""
    return 2 * x


contiguous.register_fake(torch.empty_like)
contiguous.register_autograd(lambda ctx, grad: 2 * grad)


@torch.library.custom_op("shop::detach", mutates_args=())
def detach(x: Tensor) -> Tensor:
    """Called as ATen's, which stops gradients."""
    return 3 * x


detach.register_fake(torch.empty_like)
detach.register_autograd(lambda ctx, grad: 3 * grad)


@pytest.mark.parametrize("own", [contiguous, detach])
def test_operators_of_others_are_not_taken_for_atens(own: Callable[[Tensor], Tensor]) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return own(self.linear(x)).square().mean()

    torch.manual_seed(0)
    module, x = Net().double(), torch.randn(6, 4, dtype=torch.float64)
    with pytest.warns(SoapWarning, match=rf"shop\.{own._opoverload._schema.name.split('::')[1]}"):  # type: ignore[attr-defined]
        model = imported(module, x)
    same_as_eager(module, x, model)


class Loop(nn.Module):
    """Top-2 of four experts in a loop, with the loss that balances them. ``picks``: only the tokens of an expert go through it."""

    def __init__(self, picks: bool) -> None:
        super().__init__()
        self.picks = picks
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, INNER), nn.GELU(), nn.Linear(INNER, WIDTH)) for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        probabilities = self.gate(x).softmax(-1)
        weights, ids = probabilities.topk(CHOSEN)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            if self.picks:
                token, place = torch.where(ids == number)
                out = out.index_add(0, token, expert(x[token]) * weights[token, place, None])
            else:
                out = out + expert(x) * (weights * (ids == number)).sum(-1, keepdim=True)
        share = F.one_hot(ids, EXPERTS).sum(1).to(x.dtype).mean(0)
        return out.square().mean() + 0.01 * EXPERTS * (share * probabilities.mean(0)).sum()


def test_experts_in_a_loop_over_all_tokens() -> None:
    torch.manual_seed(0)
    module, x = Loop(picks=False).double(), torch.randn(TOKENS, WIDTH, dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("error", SoapWarning)
        model = imported(module, x)
    same_as_eager(module, x, model)
    for seed in range(4):
        compare(model, draw_configs(model.graph, random.Random(seed)))


def test_experts_in_a_loop_over_their_tokens_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError) as refused:
        export_model(nn.Sequential(Loop(picks=True)), (torch.randn(TOKENS, WIDTH),), path=tmp_path / "loop.pt2")
    where = r"test_experts\.py:\d+ \(token, place = torch\.where\(ids == number\)\)"
    assert re.search(rf"depends on data \(u0, at .*{where}\)", str(refused.value))
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "loop.pt2").exists()


EXPORTED_ELSEWHERE = """
import sys, torch
from tests.transformers_models import MODELS
torch.manual_seed(0)
module, inputs = MODELS[sys.argv[1]]()
torch.export.save(torch.export.export(module, (), inputs, strict=False), sys.argv[2])
"""


@pytest.mark.long
def test_operators_of_transformers_are_read_without_it(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    path = tmp_path / "mixtral.pt2"
    command = [sys.executable, "-W", "ignore", "-c", EXPORTED_ELSEWHERE, "mixtral", str(path)]
    subprocess.run(command, check=True, capture_output=True)
    known = hasattr(torch.ops.transformers, "grouped_mm_fallback")
    with warnings.catch_warnings():
        warnings.simplefilter("error", SoapWarning)
        model = load_model(path, dtype="float64")
    assert hasattr(torch.ops.transformers, "grouped_mm_fallback") == known  # reading defines nothing of the library's
    assert sum(op.kind == "expert_product" for op in model.graph.operators) == 4
    for seed in range(3):
        compare(model, draw_configs(model.graph, random.Random(seed)))
